#include "cistron/nn/grouped_linear.h"

#include <string_view>
#include <utility>

#include "cistron/ops/grouped_bias/grouped_bias.h"
#include "cistron/ops/split_sizes.h"
#include "cistron/quant/autocast.h"

namespace cistron::nn {

namespace {

void CheckParts(const GroupedLinearOptions& options, std::int64_t parts) {
  CISTRON_CHECK(parts >= 1 && options.out_features % parts == 0,
                "{}: out_parts = {} does not divide out_features = {}", options.name, parts,
                options.out_features);
}

constexpr std::string_view kUnnamed = "grouped_linear.weight";

std::string BiasName(const std::string& weight) {
  constexpr std::string_view kWeight = "weight";
  if (!weight.ends_with(kWeight)) return weight + "_bias";
  return weight.substr(0, weight.size() - kWeight.size()) + "bias";
}

}  // namespace

GroupedLinear::GroupedLinear(const GroupedLinearOptions& given)
    : options_(given), unnamed_(given.name.empty()), unnamed_bias_(given.bias_name.empty()) {
  if (unnamed_) options_.name = kUnnamed;
  if (unnamed_bias_) options_.bias_name = BiasName(options_.name);
  const GroupedLinearOptions& options = options_;
  CISTRON_CHECK(!unnamed_ || options.store == nullptr,
                "GroupedLinear: a layer in a store that it shares needs a name (in_features = {}, "
                "out_features = {}); set options.name",
                options.in_features, options.out_features);
  CISTRON_CHECK(options.num_groups >= 1 && options.in_features >= 1 && options.out_features >= 1,
                "{}: num_groups = {}, in_features = {} and out_features = {} must be at least 1",
                options.name, options.num_groups, options.in_features, options.out_features);
  CheckParts(options, options.out_parts == 0 ? 1 : options.out_parts);
  CISTRON_CHECK(options.bias || !options.scaled_bias, "{}: scaled_bias without a bias",
                options.name);
  store_ = options.store;
  if (store_ == nullptr) {
    own_store_ = std::make_unique<LocalParameterStore>(ops::Context(), options.dtype);
    store_ = own_store_.get();
  }
  const std::int64_t out = options.out_features, in = options.in_features;
  const std::int64_t parts = options.out_parts == 0 ? 1 : options.out_parts;
  if (options.per_expert_weights) {
    for (std::int64_t e = 0; e < options.num_groups; ++e) {
      products_.emplace_back(*store_,
                             store_->Register({.name = fmt::format("{}{}", options.name, e),
                                               .shape = {out, in},
                                               .row_parts = parts}));
    }
    local_groups_ = options.num_groups;
  } else {
    const ParameterId weight = store_->Register({.name = options.name,
                                                 .shape = {options.num_groups, out, in},
                                                 .is_expert = options.is_expert,
                                                 .row_parts = parts});
    local_groups_ = store_->LocalShape(weight)[0];
    products_.emplace_back(*store_, weight);
  }
  if (options.bias) {
    bias_ = store_->Register({.name = options.bias_name,
                              .shape = {options.num_groups, options.out_features},
                              .init = ParameterSpec::Init::kZeros,
                              .is_expert = options.is_expert,
                              .decays = false});
  }
  delayed_ = std::make_unique<std::vector<Delayed>>();
  if (own_store_) {
    own_store_->Initialize(options.seed, options.init_std);
    drawn_version_ = own_store_->version();
  }
}

void GroupedLinear::SetPosition(std::size_t position) {
  if (!unnamed_) return;
  unnamed_ = false;
  const std::string old = std::exchange(options_.name, fmt::format("{}.weight", position));
  for (std::size_t i = 0; i < products_.size(); ++i) {
    const std::string suffix = options_.per_expert_weights ? std::to_string(i) : "";
    own_store_->Rename(old + suffix, options_.name + suffix);
  }
  if (unnamed_bias_) {
    const std::string bias = std::exchange(options_.bias_name, BiasName(options_.name));
    if (options_.bias) own_store_->Rename(bias, options_.bias_name);
  }
  if (own_store_->version() != drawn_version_) return;
  own_store_->Initialize(options_.seed, options_.init_std);
}

void GroupedLinear::SetOutputParts(std::int64_t parts) {
  if (options_.out_parts != 0) return;
  CheckParts(options_, parts);
  for (const WeightProducts& products : products_) products.SetRowParts(parts);
}

void GroupedLinear::SetOutputInterleave(std::int64_t block) {
  for (WeightProducts& products : products_) products.SetOutputInterleave(block);
}

void GroupedLinear::CheckInput(const Tensor& x, const ExtraInputs& extra) const {
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) == options_.in_features,
                "{}: x is {}, expected [M, {}]", name(), Describe(x), options_.in_features);
  CISTRON_CHECK(extra.split_sizes && extra.split_sizes.shape() == Shape({local_groups_}) &&
                    extra.split_sizes.dtype() == DType::kI64,
                "{}: split_sizes is {}, expected i64 [{}]", name(), Describe(extra.split_sizes),
                local_groups_);
  CISTRON_CHECK(!options_.scaled_bias || extra.bias_scale,
                "{}: the bias is scaled, but bias_scale was not given", name());
  CISTRON_CHECK(
      !unnamed_ || !std::holds_alternative<quant::DelayedScaling>(quant::RecipeFor(name())),
      "GroupedLinear: DelayedScaling keeps the scales of a layer by its name, and this one "
      "has none; set options.name");
}

