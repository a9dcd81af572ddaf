// The auxiliary losses of ops/balance_loss with tensors for their results: the formulas are there.
#pragma once

#include <vector>

#include "cistron/ops/balance_loss/balance_loss.h"
#include "cistron/ops/context.h"
#include "cistron/ops/router/router.h"

namespace cistron::nn {

struct LoadBalancingLoss {
  Tensor value;       // f64 []: Σ_r (n_r / N) · aux_r
  Tensor score_grad;  // f64 [R, E]: coefficient · ∂value / ∂S
};

// `layers`: statistics of each layer, [R, E], already summed over the ranks that share a scope.
// `inv_tokens` f64 []: 1 / N.
LoadBalancingLoss ComputeLoadBalancingLoss(const ops::Context& ctx,
                                           const std::vector<ops::RouterOutputs>& layers,
                                           std::int64_t top_k, double coefficient,
                                           const Tensor& inv_tokens);

// The same of one layer, by Megatron's definition.
LoadBalancingLoss ComputeLayerLoadBalancingLoss(const ops::Context& ctx,
                                                const ops::RouterOutputs& layer, std::int64_t top_k,
                                                double coefficient, const Tensor& inv_tokens);

struct RouterZLoss {
  Tensor value;  // f64 []
  Tensor grad;   // f64 [R]: coefficient · ∂value / ∂z_sums
};
RouterZLoss ComputeRouterZLoss(const ops::Context& ctx, const ops::RouterOutputs& layer,
                               double coefficient, const Tensor& inv_tokens);

}  // namespace cistron::nn
