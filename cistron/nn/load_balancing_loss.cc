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

}  // namespace cistron::nn
