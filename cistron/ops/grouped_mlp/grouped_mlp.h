// grouped_mlp: the SwiGLU MLP of every group (expert) over its own rows, in one pass.
//
//   P = x · w1[e]ᵀ;  A = silu(gate)·up·s;  y = A · w2[e]ᵀ            P = [gate | up]
//   dA = dy · w2[e];  (dP, ds, A) from (dA, P, s);  dx = dP · w1[e]
//   dw1[e] (= or +=) dPᵀ · x;  dw2[e] (= or +=) dyᵀ · A
// It stands for grouped_gemm, activation, grouped_gemm one after another (see those for formulas
// and roundings: P, A, dA and dP are rounded to the dtype). On a CPU no buffer holds A, dA or dP of
// all groups, unless one group has all the rows; on a GPU they are held for the length of the call.
//
// Shapes: x, dx [M, H]; y, dy [M, N]; P [M, 2F]; w1, dw1 [E, 2F, H]; w2, dw2 [E, N, F]; s, ds [M]
//         compute type; split_sizes i64 [E].
// Rows:   those beyond Σ split_sizes are neither read nor written.
// Empty:  a group without rows has zeros written to dw1 and dw2, or nothing added.
// Dtypes: f64, f32, bf16; dw1 and dw2 both in the compute type, or both in that of w.
// Bits:   independent of which thread computes what; the products' own depend on how many rows
//         oneDNN is given at a time, which is not as in grouped_gemm.
// Errors: kInvalidArgument with the values when shapes or counts do not fit.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/deferred_output.h"
#include "cistron/ops/implementation.h"
#include "cistron/tensor/grouped_tensor.h"

namespace cistron::ops {

struct GroupedMlpWeights {
  Tensor w1, w2;
};

// `pre` is P for the backward pass; undefined: it is not kept. An undefined row_scale is 1.
void GroupedMlpForward(const Context& ctx, const GroupedTensor& x, const GroupedMlpWeights& weights,
                       const Tensor& row_scale, const Tensor& pre, const Output& y);

struct GroupedMlpGradients {
  DeferredOutput dx{};  // undefined, as the others: not computed
  Output dscale{};
  DeferredOutput dw1{}, dw2{};  // both or neither
  // Told what GroupedGemmWgradWithSquares says of dw1 and dw2 where they are written and the
  // implementation makes them; null: not wanted.
  std::function<void(const Tensor&)> dw1_squares{}, dw2_squares{};
  // Where it is given, a GPU queues dx, and dscale, before dw1 and dw2, and calls it then; a CPU
  // does not call it.
  std::function<void()> dx_ready{};
};
// On a GPU memory is held as briefly as can be: dw2 is asked for when A is there, then A and dy are
// let go of, dw1 is asked for, x is let go of, dx is asked for; what the caller has moved in is
// freed by that. P is used up: dP may be written in its place.
void GroupedMlpBackward(const Context& ctx, GroupedTensor dy, Tensor x, Tensor pre,
                        const GroupedMlpWeights& weights, const Tensor& row_scale,
                        GroupedMlpGradients gradients);

// The second half alone, where P comes from elsewhere: y = A · w2[e]ᵀ with A = silu(gate)·up·s.
// `act` is A for the backward pass; undefined: it is not kept.
void SwiGluLinearForward(const Context& ctx, const GroupedTensor& pre, const Tensor& w2,
                         const Tensor& row_scale, const Tensor& act, const Output& y);
// dP and, where asked for, ds. The weight gradient is grouped_gemm's, of dy and A.
void SwiGluLinearBackward(const Context& ctx, const GroupedTensor& dy, const Tensor& pre,
                          const Tensor& w2, const Tensor& row_scale, const Output& dpre,
                          const Output& dscale);

struct GroupedMlpProblem {
  DType dtype;
  std::int64_t groups, max_rows, hidden, ffn, out;  // E, M, H, F, N
  bool aligned = true;  // tensors and their rows begin at multiples of 16 bytes
};
// The second half alone has no w1: then pre is an operand, and backward leaves dP in dpre.
struct GroupedMlpForwardArgs {
  Tensor split_sizes, x, w1, w2, row_scale, pre, act;
  Output y;
};
struct GroupedMlpBackwardArgs {
  Tensor split_sizes, dy, x, pre, w1, w2, row_scale;
  GroupedMlpGradients out;
  Output dpre;
};
struct GroupedMlpRun {
  void (*forward)(const Context&, const GroupedMlpProblem&, const GroupedMlpForwardArgs&);
  // The arguments are the implementation's to let go of.
  void (*backward)(const Context&, const GroupedMlpProblem&, GroupedMlpBackwardArgs&&);
};
using GroupedMlpImpl = Implementation<GroupedMlpProblem, GroupedMlpRun>;
std::span<const GroupedMlpImpl> GroupedMlpImpls();

}  // namespace cistron::ops
