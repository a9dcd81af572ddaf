#include "cistron/nn/grouped_linear.h"

#include "cistron/ops/grouped_bias/grouped_bias.h"

namespace cistron::nn {

GroupedLinear::GroupedLinear(const GroupedLinearOptions& options) : options_(options) {
  CISTRON_CHECK(options.num_groups >= 1 && options.in_features >= 1 && options.out_features >= 1,
                "{}: num_groups = {}, in_features = {} and out_features = {} must be at least 1",
                options.name, options.num_groups, options.in_features, options.out_features);
  CISTRON_CHECK(options.out_parts >= 1 && options.out_features % options.out_parts == 0,
                "{}: out_parts = {} does not divide out_features = {}", options.name,
                options.out_parts, options.out_features);
  CISTRON_CHECK(options.bias || !options.scaled_bias, "{}: scaled_bias without a bias",
                options.name);
  store_ = options.store;
  if (store_ == nullptr) {
    own_store_ = std::make_unique<LocalParameterStore>(ops::Context(), options.dtype);
    store_ = own_store_.get();
  }
  const ParameterId weight =
      store_->Register({.name = options.name,
                        .shape = {options.num_groups, options.out_features, options.in_features},
                        .is_expert = true,
                        .row_parts = options.out_parts});
  if (options.bias) {
    bias_ = store_->Register({.name = options.bias_name,
                              .shape = {options.num_groups, options.out_features},
                              .init = ParameterSpec::Init::kZeros,
                              .is_expert = true,
                              .decays = false});
  }
  products_ = std::make_unique<WeightProducts>(*store_, weight);
  delayed_ = std::make_unique<std::vector<Delayed>>();
  if (own_store_) own_store_->Initialize(options.seed, options.init_std);
}

void GroupedLinear::CheckInput(const Tensor& x, const ExtraInputs& extra) const {
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) == options_.in_features,
                "{}: x is {}, expected [M, {}]", name(), Describe(x), options_.in_features);
  CISTRON_CHECK(extra.split_sizes && extra.split_sizes.numel() == options_.num_groups,
                "{}: split_sizes is {}, expected i64 [{}]", name(), Describe(extra.split_sizes),
                options_.num_groups);
  CISTRON_CHECK(!options_.scaled_bias || extra.bias_scale,
                "{}: the bias is scaled, but bias_scale was not given", name());
}

Tensor GroupedLinear::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                              Saved* saved) const {
  CheckInput(x, extra);
  const quant::Recipe recipe = products_->recipe();
  Operand input = products_->Input(x, extra.split_sizes);
  Tensor y = ctx.Empty({x.dim(0), options_.out_features}, x.dtype());
  products_->Forward(ctx, recipe, input, saved != nullptr, ops::Write(y));
  FinishForward(ctx, recipe, input, extra, saved, y);
  return y;
}

void GroupedLinear::FinishForward(const ops::Context& ctx, const quant::Recipe& recipe,
                                  Operand& input, const ExtraInputs& extra, Saved* saved,
                                  const Tensor& y) const {
  if (options_.bias) {
    const AcquiredWeight bias(*store_, bias_);
    const Tensor row_scale = options_.scaled_bias ? extra.bias_scale : Tensor();
    ops::GroupedBiasForward(ctx, bias.tensor(), row_scale, extra.split_sizes, y);
  }
  if (saved != nullptr) {
    saved->Push<Record>(this, name()) = {input.Save(ctx, recipe), extra.split_sizes,
                                         options_.scaled_bias ? extra.bias_scale : Tensor(),
                                         products_->version()};
  }
}

Tensor GroupedLinear::Backward(const ops::Context& ctx, const Tensor& dy,
                               const BackwardOutputs& out, Saved& saved) const {
  return BackwardWith(ctx, dy, out, saved, nullptr);
}

Tensor GroupedLinear::BackwardWith(const ops::Context& ctx, const Tensor& dy,
                                   const BackwardOutputs& out, Saved& saved,
                                   const DgradFunction& dgrad) const {
  Record r = saved.Pop<Record>(this, name());
  products_->CheckVersion(r.version);
  CISTRON_CHECK(!out.bias_scale || options_.scaled_bias,
                "{}: the gradient of bias_scale was asked of a layer that does not take it",
                name());
  Operand gradient = products_->OutputGradient(dy, r.split_sizes);
  if (options_.bias && (out.weights || out.bias_scale)) {
    const AcquiredWeight bias(*store_, bias_);
    ops::GroupedBiasBackward(ctx, dy, bias.tensor(), r.bias_scale, r.split_sizes,
                             out.weights ? store_->GradientOutput(bias_) : ops::Output{},
                             out.bias_scale);
  }
  Tensor dx;
  if (out.input && dgrad) {
    dx = dgrad(dy, r.split_sizes);
  } else if (out.input) {
    dx = ctx.Empty({dy.dim(0), options_.in_features}, dy.dtype());
    products_->Dgrad(ctx, r.x.recipe, gradient, ops::Write(dx));
  }
  if (out.weights && options_.delay_weight_gradients) {
    delayed_->push_back({std::move(gradient), std::move(r.x)});
  } else if (out.weights) {
    products_->Wgrad(ctx, gradient, r.x);
  }
  return dx;
}

void GroupedLinear::ComputeWeightGradients(const ops::Context& ctx) const {
  for (Delayed& d : *delayed_) products_->Wgrad(ctx, d.dy, d.x);
  delayed_->clear();
}

}  // namespace cistron::nn
