// balance_loss: auxiliary losses of the router, from its statistics, and what loss-free balancing
// does with the counts.
//
//   LoadBalancingLoss       over all layers at once, as Hugging Face's Mixtral takes it. For a
//     scope r (all tokens of a micro-step, or one sequence) with n_r tokens and T_r = layers · n_r:
//       aux_r = E / T_r² · Σ_e C[r, e] · S[r, e],   C = Σ_layers counts,  S = Σ_layers score sums
//     which is E · Σ_e (mean assignments of e over all layers' tokens) · (mean score of e). Counts
//     are constants:
//       ∂aux_r / ∂S[r, e] = E / T_r² · C[r, e],     the same in every layer.
//     The scopes of a step weigh by their tokens: value = Σ_r (n_r / N) · aux_r, N tokens of the
//     global batch; score_grad = coefficient · ∂value / ∂S.
//   LayerLoadBalancingLoss  one loss a layer, as Transformer Engine and Megatron take it, K times
//     smaller: aux_r = E / (K·n_r²) · Σ_e C[r, e] · S[r, e]
//   RouterZLoss             the mean over the routed tokens of logsumexp(l)²: value = Σ_r z_sums[r]
//     / N; grad[r] = coefficient / N
//   UpdateExpertBias        bias[e] += rate · sign(mean(counts) − counts[e]), compared exactly
//   AddCounts               to[e] += Σ over rows of from[·, e]
//
// Shapes: counts i64 [R, E], score_sums f64 [R, E] of each layer, already summed over the ranks
//         that share a scope; inv_tokens f64 []: 1 / N, masked tokens are in neither. z_sums and
//         grad f64 [R]; value f64 []; score_grad f64 [R, E]. All outputs are written.
//         UpdateExpertBias: counts i64 [E] over the whole global batch, bias [E] f32 or f64;
//         gate f64 [], optional: where it is NaN nothing changes (GateUpdate in reduce.h).
//         AddCounts: i64; the elements of `from` are a multiple of those of `to`.
// Scopes without tokens contribute nothing. Sums run in a fixed order.
// Sources: transformers, load_balancing_loss_func; Zoph et al., "ST-MoE", 2022; Wang et al.,
// "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024.
#pragma once

#include <span>

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/ops/router/router.h"

namespace cistron::ops {

void LoadBalancingLoss(const Context& ctx, std::span<const RouterOutputs> layers,
                       std::int64_t top_k, double coefficient, const Tensor& inv_tokens,
                       const Tensor& value, const Tensor& score_grad);
void LayerLoadBalancingLoss(const Context& ctx, const RouterOutputs& layer, std::int64_t top_k,
                            double coefficient, const Tensor& inv_tokens, const Tensor& value,
                            const Tensor& score_grad);
void RouterZLoss(const Context& ctx, const Tensor& z_sums, double coefficient,
                 const Tensor& inv_tokens, const Tensor& value, const Tensor& grad);
void UpdateExpertBias(const Context& ctx, const Tensor& counts, double rate, const Tensor& bias,
                      const Tensor& gate = {});
void AddCounts(const Context& ctx, const Tensor& from, const Tensor& to);

struct BalanceLossProblem {
  DType dtype;  // of the bias; f64 for the losses and counts
  std::int64_t experts;
};
struct BalanceLossRun {
  // value = value_factor · Σ_r (n_r / N) · aux_r by the first definition.
  void (*load_balancing)(const Context&, std::span<const RouterOutputs> layers, std::int64_t top_k,
                         double coefficient, double value_factor, const Tensor& inv_tokens,
                         const Tensor& value, const Tensor& score_grad);
  void (*z)(const Context&, const Tensor& z_sums, double coefficient, const Tensor& inv_tokens,
            const Tensor& value, const Tensor& grad);
  void (*update_bias)(const Context&, const Tensor& counts, double rate, const Tensor& bias,
                      const Tensor& gate);
  void (*add_counts)(const Context&, const Tensor& from, const Tensor& to);
};
using BalanceLossImpl = Implementation<BalanceLossProblem, BalanceLossRun>;
std::span<const BalanceLossImpl> BalanceLossImpls();

}  // namespace cistron::ops
