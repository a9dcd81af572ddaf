// The implementations of router; private to this folder.
#pragma once

#include <vector>

#include "cistron/ops/router/router.h"

namespace cistron::ops {

extern const RouterImpl kRouterCuda;
extern const RouterImpl kRouterCpu;
extern const RouterImpl kRouterRef;

// Rows of the statistics: one, or one a sequence.
inline std::int64_t NumScopes(const PackedSequences& scopes) {
  return scopes.cu_seqlens ? scopes.num_sequences() : 1;
}

}  // namespace cistron::ops
