// grouped_mlp on a GPU: the products and activations of all groups at once, with the best kernel of
// each. What it spares beside the three ops is memory: the activation is not kept for backward,
// which makes it again, scaled, in the pass that makes dP.
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/grouped_mlp/grouped_mlp_impls.h"

namespace cistron::ops::internal {

void GroupedMlpForwardByOps(const Context& ctx, const GroupedMlpProblem& p,
                            const GroupedMlpForwardArgs& args) {
  const Tensor pre = args.pre ? args.pre : ctx.Empty({p.max_rows, 2 * p.ffn}, p.dtype);
  const Tensor act = args.act ? args.act : ctx.Empty({p.max_rows, p.ffn}, p.dtype);
  if (args.w1) GroupedGemmForward(ctx, {args.x, args.split_sizes}, args.w1, Write(pre));
  SwiGluForward(ctx, pre, args.row_scale, args.split_sizes, Write(act));
  GroupedGemmForward(ctx, {act, args.split_sizes}, args.w2, args.y);
}

namespace {

void WeightGradient(const Context& ctx, const GroupedTensor& dy, const GroupedTensor& x,
                    const Output& dw, const std::function<void(const Tensor&)>& take_squares) {
  if (!take_squares || dw.mode != WriteMode::kWrite) return GroupedGemmWgrad(ctx, dy, x, dw);
  if (const Tensor squares = GroupedGemmWgradWithSquares(ctx, dy, x, dw.tensor)) {
    take_squares(squares);
  }
}

}  // namespace

void GroupedMlpWeightAndInputGradients(const Context& ctx, GroupedMlpBackwardArgs&& args,
                                       const Tensor& dpre, Tensor act) {
  const GroupedMlpGradients& out = args.out;
  const GroupedTensor dp{dpre, args.split_sizes};
  const bool dx_first = out.dx && out.dx_ready;
  if (dx_first) {
    GroupedGemmDgrad(ctx, dp, args.w1, out.dx.Get());
    out.dx_ready();
  }
  if (out.dw2) {
    WeightGradient(ctx, {args.dy, args.split_sizes}, {act, args.split_sizes}, out.dw2.Get(),
                   out.dw2_squares);
  }
  act = {};
  args.dy = {};
  if (out.dw1) {
    WeightGradient(ctx, dp, {args.x, args.split_sizes}, out.dw1.Get(), out.dw1_squares);
  }
  args.x = {};
  if (out.dx && !dx_first) GroupedGemmDgrad(ctx, dp, args.w1, out.dx.Get());
}

void GroupedMlpBackwardByOps(const Context& ctx, const GroupedMlpProblem& p,
                             GroupedMlpBackwardArgs&& args) {
  Tensor act = args.out.dw2 ? ctx.Empty({p.max_rows, p.ffn}, p.dtype) : Tensor();
  const Output dpre = args.dpre ? args.dpre : Write(ctx.Empty({p.max_rows, 2 * p.ffn}, p.dtype));
  {
    const Tensor dact = ctx.Empty({p.max_rows, p.ffn}, p.dtype);
    GroupedGemmDgrad(ctx, {args.dy, args.split_sizes}, args.w2, Write(dact));
    SwiGluBackward(ctx, dact, args.pre, args.row_scale, args.split_sizes, dpre, args.out.dscale,
                   act ? Write(act) : Output{});
  }
  args.pre = {};
  GroupedMlpWeightAndInputGradients(ctx, std::move(args), dpre.tensor, std::move(act));
}

GroupedMlpImpl CudaGroupedMlp() {
  return {"cuda",
          FloatsOnCuda<GroupedMlpProblem>,
          {GroupedMlpForwardByOps, GroupedMlpBackwardByOps},
          DeviceType::kCuda};
}

}  // namespace cistron::ops::internal
