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

void GroupedMlpBackwardByOps(const Context& ctx, const GroupedMlpProblem& p,
                             const GroupedMlpBackwardArgs& args) {
  const GroupedMlpGradients& out = args.out;
  const GroupedTensor dy{args.dy, args.split_sizes};
  const Tensor act = out.dw2 ? ctx.Empty({p.max_rows, p.ffn}, p.dtype) : Tensor();
  const Output dpre = args.dpre ? args.dpre : Write(ctx.Empty({p.max_rows, 2 * p.ffn}, p.dtype));
  {
    const Tensor dact = ctx.Empty({p.max_rows, p.ffn}, p.dtype);
    GroupedGemmDgrad(ctx, dy, args.w2, Write(dact));
    SwiGluBackward(ctx, dact, args.pre, args.row_scale, args.split_sizes, dpre, out.dscale,
                   act ? Write(act) : Output{});
  }
  if (out.dw2) GroupedGemmWgrad(ctx, dy, {act, args.split_sizes}, out.dw2);
  const GroupedTensor dp{dpre.tensor, args.split_sizes};
  if (out.dw1) GroupedGemmWgrad(ctx, dp, {args.x, args.split_sizes}, out.dw1);
  if (out.dx) GroupedGemmDgrad(ctx, dp, args.w1, out.dx);
}

GroupedMlpImpl CudaGroupedMlp() {
  return {"cuda",
          FloatsOnCuda<GroupedMlpProblem>,
          {GroupedMlpForwardByOps, GroupedMlpBackwardByOps},
          DeviceType::kCuda};
}

}  // namespace cistron::ops::internal
