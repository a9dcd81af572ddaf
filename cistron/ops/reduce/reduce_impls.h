// The implementations of reduce; private to this folder.
#pragma once

#include "cistron/ops/reduce/reduce.h"

namespace cistron::ops {

extern const ReduceImpl kReduceCpu;
extern const ReduceImpl kReduceRef;

// Elements of one block: partial sums are made a block at a time, then added in the order of the
// blocks.
inline constexpr std::int64_t kReduceBlock = 4096;

// out (= or +=) value.
void StoreScalar(const Output& out, double value);

}  // namespace cistron::ops
