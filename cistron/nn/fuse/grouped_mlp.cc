#include "cistron/nn/fuse/grouped_mlp.h"

#include <utility>

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/grouped_mlp/grouped_mlp.h"

namespace cistron::nn::fuse {
namespace {

constexpr std::string_view kKinds[] = {"GroupedLinear", "ScaledSwiGLU", "GroupedLinear"};

Verdict Matches(Window window, std::span<const quant::Recipe> recipes, const PlanKey& key) {
  const auto& fc1 = static_cast<const GroupedLinear&>(*window[0]);
  const auto& fc2 = static_cast<const GroupedLinear&>(*window[2]);
  for (const GroupedLinear* fc : {&fc1, &fc2}) {
    if (fc->options().bias) {
      return Verdict::Refuses(fc->name(), "it has a bias", "build it with bias = false");
    }
    if (fc->options().per_expert_weights) {
      return Verdict::Refuses(fc->name(), "its experts' weights are tensors of their own",
                              "build it with per_expert_weights = false");
    }
    if (fc->options().delay_weight_gradients) {
      return Verdict::Refuses(fc->name(), "its weight gradients are delayed",
                              "build it with delay_weight_gradients = false");
    }
  }
  if (fc1.options().num_groups != fc2.options().num_groups ||
      fc1.options().out_features != 2 * fc2.options().in_features) {
    return Verdict::Refuses(
        fc2.name(),
        fmt::format("{} groups of {} → {} do not follow {} groups of {} → {} with gate and up",
                    fc2.options().num_groups, fc2.options().in_features, fc2.options().out_features,
                    fc1.options().num_groups, fc1.options().in_features,
                    fc1.options().out_features),
        "in_features = half of the first layer's out_features, and as many groups");
  }
  if (static_cast<const ScaledSwiGLU&>(*window[1]).is_interleaved()) {
    return Verdict::Refuses(window[1]->name(), "its gate and up columns alternate",
                            "build it with glu_interleave_size = 0");
  }
  if (!(recipes[0] == recipes[2])) {
    return Verdict::Refuses(
        fc2.name(),
        fmt::format("its recipe is {}, that of {} is {}", quant::Name(recipes[2]), fc1.name(),
                    quant::Name(recipes[0])),
        "let the patterns of high-precision layers name both or neither");
  }
  if (quant::Quantizes(recipes[0]) && fc1.out_parts() != 2) {
    return Verdict::Refuses(fc1.name(), "its gate and up rows are quantised as one part",
                            "leave out_parts to Sequential, or set it to 2");
  }
  if (key.device.type != DeviceType::kCpu && quant::Quantizes(recipes[0])) {
    return Verdict::Refuses(
        fc1.name(), fmt::format("this device has no kernel for {}", quant::Name(recipes[0])),
        "device=cpu, or precision=bf16");
  }
  return Verdict::Fires();
}

std::shared_ptr<const FusedOp> Make(Window window) {
  return std::make_shared<GroupedMlp>(static_cast<const GroupedLinear&>(*window[0]),
                                      static_cast<const ScaledSwiGLU&>(*window[1]),
                                      static_cast<const GroupedLinear&>(*window[2]));
}

}  // namespace

Pattern GroupedMlpPattern() {
  return {"GroupedMLP", kKinds, Matches, Make};
}

std::string GroupedMlp::Label() const {
  return fmt::format("GroupedMLP ({} … {})", fc1_.name(), fc2_.name());
}

Tensor GroupedMlp::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                           Saved* saved) const {
  fc1_.CheckInput(x, extra);
  const quant::Recipe recipe = fc1_.products().recipe();
  const std::int64_t rows = x.dim(0);
  Tensor y = ctx.Empty({rows, fc2_.options().out_features}, x.dtype());
  Record r{{}, {}, extra.scale, extra.split_sizes};
  if (quant::Quantizes(recipe)) {
    if (extra.scale) {
      ops::CheckRowValues(Label(), "scale", extra.scale, rows, ComputeType(x.dtype()));
    }
    QuantizedForward(ctx, recipe, x, saved != nullptr, y, r);
  } else {
    const AcquiredWeight w1 = fc1_.products().Weight(), w2 = fc2_.products().Weight();
    if (saved != nullptr) {
      r.x = {recipe, x, {}, fc1_.products().version()};
      r.pre_activation = ctx.Empty({rows, fc1_.options().out_features}, x.dtype());
    }
    ops::GroupedMlpForward(ctx, {x, extra.split_sizes}, {w1.tensor(), w2.tensor()}, extra.scale,
                           r.pre_activation, ops::Write(y));
  }
  r.fc2_version = fc2_.products().version();
  if (saved != nullptr) saved->Push<Record>(this, fc1_.name()) = std::move(r);
  return y;
}

Tensor GroupedMlp::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                            Saved& saved) const {
  Record r = saved.Pop<Record>(this, fc1_.name());
  fc1_.products().CheckVersion(r.x.version);
  fc2_.products().CheckVersion(r.fc2_version);
  CISTRON_CHECK(!out.bias_scale,
                "{}: the gradient of bias_scale was asked of layers without a bias", fc1_.name());
  CISTRON_CHECK(dy && dy.rank() == 2, "{}: dy is {}, expected [M, {}]", Label(), Describe(dy),
                fc2_.options().out_features);
  const Shape shape = {dy.dim(0), fc1_.options().in_features};
  const DType type = dy.dtype();
  Tensor dx;
  if (quant::Quantizes(r.x.recipe)) {
    const std::int64_t rows = r.pre_activation.dim(0);
    const DType dtype = r.pre_activation.dtype();
    ops::CheckMatrix(Label(), "dy", dy, rows, fc2_.options().out_features, dtype);
    if (out.scale) {
      ops::CheckRowValues(Label(), "dscale", out.scale.tensor, rows, ComputeType(dtype));
    }
    if (out.input) dx = ctx.Empty(shape, type);
    QuantizedBackward(ctx, dy, out, r, dx);
    return dx;
  }
  const AcquiredWeight w1 = fc1_.products().Weight(), w2 = fc2_.products().Weight();
  ops::GroupedMlpGradients gradients{.dscale = out.scale};
  if (out.input) {
    gradients.dx = ops::DeferredOutput([&] { return ops::Write(dx = ctx.Empty(shape, type)); });
    if (out.input_ready) gradients.dx_ready = [&] { out.input_ready(dx); };
  }
  if (out.weights) {
    const auto gradient_of = [](const WeightProducts& w) {
      return ops::DeferredOutput([&w] { return w.GradientOutput(); });
    };
    gradients.dw1 = gradient_of(fc1_.products());
    gradients.dw2 = gradient_of(fc2_.products());
    gradients.dw1_squares = fc1_.products().SquareSumsTaker();
    gradients.dw2_squares = fc2_.products().SquareSumsTaker();
  }
  ops::GroupedMlpBackward(ctx, {std::move(dy), r.split_sizes}, std::move(r.x.tensor),
                          std::move(r.pre_activation), {w1.tensor(), w2.tensor()}, r.scale,
                          std::move(gradients));
  return dx;
}

}  // namespace cistron::nn::fuse
