// What the CUDA implementations of products take, with and without CUDA in the build.
#pragma once

#include "cistron/ops/implementation.h"

namespace cistron::ops::internal {

template <class Problem>
Support GemmCudaSupports(const Problem& p) {
  if (p.in_dtype == DType::kF64 || p.in_dtype == DType::kF32 || p.in_dtype == DType::kBF16) {
    return Support::Yes();
  }
  return Support::No(fmt::format("dtype {} is not one of f64, f32, bf16", Name(p.in_dtype)));
}

}  // namespace cistron::ops::internal
