// What the plain CUDA kernels take: the answers are the same in a build without CUDA, so that the
// support matrix is.
#pragma once

#include "cistron/ops/implementation.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::ops::internal {

template <class Problem>
Support FloatsOnCuda(const Problem& problem) {
  if (problem.dtype == DType::kF64 || problem.dtype == DType::kF32 ||
      problem.dtype == DType::kBF16) {
    return Support::Yes();
  }
  return Support::No("only f64, f32 and bf16");
}

// Kernels for one architecture: no on a GPU of another one. Where no GPU is used the answer is that
// of a GPU which has it.
inline Support NeedsComputeCapability(int needed) {
  const int here = cuda::ComputeCapability();
  if (here == 0 || here == needed) return Support::Yes();
  return Support::No(fmt::format("it needs a GPU of compute capability {}.{}, this one has {}.{}",
                                 needed / 10, needed % 10, here / 10, here % 10));
}

// Kernels for one architecture and all later ones.
inline Support NeedsComputeCapabilityFrom(int least) {
  const int here = cuda::ComputeCapability();
  if (here == 0 || here >= least) return Support::Yes();
  return Support::No(
      fmt::format("it needs a GPU of compute capability {}.{} or later, this one has {}.{}",
                  least / 10, least % 10, here / 10, here % 10));
}

}  // namespace cistron::ops::internal
