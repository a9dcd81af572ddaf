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

double AdamWOptimizer::ComputeGradNorm() {
  bool first = true;
  for (const auto& p : store_.parameters()) {
    if (!p.has_grad) continue;
    const auto mode = first ? ops::WriteMode::kWrite : ops::WriteMode::kAccumulate;
    ops::SumOfSquares(ctx_, p.grad, {sum_of_squares_, mode});
    first = false;
  }
  if (first) FillZero(sum_of_squares_);
  const double max_norm = options_.max_grad_norm > 0 ? options_.max_grad_norm : INFINITY;
  ops::ClipFactor(ctx_, sum_of_squares_, max_norm, norm_, scalars_.clip);
  return norm_.item();
}

void AdamWOptimizer::Update(double lr) {
  ++step_;
  CopyTo(Tensor::Scalar(lr), scalars_.lr);
  CopyTo(Tensor::Scalar(static_cast<double>(step_)), scalars_.step);
  auto& parameters = store_.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& p = parameters[i];
    if (!p.has_grad) continue;
    ops::AdamWConfig config = options_.adamw;
    const bool decays =
        options_.decay_all || (p.spec.is_embedding ? options_.decay_embeddings : p.spec.decays);
    if (!decays) config.weight_decay = 0;
    const Tensor low = p.value.raw() == p.master.raw() ? Tensor() : p.value;
    ops::AdamW(ctx_, config, scalars_, p.grad, p.master, moments_[i].m, moments_[i].v, low);
  }
  store_.MarkChanged();
  store_.ZeroGradients();
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
