#include "cistron/optim/adamw_optimizer.h"

#include <cmath>

#include "cistron/ops/reduce/reduce.h"

namespace cistron::optim {

AdamWOptimizer::AdamWOptimizer(const ops::Context& ctx, nn::LocalParameterStore& store,
                               const AdamWOptions& options)
    : ctx_(ctx), store_(store), options_(options) {
  for (const auto& p : store.parameters()) {
    moments_.push_back(
        {ctx.Zeros(p.spec.shape, p.master.dtype()), ctx.Zeros(p.spec.shape, p.master.dtype())});
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
    if (!p.has_grad) continue;
    if (p.square_sums) {
      ops::WeightedSum(
          ctx_, p.square_sums, {},
          {sum_of_squares_, partial ? ops::WriteMode::kAccumulate : ops::WriteMode::kWrite});
      partial = true;
    } else {
      gradients.push_back(p.grad);
    }
  }
  ops::SumOfSquaresOfAll(
      ctx_, gradients,
      {sum_of_squares_, partial ? ops::WriteMode::kAccumulate : ops::WriteMode::kWrite});
  const double max_norm = options_.max_grad_norm > 0 ? options_.max_grad_norm : INFINITY;
  ops::ClipFactor(ctx_, sum_of_squares_, max_norm, norm_, scalars_.clip);
}

double AdamWOptimizer::ComputeGradNorm() {
  QueueGradNorm();
  return norm_.item();
}

void AdamWOptimizer::QueueUpdate(const Tensor& lr, const Tensor& step) {
  auto& parameters = store_.parameters();
  // Those of one kind together: a launch serves many.
  std::vector<ops::AdamWTensors> batch;
  const ops::AdamWScalars scalars{lr, step, scalars_.clip};
  const auto flush = [&] {
    ops::AdamWOfAll(ctx_, options_.adamw, scalars, batch);
    batch.clear();
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& p = parameters[i];
    if (!p.has_grad) continue;
    const bool decays =
        options_.decay_all || (p.spec.is_embedding ? options_.decay_embeddings : p.spec.decays);
    const Tensor low = p.value.raw() == p.master.raw() ? Tensor() : p.value;
    if (!batch.empty() && batch.front().g.dtype() != p.grad.dtype()) flush();
    batch.push_back({p.grad, p.master, moments_[i].m, moments_[i].v, low,
                     decays ? options_.adamw.weight_decay : 0.0});
  }
  flush();
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
    state.push_back({"weight/" + p.spec.name, p.value});
    if (p.value.raw() != p.master.raw()) state.push_back({"master/" + p.spec.name, p.master});
    state.push_back({"moment1/" + p.spec.name, moments_[i].m});
    state.push_back({"moment2/" + p.spec.name, moments_[i].v});
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
