// activation: SwiGLU, with or without one scale a row (the router's probability).
//
//   x = [a | b]  (a: gate, first F columns; b: up),  σ = sigmoid(a)
//   y  = a·σ · b · s                                  s = 1 where row_scale is undefined
//   da = dy·s·b·σ·(1 + a·(1 − σ));  db = dy·s·a·σ;  ds = Σ_j dy·a·σ·b
//
// Shapes: x, dx [M, 2F]; y, dy [M, F]; row_scale, dscale [M] in the compute type.
// Dtypes: f64, f32, bf16; computed in f32 (f64 for f64), one rounding.
// Rows:   only the first Σ split_sizes rows are touched when split_sizes (i64 [E]) is defined.
// Counts
//         on a device are read there, and clamped to the rows there are.
// Source: Shazeer, "GLU variants improve Transformer", 2020.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

void SwiGluForward(const Context& ctx, const Tensor& x, const Tensor& row_scale,
                   const Tensor& split_sizes, const Output& y);

// Undefined dscale: not computed. With `y_out` defined the scaled activation y is written again as
// well: it is the operand of the second product's weight gradient, so that forward need not keep
// it.
void SwiGluBackward(const Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& row_scale,
                    const Tensor& split_sizes, const Output& dx, const Output& dscale,
                    const Output& y_out);

struct SwiGluProblem {
  DType dtype;
  std::int64_t rows, width;  // M, F
};
struct SwiGluRun {
  void (*forward)(const Context&, const Tensor& x, const Tensor& row_scale,
                  const Tensor& split_sizes, const Output& y);
  void (*backward)(const Context&, const Tensor& dy, const Tensor& x, const Tensor& row_scale,
                   const Tensor& split_sizes, const Output& dx, const Output& dscale,
                   const Output& y_out);
};
using SwiGluImpl = Implementation<SwiGluProblem, SwiGluRun>;
std::span<const SwiGluImpl> SwiGluImpls();

}  // namespace cistron::ops