std::int64_t GroupedLinear::Record::bytes() const {
  std::int64_t sum = 0;
  for (const SavedOperand& operand : x) sum += operand.bytes();
  return sum;
}

std::vector<GroupedLinear::Part> GroupedLinear::Parts(const Tensor& split_sizes,
                                                      std::int64_t rows) const {
  if (!options_.per_expert_weights) return {{0, rows, split_sizes}};
  const auto offsets = ops::RowOffsets(name(), split_sizes, rows);
  std::vector<Part> parts;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    parts.push_back({offsets[e], offsets[e + 1] - offsets[e], {}});
  }
  return parts;
}

Tensor GroupedLinear::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                              Saved* saved) const {
  CheckInput(x, extra);
  Tensor y = ctx.Empty({x.dim(0), options_.out_features}, x.dtype());
  std::vector<SavedOperand> inputs;
  const std::vector<Part> parts = Parts(extra.split_sizes, x.dim(0));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const quant::Recipe recipe = products_[i].recipe();
    Operand input = products_[i].Input(x.Slice(0, part.begin, part.rows), part.split_sizes);
    products_[i].Forward(ctx, recipe, input, saved != nullptr,
                         ops::Write(y.Slice(0, part.begin, part.rows)));
    if (saved != nullptr) inputs.push_back(products_[i].Save(ctx, recipe, input));
  }
  Finish(ctx, std::move(inputs), extra, saved, y);
  return y;
}

void GroupedLinear::FinishForward(const ops::Context& ctx, const quant::Recipe& recipe,
                                  Operand& input, const ExtraInputs& extra, Saved* saved,
                                  const Tensor& y) const {
  std::vector<SavedOperand> inputs;
  if (saved != nullptr) inputs.push_back(products().Save(ctx, recipe, input));
  Finish(ctx, std::move(inputs), extra, saved, y);
}

void GroupedLinear::Finish(const ops::Context& ctx, std::vector<SavedOperand> inputs,
                           const ExtraInputs& extra, Saved* saved, const Tensor& y) const {
  const Tensor row_scale = options_.scaled_bias ? extra.bias_scale : Tensor();
  if (options_.bias) {
    const AcquiredWeight bias(*store_, bias_);
    ops::GroupedBiasForward(ctx, bias.tensor(), row_scale, extra.split_sizes, y);
  }
  if (saved == nullptr) return;
  saved->Push<Record>(this, name()) = {std::move(inputs), extra.split_sizes, row_scale, y.dim(0)};
}

Tensor GroupedLinear::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                               Saved& saved) const {
  return BackwardWith(ctx, dy, out, saved, nullptr);
}

Tensor GroupedLinear::BackwardWith(const ops::Context& ctx, const Tensor& dy,
                                   const BackwardOutputs& out, Saved& saved,
                                   const DgradFunction& dgrad) const {
  Record r = saved.Pop<Record>(this, name());
  products_.front().CheckVersion(r.x.front().version);
  CISTRON_CHECK(dy && dy.rank() == 2 && dy.dim(0) == r.rows && dy.dim(1) == options_.out_features,
                "{}: dy is {}, expected [{}, {}], a gradient of what forward returned", name(),
                Describe(dy), r.rows, options_.out_features);
  CISTRON_CHECK(!out.bias_scale || options_.scaled_bias,
                "{}: the gradient of bias_scale was asked of a layer that does not take it",
                name());
  if (options_.bias && (out.weights || out.bias_scale)) {
    const AcquiredWeight bias(*store_, bias_);
    ops::GroupedBiasBackward(ctx, dy, bias.tensor(), r.bias_scale, r.split_sizes,
                             out.weights ? store_->GradientOutput(bias_) : ops::Output{},
                             out.bias_scale);
  }
  Tensor dx;
  if (out.input) {
    dx =
        dgrad ? dgrad(dy, r.split_sizes) : ctx.Empty({dy.dim(0), options_.in_features}, dy.dtype());
  }
  const std::vector<Part> parts = Parts(r.split_sizes, dy.dim(0));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    Operand gradient =
        products_[i].OutputGradient(dy.Slice(0, part.begin, part.rows), part.split_sizes);
    if (out.input && !dgrad) {
      products_[i].Dgrad(ctx, r.x[i].recipe, gradient,
                         ops::Write(dx.Slice(0, part.begin, part.rows)));
    }
    if (out.weights && options_.delay_weight_gradients) {
      // Now, by the scale of this step, and leaving its amax in this step.
      if (quant::Quantizes(r.x[i].recipe)) gradient.Quantized(ctx, r.x[i].recipe, true);
      delayed_->push_back({i, std::move(gradient), std::move(r.x[i])});
    } else if (out.weights) {
      products_[i].Wgrad(ctx, gradient, r.x[i]);
    }
  }
  return dx;
}

void GroupedLinear::ComputeWeightGradients(const ops::Context& ctx) const {
  std::vector<Delayed> delayed;
  delayed.swap(*delayed_);  // what is refused is dropped: no later step may find it
  for (const Delayed& d : delayed) {
    CISTRON_CHECK(d.x.version == store_->version(),
                  "{}: the parameters changed after the backward pass whose weight gradients were "
                  "delayed; call ComputeWeightGradients before the optimiser's update",
                  name());
  }
  for (Delayed& d : delayed) products_[d.weight].Wgrad(ctx, d.dy, d.x);
}

}  // namespace cistron::nn
