// Auxiliary losses, from the router statistics of layers, and the update of loss-free balancing.
//
// The load-balancing loss of Hugging Face's Mixtral takes all layers at once.
// For a scope r (all tokens of a micro-step, or one sequence) with n_r tokens and T_r = layers ·
// n_r:
//   aux_r = E / T_r² · Σ_e C[r, e] · S[r, e],   C = Σ_layers counts,  S = Σ_layers score sums
// which is E · Σ_e (mean assignments of e over all layers' tokens) · (mean score of e). Counts are
// constants:
//   ∂aux_r / ∂S[r, e] = E / T_r² · C[r, e],     the same in every layer.
// The scopes of a step weigh by their tokens: aux = Σ_r (n_r / N) · aux_r, N tokens of the global
// batch. Source: transformers, load_balancing_loss_func.
//
// That of Transformer Engine and Megatron is one loss a layer, K times smaller:
//   aux_r = E / (K·n_r²) · Σ_e C[r, e] · S[r, e],   ∂aux_r / ∂S[r, e] = E / (K·n_r²) · C[r, e]
// The z-loss of a layer is the mean over the routed tokens of logsumexp(l)²: Σ_r z_sums[r] / N.
// Source of the latter: Zoph et al., "ST-MoE", 2022.
#pragma once

#include <vector>

#include "cistron/ops/context.h"
#include "cistron/ops/router/router.h"

namespace cistron::nn {

struct LoadBalancingLoss {
  Tensor value;       // f64 []: Σ_r (n_r / N) · aux_r
  Tensor score_grad;  // f64 [R, E]: coefficient · ∂value / ∂S
};

// `layers`: statistics of each layer, [R, E], already summed over the ranks that share a scope.
// `inv_tokens` f64 []: 1 / N. Masked tokens are in neither. Scopes without tokens contribute
// nothing.
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

// Loss-free balancing, once an optimiser step: bias[e] += rate · sign(mean(counts) − counts[e]).
// counts i64 [E] over the whole global batch, bias [E] in the compute type. The comparison is
// exact. Source: Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts",
// 2024.
void UpdateExpertBias(const Tensor& counts, double rate, const Tensor& bias);

}  // namespace cistron::nn
