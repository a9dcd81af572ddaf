// Elements of tensors in kernels: read in the compute type, rounded once when written.
#pragma once

#include <cuda_bf16.h>

#include "cistron/base/dtype.h"
#include "cistron/ops/context.h"

namespace cistron::ops::internal {

__device__ inline double Value(double x) {
  return x;
}
__device__ inline float Value(float x) {
  return x;
}
__device__ inline float Value(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

// Round to nearest even, NaN stays NaN.
template <class T>
__device__ inline T Rounded(Compute<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return bf16::FromBits(__bfloat16_as_ushort(__float2bfloat16_rn(x)));
  } else {
    return x;
  }
}

// to = x, or to += x.
template <class T>
__device__ inline void StoreElement(T& to, Compute<T> x, bool accumulate) {
  to = Rounded<T>(accumulate ? Value(to) + x : x);
}

inline bool Accumulates(const Output& out) {
  return out.mode == WriteMode::kAccumulate;
}

// Pointer of an optional tensor.
template <class T>
T* DataOrNull(const Tensor& t) {
  return t ? t.data<T>() : nullptr;
}

}  // namespace cistron::ops::internal
