// What attention through cuDNN takes, with and without CUDA in the build.
#pragma once

#include "cistron/ops/attention/attention.h"
#include "cistron/ops/attention/attention_cudnn_shape.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::ops::internal {

// Backward takes heads of up to 128 values on every architecture.
inline constexpr std::int64_t kCudnnHeadDim = 128;

// Whether cuDNN itself is there is asked after this, and only where a GPU is in use
// (CudnnMissing).
template <bool kDeterministic>
Support AttentionCudnnSupports(const AttentionProblem& p) {
  if (p.dtype != DType::kBF16) return Support::No("only bf16");
  if (p.config.head_dim > kCudnnHeadDim || p.config.head_dim % 8 != 0) {
    return Support::No(fmt::format("head_dim {} is not a multiple of 8 up to {}", p.config.head_dim,
                                   kCudnnHeadDim));
  }
  const CudnnShape shape = CudnnShapeOf(p);
  if (kDeterministic) {
    const std::int64_t bytes = CudnnScoreBytes(shape, p.config.num_heads / p.config.num_kv_heads);
    if (bytes > kCudnnScoreBytes) {
      return Support::No(
          fmt::format("deterministic backward would keep {} MiB of score gradients for one "
                      "key/value head of {} sequences of up to {} tokens, above {} MiB",
                      bytes >> 20, shape.batch, shape.length, kCudnnScoreBytes >> 20));
    }
  }
  const int capability = cuda::ComputeCapability(), major = capability / 10;
  if (capability != 0 && capability < 80) {
    return Support::No("it needs a GPU of compute capability 8.0");
  }
  // cudnn-frontend refuses the one and cuDNN before 9.18.1 the other.
  if (kDeterministic && shape.ragged && (major == 8 || major == 12)) {
    return Support::No(
        fmt::format("no deterministic backward of sequences of different lengths on a GPU of "
                    "compute capability {}.{}",
                    major, capability % 10));
  }
  return Support::Yes();
}

}  // namespace cistron::ops::internal
