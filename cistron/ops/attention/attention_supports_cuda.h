// What attention's CUDA implementation takes, with and without CUDA in the build.
#pragma once

#include "cistron/ops/attention/attention.h"
#include "cistron/ops/cuda/supports.h"

namespace cistron::ops::internal {

// Tiles of whole heads lie in shared memory.
inline constexpr std::int64_t kAttentionCudaHeadDim = 256;

inline Support AttentionCudaSupports(const AttentionProblem& p) {
  if (p.config.head_dim > kAttentionCudaHeadDim) {
    return Support::No(
        fmt::format("head_dim {} is above {}", p.config.head_dim, kAttentionCudaHeadDim));
  }
  return FloatsOnCuda(p);
}

}  // namespace cistron::ops::internal
