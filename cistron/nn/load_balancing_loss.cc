#include "cistron/nn/load_balancing_loss.h"

namespace cistron::nn {
namespace {

LoadBalancingLoss MakeLoss(const ops::Context& ctx, const Tensor& counts) {
  return {ctx.Empty({}, DType::kF64), ctx.Empty(counts.shape(), DType::kF64)};
}

}  // namespace

LoadBalancingLoss ComputeLoadBalancingLoss(const ops::Context& ctx,
                                           const std::vector<ops::RouterOutputs>& layers,
                                           std::int64_t top_k, double coefficient,
                                           const Tensor& inv_tokens) {
  CISTRON_CHECK(!layers.empty(), "load_balancing_loss: there are no layers");
  LoadBalancingLoss loss = MakeLoss(ctx, layers.front().counts);
  ops::LoadBalancingLoss(ctx, layers, top_k, coefficient, inv_tokens, loss.value, loss.score_grad);
  return loss;
}

LoadBalancingLoss ComputeLayerLoadBalancingLoss(const ops::Context& ctx,
                                                const ops::RouterOutputs& layer, std::int64_t top_k,
                                                double coefficient, const Tensor& inv_tokens) {
  LoadBalancingLoss loss = MakeLoss(ctx, layer.counts);
  ops::LayerLoadBalancingLoss(ctx, layer, top_k, coefficient, inv_tokens, loss.value,
                              loss.score_grad);
  return loss;
}

RouterZLoss ComputeRouterZLoss(const ops::Context& ctx, const ops::RouterOutputs& layer,
                               double coefficient, const Tensor& inv_tokens) {
  RouterZLoss loss{ctx.Empty({}, DType::kF64), ctx.Empty(layer.z_sums.shape(), DType::kF64)};
  ops::RouterZLoss(ctx, layer.z_sums, coefficient, inv_tokens, loss.value, loss.grad);
  return loss;
}

}  // namespace cistron::nn
