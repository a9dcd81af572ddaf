// balance_loss on the CPU, which is its reference too: a few numbers a layer.
#include <cmath>

#include "cistron/ops/balance_loss/balance_loss_impls.h"

namespace cistron::ops {
namespace {

Support SupportsBalanceLoss(const BalanceLossProblem& problem) {
  const bool ok =
      problem.dtype == DType::kF64 || problem.dtype == DType::kF32 || problem.dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No("only f64, f32 and bf16");
}

void LoadBalancingCpu(const Context&, std::span<const RouterOutputs> layers, std::int64_t top_k,
                      double coefficient, double value_factor, const Tensor& inv_tokens,
                      const Tensor& value, const Tensor& score_grad) {
  const std::int64_t scopes = score_grad.dim(0), experts = score_grad.dim(1);
  const double inv_global = inv_tokens.item();
  const double layer_count = static_cast<double>(layers.size());
  FillZero(score_grad);
  double sum = 0;
  for (std::int64_t r = 0; r < scopes; ++r) {
    double assignments = 0;
    double* grad = score_grad.data<double>() + r * experts;
    for (const RouterOutputs& layer : layers) {
      const std::int64_t* counts = layer.counts.data<std::int64_t>() + r * experts;
      for (std::int64_t e = 0; e < experts; ++e) grad[e] += static_cast<double>(counts[e]);
    }
    for (std::int64_t e = 0; e < experts; ++e) assignments += grad[e];
    const double layer_tokens = assignments / static_cast<double>(top_k);  // T_r
    if (layer_tokens == 0) continue;
    const double weight = layer_tokens / layer_count * inv_global;  // n_r / N
    const double scale = weight * static_cast<double>(experts) / (layer_tokens * layer_tokens);
    double products = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      double scores = 0;
      for (const RouterOutputs& layer : layers) {
        scores += layer.score_sums.data<double>()[r * experts + e];
      }
      products += grad[e] * scores;
      grad[e] *= coefficient * scale;
    }
    sum += scale * products;
  }
  *value.data<double>() = sum * value_factor;
}

void ZCpu(const Context&, const Tensor& z_sums, double coefficient, const Tensor& inv_tokens,
          const Tensor& value, const Tensor& grad) {
  const double inv_global = inv_tokens.item();
  double total = 0;
  for (const double sum : z_sums.span<double>()) total += sum * inv_global;
  *value.data<double>() = total;
  for (double& g : grad.span<double>()) g = coefficient * inv_global;
}

void UpdateBiasCpu(const Context&, const Tensor& counts, double rate, const Tensor& bias,
                   const Tensor& gate) {
  if (gate && std::isnan(*gate.data<double>())) return;
  const auto n = counts.span<std::int64_t>();
  std::int64_t total = 0;
  for (const std::int64_t c : n) total += c;
  DispatchFloat("expert bias", bias.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto b = bias.span<T>();
    for (std::size_t e = 0; e < n.size(); ++e) {
      // mean − count has the sign of total − E·count, which is exact.
      const std::int64_t difference = total - static_cast<std::int64_t>(n.size()) * n[e];
      if (difference == 0) continue;
      b[e] = static_cast<T>(static_cast<Compute<T>>(b[e]) +
                            static_cast<Compute<T>>(difference > 0 ? rate : -rate));
    }
  });
}

void AddCountsCpu(const Context&, const Tensor& from, const Tensor& to) {
  const auto source = from.span<std::int64_t>();
  const auto target = to.span<std::int64_t>();
  for (std::size_t i = 0; i < source.size(); ++i) target[i % target.size()] += source[i];
}

}  // namespace

constinit const BalanceLossImpl kBalanceLossCpu = {
    "cpu", SupportsBalanceLoss, {LoadBalancingCpu, ZCpu, UpdateBiasCpu, AddCountsCpu}};

}  // namespace cistron::ops
