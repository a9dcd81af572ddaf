#include "cistron/nn/sequential.h"

#include <fmt/format.h>

#include <set>
#include <utility>

#include "cistron/quant/autocast.h"

namespace cistron::nn {
namespace {

// Which plan a forward pass followed: its backward follows the same.
struct PlanRecord {
  std::shared_ptr<const fuse::Plan> plan;
};

// Delayed scaling keeps its state by the name of the op: two may not share one.
void CheckScalingStates(const std::vector<const BasicOp*>& ops,
                        const std::vector<quant::Recipe>& recipes) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    if (!std::holds_alternative<quant::DelayedScaling>(recipes[i])) continue;
    const std::string_view kind = ops[i]->kind();
    if (!kind.ends_with("Linear") && kind != "Quantize") continue;
    CISTRON_CHECK(names.insert(ops[i]->name()).second,
                  "Sequential: two ops are named {}, and delayed scaling keeps its state by "
                  "name; name them apart",
                  ops[i]->name());
  }
}

}  // namespace

void Sequential::Append(std::unique_ptr<BasicOp> op) {
  CISTRON_CHECK(op != nullptr, "Sequential: op {} is null", ops_.size());
  op->SetPosition(ops_.size());
  if (!ops_.empty()) {
    ops_.back()->SetOutputParts(op->input_parts());
    ops_.back()->SetOutputInterleave(op->input_interleave());
  }
  view_.push_back(op.get());
  ops_.push_back(std::move(op));
  plan_.reset();
  masked_from_.reset();
  masked_.reset();
}

fuse::Plan Sequential::MakePlan(const ops::Context& ctx, DType dtype, bool training,
                                bool input_gradient) const {
  return *BackwardPlan(PlanFor(ctx, dtype, training), input_gradient);
}

std::shared_ptr<const fuse::Plan> Sequential::BackwardPlan(
    const std::shared_ptr<const fuse::Plan>& plan, bool input_gradient) const {
  if (plan->key.input_gradient == input_gradient) return plan;
  if (masked_from_ != plan) {
    masked_ = std::make_shared<fuse::Plan>(fuse::WithInputGradient(*plan, view_, input_gradient));
    masked_from_ = plan;
  }
  return masked_;
}

std::shared_ptr<const fuse::Plan> Sequential::PlanFor(const ops::Context& ctx, DType dtype,
                                                      bool training) const {
  fuse::PlanKey key;
  key.device = ctx.device();
  key.dtype = dtype;
  key.training = training;
  key.fuse = fuse_;
  for (const BasicOp* op : view_) key.recipes.push_back(quant::RecipeFor(op->name()));
  if (!plan_ || !(plan_->key == key)) {
    CheckScalingStates(view_, key.recipes);
    plan_ = std::make_shared<fuse::Plan>(fuse::MakePlan(view_, key));
  }
  if (ctx.strict()) {
    const auto refusals = fuse::DescribeRefusals(*plan_);
    if (!refusals.empty()) {
      CISTRON_THROW(kUnsupported, "strict: {}", fmt::join(refusals, "\nstrict: "));
    }
  }
  return plan_;
}

bool Sequential::AnyTakes(std::string_view input) const {
  return std::any_of(view_.begin(), view_.end(),
                     [&](const BasicOp* op) { return op->Takes(input); });
}

Tensor Sequential::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                           Saved* saved) const {
  CISTRON_CHECK(x, "Sequential: x is undefined");
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const Tensor*>{"split_sizes", &extra.split_sizes},
        {"scale", &extra.scale},
        {"bias_scale", &extra.bias_scale}}) {
    CISTRON_CHECK(!*tensor || AnyTakes(name), "Sequential: {} was given, but no op takes it", name);
  }
  const auto plan = PlanFor(ctx, x.dtype(), saved != nullptr);
  Tensor y = x;
  for (const fuse::PlanStep& step : plan->forward) {
    y = step.fused ? step.fused->Forward(ctx, y, extra, saved)
                   : ops_[step.begin]->Forward(ctx, y, extra, saved);
  }
  if (saved != nullptr) saved->Push<PlanRecord>(this, "Sequential").plan = plan;
  return y;
}

Tensor Sequential::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                            Saved& saved) const {
  const PlanRecord record = saved.Pop<PlanRecord>(this, "Sequential");
  CISTRON_CHECK((!out.scale || AnyTakes("scale")) && (!out.bias_scale || AnyTakes("bias_scale")),
                "Sequential: the gradient of {} was asked for, but no op takes it",
                out.scale && !AnyTakes("scale") ? "scale" : "bias_scale");
  Tensor d = std::move(dy);
  ops::Output scale = out.scale, bias_scale = out.bias_scale;
  const auto plan = BackwardPlan(record.plan, out.input);
  const auto& steps = plan->backward;
  for (std::size_t i = steps.size(); i-- > 0;) {
    BackwardOutputs wanted{.input = i > 0 || out.input, .weights = out.weights};
    if (i == 0) wanted.input_ready = out.input_ready;
    // The gradient of an extra input goes to the ops that took it, and is the sum over them.
    const auto give = [&](std::string_view name, ops::Output& from, ops::Output& to) {
      for (std::size_t j = steps[i].begin; j < steps[i].end; ++j) {
        if (!from || !ops_[j]->Takes(name)) continue;
        to = from;
        from.mode = ops::WriteMode::kAccumulate;
        return;
      }
    };
    give("scale", scale, wanted.scale);
    give("bias_scale", bias_scale, wanted.bias_scale);
    d = steps[i].fused ? steps[i].fused->Backward(ctx, std::move(d), wanted, saved)
                       : ops_[steps[i].begin]->Backward(ctx, std::move(d), wanted, saved);
  }
  return d;
}

std::string Sequential::Explain(const ops::Context& ctx, DType dtype, bool training,
                                bool input_gradient) const {
  return fuse::Describe(*BackwardPlan(PlanFor(ctx, dtype, training), input_gradient), view_);
}

}  // namespace cistron::nn
