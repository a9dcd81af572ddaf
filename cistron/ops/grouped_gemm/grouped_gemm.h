// grouped_gemm: one product per group (expert) over ragged rows.
//
// Group e owns n_e = split_sizes[e] consecutive rows, after those of the groups before it.
//   Forward  y_e  [n_e, N]  = x_e [n_e, K] · w[e]ᵀ                 w [E, N, K]
//   Dgrad    dx_e [n_e, K]  = dy_e [n_e, N] · w[e]
//   Wgrad    dw[e] [N, K] (= or +=) dy_eᵀ [N, n_e] · x_e [n_e, K]
//
// Any counts: 0, 1, 7, 33, all rows on one expert. Rows beyond Σ n_e are neither read nor written.
// An empty group's dw is written as zeros in Write and left alone in Accumulate. Dtypes: as gemm
// (f64, f32, bf16; dw f32 for bf16 operands, or bf16). split_sizes i64 [E]. Errors:
// kInvalidArgument with the values when shapes do not fit, a count is negative, or the counts
//         sum to more than the rows. Counts on a device are not read by the host: its kernels cut a
//         negative count to 0 and counts beyond the rows to those that there are, and dy's counts
//         stand for x's.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/tensor/grouped_tensor.h"

namespace cistron::ops {

void GroupedGemmForward(const Context& ctx, const GroupedTensor& x, const Tensor& w,
                        const Output& y);
void GroupedGemmDgrad(const Context& ctx, const GroupedTensor& dy, const Tensor& w,
                      const Output& dx);
void GroupedGemmWgrad(const Context& ctx, const GroupedTensor& dy, const GroupedTensor& x,
                      const Output& dw);

// As GroupedGemmWgrad in Write, and returns partial sums of the squares of what dw then holds, f64
// [n] in a fixed order, where the implementation makes them as it stores; else an undefined tensor.
// Their sum is within a relative 8·2^-24 of Σ dw², which is summed in f64 of f32 squares: squares
// of up to eight neighbours are added in f32. Two calls give the same bits.
Tensor GroupedGemmWgradWithSquares(const Context& ctx, const GroupedTensor& dy,
                                   const GroupedTensor& x, const Tensor& dw);

enum class GroupedGemmKind { kForward, kDgrad, kWgrad };
struct GroupedGemmProblem {
  GroupedGemmKind kind;
  DType in_dtype;
  DType out_dtype;
  std::int64_t groups, max_rows, n, k;
  bool aligned = true;  // tensors and their rows begin at multiples of 16 bytes
};
struct GroupedGemmRun {
  // a and b are the operands in the order of the formulas above, c the result.
  void (*run)(const Context&, const GroupedGemmProblem&, const Tensor& split_sizes, const Tensor& a,
              const Tensor& b, const Output& c);
  // Of kWgrad: GroupedGemmWgradWithSquares. Null: it makes no sums.
  Tensor (*wgrad_with_squares)(const Context&, const GroupedGemmProblem&, const Tensor& split_sizes,
                               const Tensor& dy, const Tensor& x, const Tensor& dw) = nullptr;
};
using GroupedGemmImpl = Implementation<GroupedGemmProblem, GroupedGemmRun>;
std::span<const GroupedGemmImpl> GroupedGemmImpls();

}  // namespace cistron::ops
