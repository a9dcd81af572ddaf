// The map of rows on a GPU; private to this folder.
#pragma once

#include "cistron/ops/permute/permute.h"

namespace cistron::ops::internal {

RowMap BuildRowMapCuda(const Context& ctx, const Tensor& experts, std::int64_t num_experts);

}  // namespace cistron::ops::internal
