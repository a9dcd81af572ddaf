// grouped_mlp, reference: the ops that it stands for, over whole tensors.
#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/grouped_mlp/grouped_mlp_impls.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

GroupedGemmProblem Product(const GroupedMlpProblem& p, GroupedGemmKind kind, const Output& out,
                           std::int64_t n, std::int64_t k) {
  return {kind, p.dtype, out.tensor.dtype(), p.groups, p.max_rows, n, k};
}

Support Supports(const GroupedMlpProblem& p) {
  return SwiGluRefSupports({p.dtype, p.max_rows, p.ffn});
}

void Forward(const Context& ctx, const GroupedMlpProblem& p, const GroupedMlpForwardArgs& args) {
  const Tensor pre = args.pre ? args.pre : ctx.Empty({p.max_rows, 2 * p.ffn}, p.dtype);
  const Tensor act = args.act ? args.act : ctx.Empty({p.max_rows, p.ffn}, p.dtype);
  if (args.w1) {
    GroupedGemmRef(ctx, Product(p, GroupedGemmKind::kForward, Write(pre), 2 * p.ffn, p.hidden),
                   args.split_sizes, args.x, args.w1, Write(pre));
  }
  SwiGluForwardRef(ctx, pre, args.row_scale, args.split_sizes, Write(act));
  GroupedGemmRef(ctx, Product(p, GroupedGemmKind::kForward, args.y, p.out, p.ffn), args.split_sizes,
                 act, args.w2, args.y);
}

void Backward(const Context& ctx, const GroupedMlpProblem& p, GroupedMlpBackwardArgs&& args) {
  const GroupedMlpGradients& out = args.out;
  const Tensor dact = ctx.Empty({p.max_rows, p.ffn}, p.dtype),
               act = ctx.Empty(dact.shape(), p.dtype);
  const Output dpre = args.dpre ? args.dpre : Write(ctx.Empty({p.max_rows, 2 * p.ffn}, p.dtype));
  GroupedGemmRef(ctx, Product(p, GroupedGemmKind::kDgrad, Write(dact), p.out, p.ffn),
                 args.split_sizes, args.dy, args.w2, Write(dact));
  SwiGluBackwardRef(ctx, dact, args.pre, args.row_scale, args.split_sizes, dpre, out.dscale,
                    Write(act));
  if (out.dw1) {
    const Output dw2 = out.dw2.Get(), dw1 = out.dw1.Get();
    GroupedGemmRef(ctx, Product(p, GroupedGemmKind::kWgrad, dw2, p.out, p.ffn), args.split_sizes,
                   args.dy, act, dw2);
    GroupedGemmRef(ctx, Product(p, GroupedGemmKind::kWgrad, dw1, 2 * p.ffn, p.hidden),
                   args.split_sizes, dpre.tensor, args.x, dw1);
  }
  if (out.dx) {
    const Output dx = out.dx.Get();
    GroupedGemmRef(ctx, Product(p, GroupedGemmKind::kDgrad, dx, 2 * p.ffn, p.hidden),
                   args.split_sizes, dpre.tensor, args.w1, dx);
  }
}

}  // namespace

GroupedMlpImpl RefGroupedMlp() {
  return {"ref", Supports, {Forward, Backward}};
}

}  // namespace cistron::ops::internal
