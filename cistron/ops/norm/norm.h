// norm: RMSNorm over the last dimension, optionally of a sum (residual connection).
//
//   h = x + residual (rounded to the dtype; h = x where residual is undefined)
//   r = rsqrt(mean(h²) + eps);  y = h·r·g
//   dh = r·(g·dy − h·r²·mean(g·dy·h)) (+ dh_in);   dg = Σ_rows dy·h·r
//
// Shapes: x, residual, h, y, dy, dh [T, H]; g, dg [H]; rstd [T] in the compute type.
// Dtypes: f64, f32, bf16 for x, y, g; dg in the compute type. Computed in f32 (f64 for f64).
// Alias:  h may be x or residual; dh may be dy or dh_in. Rows may be strided.
// Empty:  without rows dg is zeros in Write. dg may be undefined where g is frozen.
// Order:  dg sums fixed blocks of rows in a fixed order, so it does not depend on the number of
//         threads.
// Source: Zhang & Sennrich, "Root mean square layer normalization", 2019.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

// `h` may be undefined when residual is; `rstd` may be undefined when no backward follows.
void RmsNormForward(const Context& ctx, const Tensor& x, const Tensor& residual, const Tensor& g,
                    double eps, const Tensor& h, const Tensor& rstd, const Output& y);

// `dh_in`, if defined, is the gradient that reaches h by another path (the residual stream); it is
// added to dh, and may be the same tensor as dh.
void RmsNormBackward(const Context& ctx, const Tensor& dy, const Tensor& h, const Tensor& rstd,
                     const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg);

struct RmsNormProblem {
  DType dtype;
  std::int64_t rows, width;
};
struct RmsNormRun {
  void (*forward)(const Context&, const Tensor& x, const Tensor& residual, const Tensor& g,
                  double eps, const Tensor& h, const Tensor& rstd, const Output& y);
  void (*backward)(const Context&, const Tensor& dy, const Tensor& h, const Tensor& rstd,
                   const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg);
};
using RmsNormImpl = Implementation<RmsNormProblem, RmsNormRun>;
std::span<const RmsNormImpl> RmsNormImpls();

}  // namespace cistron::ops
