// What the plain CUDA kernels take: the answers are the same in a build without CUDA, so that the
// support matrix is.
#pragma once

#include "cistron/ops/implementation.h"

namespace cistron::ops::internal {

template <class Problem>
Support FloatsOnCuda(const Problem& problem) {
  if (problem.dtype == DType::kF64 || problem.dtype == DType::kF32 ||
      problem.dtype == DType::kBF16) {
    return Support::Yes();
  }
  return Support::No("only f64, f32 and bf16");
}

}  // namespace cistron::ops::internal
