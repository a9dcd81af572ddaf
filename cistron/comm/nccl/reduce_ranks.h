// Combining what ranks sent, in their order, on a GPU: reduce.h for device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cistron/base/dtype.h"
#include "cistron/comm/operation.h"

namespace cistron::comm::nccl {

// One part from each of `ranks` ranks: this one's by itself, the others' in one block.
struct RankParts {
  const void* own = nullptr;
  const void* received = nullptr;  // the part of rank r begins `stride` elements times r later
  std::int64_t stride = 0;
  int rank = 0, ranks = 1;
};

// out[i] = part 0 [i] ∘ part 1 [i] ∘ … for i in [0, count), from the left, queued on the stream;
// `out` may be the own part. Precision, NaN and dtypes (f32, f64, bf16, i64): as ReduceInOrder.
void ReduceRanks(ReduceOp reduce, DType dtype, const RankParts& parts, std::int64_t count,
                 void* out, cudaStream_t stream);

}  // namespace cistron::comm::nccl
