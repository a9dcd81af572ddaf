#include "cistron/nn/fuse/swiglu_linear.h"

#include "cistron/ops/grouped_mlp/grouped_mlp.h"

namespace cistron::nn::fuse {
namespace {

constexpr std::string_view kKinds[] = {"ScaledSwiGLU", "GroupedLinear"};

Verdict Matches(Window window, std::span<const quant::Recipe> recipes, const PlanKey& key) {
  const std::string& linear = window[1]->name();
  if (static_cast<const ScaledSwiGLU&>(*window[0]).is_interleaved()) {
    return Verdict::Refuses(window[0]->name(), "its gate and up columns alternate",
                            "build it with glu_interleave_size = 0");
  }
  if (quant::Quantizes(recipes[1])) {
    return Verdict::Refuses(
        linear,
        fmt::format("its recipe is {}, whose products take whole tensors", quant::Name(recipes[1])),
        "let GroupedMLP fire, or keep the layer in high precision");
  }
  if (static_cast<const GroupedLinear&>(*window[1]).options().per_expert_weights) {
    return Verdict::Refuses(linear, "its experts' weights are tensors of their own",
                            "build it with per_expert_weights = false");
  }
  return Verdict::Fires();
}

Verdict MatchesBackward(Window window, std::span<const quant::Recipe> recipes, const PlanKey& key) {
  if (!key.input_gradient) {
    return Verdict::Refuses(window[0]->name(), "the gradient of its input is not wanted",
                            "nothing: the ops by themselves make less");
  }
  return Matches(window, recipes, key);
}

std::shared_ptr<const FusedOp> Make(Window window) {
  return std::make_shared<SwiGluLinear>(static_cast<const ScaledSwiGLU&>(*window[0]),
                                        static_cast<const GroupedLinear&>(*window[1]));
}

}  // namespace

Pattern SwiGluLinearForwardPattern() {
  return {"SwiGLULinear", kKinds, Matches, Make};
}

Pattern SwiGluLinearBackwardPattern() {
  return {"SwiGLULinear", kKinds, MatchesBackward, Make};
}

Tensor SwiGluLinear::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                             Saved* saved) const {
  const std::int64_t width = linear_.options().in_features;
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) == 2 * width, "{}: x is {}, expected [M, {}]",
                activation_.name(), Describe(x), 2 * width);
  const Tensor act = saved != nullptr ? ctx.Empty({x.dim(0), width}, x.dtype()) : Tensor();
  Tensor y = ctx.Empty({x.dim(0), linear_.options().out_features}, x.dtype());
  {
    const AcquiredWeight w = linear_.products().Weight();
    ops::SwiGluLinearForward(ctx, {x, extra.split_sizes}, w.tensor(), extra.scale, act,
                             ops::Write(y));
  }
  activation_.Save(x, extra, saved);
  Operand input = linear_.products().Input(act, extra.split_sizes);
  linear_.FinishForward(ctx, linear_.products().recipe(), input, extra, saved, y);
  return y;
}

Tensor SwiGluLinear::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                              Saved& saved) const {
  BackwardOutputs wanted = out;
  wanted.input = true;  // what comes out is the gradient of the activation's input
  return linear_.BackwardWith(
      ctx, dy, wanted, saved, [&](const Tensor& gradient, const Tensor& split_sizes) {
        const ScaledSwiGLU::Record r = activation_.Take(saved);
        Tensor dx = ctx.Empty(r.x.shape(), gradient.dtype());
        const AcquiredWeight w = linear_.products().Weight();
        ops::SwiGluLinearBackward(ctx, {gradient, split_sizes}, r.x, w.tensor(), r.scale,
                                  ops::Write(dx), out.scale);
        return dx;
      });
}

}  // namespace cistron::nn::fuse
