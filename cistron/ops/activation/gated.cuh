// a·σ(z) and its slope on a GPU: the one place where they are computed, so that fused kernels give
// the bits of the activation alone.
#pragma once

#include <type_traits>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

// 2^x within 2^-22 of it and 1 / x within 1 unit in the last place, by the multifunction unit;
// what is subnormal is 0.
__device__ inline float ApproximateExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float ApproximateReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// σ(z) of a tensor of T. For bf16 in four instructions, since these kernels are bound by them: the
// exponent is rounded, so that e, and σ of a large negative z, is wrong by |z|·2^-24 of it and
// little more, 2^-9 of which is lost anyway; below −88 σ is 0. Else through exp(−|z|), which does
// not overflow and loses nothing of a small σ.
template <class T>
__device__ inline Compute<T> Sigmoid(Compute<T> z) {
  using C = Compute<T>;
  if constexpr (std::is_same_v<T, bf16>) {
    constexpr float kLog2E = 1.44269504f;
    return ApproximateReciprocal(1 + ApproximateExp2(z * -kLog2E));
  } else {
    const C e = exp(z < 0 ? z : -z);
    return (z < 0 ? e : C(1)) / (C(1) + e);
  }
}

// G, G', U and U' of one element.
template <class C>
struct GatedValues {
  C gate, gate_slope, up, up_slope;
};

// a·σ(z(a)) has the slope σ + (1 − σ)·σ·a·z'; `az_slope` is a·z'.
template <class T>
__device__ inline GatedValues<Compute<T>> Gated(Compute<T> a, Compute<T> z, Compute<T> az_slope,
                                                Compute<T> up) {
  using C = Compute<T>;
  const C sigma = Sigmoid<T>(z);
  return {a * sigma, fma(sigma * az_slope, C(1) - sigma, sigma), up, C(1)};
}

}  // namespace cistron::ops::internal
