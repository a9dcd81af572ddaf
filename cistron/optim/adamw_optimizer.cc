#include "cistron/optim/adamw_optimizer.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "cistron/ops/reduce/reduce.h"

namespace cistron::optim {

AdamWOptimizer::AdamWOptimizer(const ops::Context& ctx, nn::LocalParameterStore& store,
                               const AdamWOptions& options, nn::StatisticsReducer* ranks)
    : ctx_(ctx), store_(store), options_(options), ranks_(ranks) {
  for (const auto& p : store.parameters()) {
    moments_.push_back({ctx.Zeros(p.master.shape(), p.master.dtype()),
                        ctx.Zeros(p.master.shape(), p.master.dtype())});
  }
  scalars_.lr = ctx.Zeros({}, DType::kF64);
  scalars_.step = ctx.Zeros({}, DType::kF64);
  scalars_.clip = ctx.Zeros({}, DType::kF64);
  sum_of_squares_ = ctx.Zeros({}, DType::kF64);
  norm_ = ctx.Zeros({}, DType::kF64);
}

void AdamWOptimizer::QueueGradNorm() {
  std::vector<Tensor> gradients;
  bool partial = false;
  for (const auto& p : store_.parameters()) {
    if (!p.has_grad || !p.counted) continue;
    if (p.square_sums) {
      ops::WeightedSum(
          ctx_, p.square_sums, {},
          {sum_of_squares_, partial ? ops::WriteMode::kAccumulate : ops::WriteMode::kWrite});
      partial = true;
    } else {
      gradients.push_back(p.grad);
    }
  }
  // Those of one type together: a launch serves many.
  std::stable_sort(gradients.begin(), gradients.end(),
                   [](const Tensor& a, const Tensor& b) { return a.dtype() < b.dtype(); });
  ops::SumOfSquaresOfAll(
      ctx_, gradients,
      {sum_of_squares_, partial ? ops::WriteMode::kAccumulate : ops::WriteMode::kWrite});
  if (ranks_ != nullptr) ranks_->Sum(std::span(&sum_of_squares_, 1));
  const double max_norm = options_.max_grad_norm > 0 ? options_.max_grad_norm : INFINITY;
  ops::ClipFactor(ctx_, sum_of_squares_, max_norm, norm_, scalars_.clip);
}

double AdamWOptimizer::ComputeGradNorm() {
  QueueGradNorm();
  return norm_.item();
}

void AdamWOptimizer::QueueUpdate(const Tensor& lr, const Tensor& step) {
  auto& parameters = store_.parameters();
  // Those whose gradients have one type together, whatever their order: a launch serves many.
  std::map<DType, std::vector<ops::AdamWTensors>> batches;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& p = parameters[i];
    if (!p.has_grad) continue;
    const bool decays =
        options_.decay_all || (p.spec.is_embedding ? options_.decay_embeddings : p.spec.decays);
    const Tensor low = p.value.raw() == p.master.raw() ? Tensor() : p.value;
    batches[p.grad.dtype()].push_back({p.grad, p.master, moments_[i].m, moments_[i].v, low,
                                       decays ? options_.adamw.weight_decay : 0.0});
  }
  const ops::AdamWScalars scalars{lr, step, scalars_.clip};
  for (const auto& [dtype, batch] : batches) {
    ops::AdamWOfAll(ctx_, options_.adamw, scalars, batch);
  }
  CountUpdate();
}

void AdamWOptimizer::CountUpdate() {
  ++step_;
  store_.MarkChanged();
  store_.ZeroGradients();
}

void AdamWOptimizer::Update(double lr) {
  CopyTo(Tensor::Scalar(lr), scalars_.lr);
  CopyTo(Tensor::Scalar(static_cast<double>(step_ + 1)), scalars_.step);
  QueueUpdate(scalars_.lr, scalars_.step);
}

std::vector<AdamWOptimizer::StateTensor> AdamWOptimizer::State() const {
  std::vector<StateTensor> state;
  const auto& parameters = store_.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    const auto add = [&](const char* role, const Tensor& tensor) {
      for (const auto& [values, start] : nn::LocalParameterStore::BoxesOf(p, tensor)) {
        state.push_back({role + p.spec.name, values, p.spec.shape, start, p.counted});
      }
    };
    add("weight/", p.value);
    if (p.value.raw() != p.master.raw()) add("master/", p.master);
    add("moment1/", moments_[i].m);
    add("moment2/", moments_[i].v);
  }
  return state;
}

std::string AdamWOptimizer::FirstNonFiniteGradient() const {
  for (const auto& p : store_.parameters()) {
    if (!p.has_grad) continue;
    const Tensor grad = p.grad.ToHost();
    for (std::int64_t i = 0; i < grad.numel(); ++i) {
      if (!std::isfinite(ElementAsDouble(grad, i))) return p.spec.name;
    }
  }
  return {};
}

}  // namespace cistron::optim
