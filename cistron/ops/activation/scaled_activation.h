// scaled activation: the activations of expert MLPs, each with or without one scale a row (the
// router's probability). activation.h is its first kind in the plain layout, which the fuser takes.
//
//   y = G(a)·U(b)·s       a: gate, b: up; s = 1 where row_scale is undefined; σ the logistic
//   function
//   swiglu          G = a·σ(a)                                    U = b
//   clamped_swiglu  G = a'·σ(alpha·a'), a' = min(a, limit)        U = min(max(b, −limit), limit) +
//   1 geglu           G = a·σ(2·√(2/π)·(a + 0.044715·a³))           U = b       (GELU, tanh form)
//   srelu           G = max(a, 0)²                                no up: U = 1
//   da = dy·s·U·G';  db = dy·s·G·U';  ds = Σ_j dy·G·U
// A clamp passes no gradient outside its limits and all of it at them.
//
// Shapes: x, dx [M, 2F] ([M, F] for srelu); y, dy [M, F]; row_scale, dscale [M], compute type.
// Layout: glu_interleave_size = g > 0: x is blocks of g gate columns, then the g up columns of the
//         same elements, and so on; g must divide F. 0: all gate columns, then all up columns.
// Dtypes: f64, f32, bf16; computed in f32 (f64 for f64), one rounding.
// Rows:   only the first Σ split_sizes rows are touched when split_sizes (i64 [E]) is defined.
// Counts
//         on a device are read there, and clamped to the rows there are.
// NaN stays NaN, through clamps too.
// Sources: Shazeer, "GLU variants improve Transformer", 2020; gpt-oss (alpha 1.702, limit 7);
// So et al., "Primer", 2021 (squared ReLU).
#pragma once

#include <string_view>

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

enum class ActivationKind { kSwiGlu, kClampedSwiGlu, kGeGlu, kSRelu };
inline constexpr ActivationKind kActivationKinds[] = {
    ActivationKind::kSwiGlu, ActivationKind::kClampedSwiGlu, ActivationKind::kGeGlu,
    ActivationKind::kSRelu};
// "swiglu", "clamped_swiglu", "geglu", "srelu".
std::string_view Name(ActivationKind kind);
// Whether x has up columns.
constexpr bool IsGated(ActivationKind kind) {
  return kind != ActivationKind::kSRelu;
}

struct ActivationConfig {
  ActivationKind kind = ActivationKind::kSwiGlu;
  std::int64_t glu_interleave_size = 0;
  double limit = 7.0, alpha = 1.702;  // clamped_swiglu
};

void ScaledActivationForward(const Context& ctx, const ActivationConfig& config, const Tensor& x,
                             const Tensor& row_scale, const Tensor& split_sizes, const Output& y);

// Undefined dscale: not computed. With `y_out` defined the scaled activation is written again.
void ScaledActivationBackward(const Context& ctx, const ActivationConfig& config, const Tensor& dy,
                              const Tensor& x, const Tensor& row_scale, const Tensor& split_sizes,
                              const Output& dx, const Output& dscale, const Output& y_out);

struct ScaledActivationProblem {
  DType dtype;
  ActivationConfig config;
  std::int64_t rows, width;  // M, F
};
struct ScaledActivationRun {
  void (*forward)(const Context&, const ActivationConfig&, const Tensor& x, const Tensor& row_scale,
                  const Tensor& split_sizes, const Output& y);
  void (*backward)(const Context&, const ActivationConfig&, const Tensor& dy, const Tensor& x,
                   const Tensor& row_scale, const Tensor& split_sizes, const Output& dx,
                   const Output& dscale, const Output& y_out);
};
using ScaledActivationImpl = Implementation<ScaledActivationProblem, ScaledActivationRun>;
std::span<const ScaledActivationImpl> ScaledActivationImpls();

}  // namespace cistron::ops
