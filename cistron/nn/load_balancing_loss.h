// The auxiliary loss of Hugging Face's Mixtral, from the router statistics of all layers.
//
// For a scope r (all tokens of a micro-step, or one sequence) with n_r tokens and T_r = layers ·
// n_r:
//   aux_r = E / T_r² · Σ_e C[r, e] · S[r, e],   C = Σ_layers counts,  S = Σ_layers score sums
// which is E · Σ_e (mean assignments of e over all layers' tokens) · (mean score of e). Counts are
// constants:
//   ∂aux_r / ∂S[r, e] = E / T_r² · C[r, e],     the same in every layer.
// The scopes of a step weigh by their tokens: aux = Σ_r (n_r / N) · aux_r, N tokens of the global
// batch. Source: transformers, load_balancing_loss_func.
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

}  // namespace cistron::nn
