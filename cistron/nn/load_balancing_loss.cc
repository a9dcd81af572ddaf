#include "cistron/nn/load_balancing_loss.h"

namespace cistron::nn {

LoadBalancingLoss ComputeLoadBalancingLoss(const ops::Context& ctx,
                                           const std::vector<ops::RouterOutputs>& layers,
                                           std::int64_t top_k, double coefficient,
                                           const Tensor& inv_tokens) {
  CISTRON_CHECK(!layers.empty(), "load_balancing_loss: there are no layers");
  const Shape shape = layers.front().counts.shape();
  const std::int64_t scopes = shape[0];
  const std::int64_t experts = shape[1];
  LoadBalancingLoss loss{ctx.Zeros({}, DType::kF64), ctx.Zeros(shape, DType::kF64)};
  const double inv_global = inv_tokens.item();
  const double layer_count = static_cast<double>(layers.size());

  for (std::int64_t r = 0; r < scopes; ++r) {
    double assignments = 0;
    double* grad = loss.score_grad.data<double>() + r * experts;
    for (const ops::RouterOutputs& layer : layers) {
      const std::int64_t* counts = layer.counts.data<std::int64_t>() + r * experts;
      for (std::int64_t e = 0; e < experts; ++e) grad[e] += static_cast<double>(counts[e]);
    }
    for (std::int64_t e = 0; e < experts; ++e) assignments += grad[e];
    const double layer_tokens = assignments / static_cast<double>(top_k);  // T_r
    if (layer_tokens == 0) continue;
    const double weight = layer_tokens / layer_count * inv_global;  // n_r / N
    const double scale = weight * static_cast<double>(experts) / (layer_tokens * layer_tokens);
    double value = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      double scores = 0;
      for (const ops::RouterOutputs& layer : layers) {
        scores += layer.score_sums.data<double>()[r * experts + e];
      }
      value += grad[e] * scores;
      grad[e] *= coefficient * scale;
    }
    *loss.value.data<double>() += scale * value;
  }
  return loss;
}

LoadBalancingLoss ComputeLayerLoadBalancingLoss(const ops::Context& ctx,
                                                const ops::RouterOutputs& layer, std::int64_t top_k,
                                                double coefficient, const Tensor& inv_tokens) {
  // The definitions are a factor K apart, for one layer.
  const double inv_k = 1.0 / static_cast<double>(top_k);
  LoadBalancingLoss loss =
      ComputeLoadBalancingLoss(ctx, {layer}, top_k, coefficient * inv_k, inv_tokens);
  *loss.value.data<double>() *= inv_k;
  return loss;
}

RouterZLoss ComputeRouterZLoss(const ops::Context& ctx, const ops::RouterOutputs& layer,
                               double coefficient, const Tensor& inv_tokens) {
  const double inv_global = inv_tokens.item();
  RouterZLoss loss{ctx.Zeros({}, DType::kF64), ctx.Empty(layer.z_sums.shape(), DType::kF64)};
  for (const double sum : layer.z_sums.span<double>()) {
    *loss.value.data<double>() += sum * inv_global;
  }
  for (double& g : loss.grad.span<double>()) g = coefficient * inv_global;
  return loss;
}

void UpdateExpertBias(const Tensor& counts, double rate, const Tensor& bias) {
  CISTRON_CHECK(counts && bias && counts.rank() == 1 && counts.shape() == bias.shape() &&
                    counts.dtype() == DType::kI64,
                "expert bias: counts are {}, the bias is {}; expected [E] each", Describe(counts),
                Describe(bias));
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

}  // namespace cistron::nn
