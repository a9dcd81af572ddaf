// quantized_gemm: products of quantised operands, dense or one a group (expert).
//
//   Forward  y  [M, N] = x [M, K] · wᵀ       x row-wise,     w [N, K] row-wise
//   Dgrad    dx [M, K] = dy [M, N] · w       dy row-wise,    w column-wise
//   Wgrad    dw [N, K] = dyᵀ · x             dy column-wise, x column-wise
// Grouped: x, dy have split_sizes [G] and w, dw are [G, N, K]; group e owns n_e rows, any counts;
// rows beyond Σ n_e are neither read nor written; an empty group's dw is zeros in Write.
//
// MXFP8:    Σ over blocks of 2^(ca−127) · 2^(cb−127) · Σ qa·qb, accumulated in f32
// kTensor:  (Σ qa·qb) · scale_a · scale_b
// blocks:   the partial sum of every 128 is multiplied by both scales and added in f32
// Operands: both MXFP8 (strips or squares), both kTensor, or both blocks of 128, with the same
// parts
//           along the summed dimension; formats may differ (e4m3 · e5m2).
// Dtypes:   results f32 or bf16, rounded once, after adding to what is there in Accumulate.
// Errors:   kInvalidArgument when shapes, groups, scalings or parts do not fit or a copy is
// missing.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

void QuantizedGemmForward(const Context& ctx, const QuantizedTensor& x, const QuantizedTensor& w,
                          const Output& y);
void QuantizedGemmDgrad(const Context& ctx, const QuantizedTensor& dy, const QuantizedTensor& w,
                        const Output& dx);
void QuantizedGemmWgrad(const Context& ctx, const QuantizedTensor& dy, const QuantizedTensor& x,
                        const Output& dw);

enum class QuantizedGemmKind { kForward, kDgrad, kWgrad };
struct QuantizedGemmProblem {
  QuantizedGemmKind kind;
  Scaling a_scaling, b_scaling;
  DType a_format, b_format;
  DType out_dtype;
  std::int64_t groups, max_rows, n, k;
};
struct QuantizedGemmRun {
  // a and b are the operands in the order of the formulas above; c [M, N] or [M, K] or [G, N, K].
  void (*run)(const Context&, const QuantizedGemmProblem&, const QuantizedTensor& a,
              const QuantizedTensor& b, const Output& c);
};
using QuantizedGemmImpl = Implementation<QuantizedGemmProblem, QuantizedGemmRun>;
std::span<const QuantizedGemmImpl> QuantizedGemmImpls();

}  // namespace cistron::ops
