// Combining one value from each rank, in the order of the ranks.
#pragma once

#include <cstdint>
#include <span>

#include "cistron/base/dtype.h"
#include "cistron/comm/operation.h"

namespace cistron::comm {

// The dtypes that reductions take: f32, f64, bf16, i64.
bool CanReduce(DType dtype);

// out[i] = sources[0][i] ∘ sources[1][i] ∘ … for i in [0, count), from the left.
// Sums of bf16 are taken in fp32 and rounded once, at the end; those of f32 in fp32, of f64 in
// fp64; those of i64 wrap. Max and min are NaN where any source is. `out` may be one of the
// sources, and overlaps no other. Throws kUnsupported for other dtypes.
void ReduceInOrder(ReduceOp reduce, DType dtype, std::span<const std::byte* const> sources,
                   std::int64_t count, std::byte* out);

}  // namespace cistron::comm
