// router: scores, top-k choice, probabilities, and the statistics of the auxiliary losses.
//
// All arithmetic from the logits on is in the compute type (f32; f64 for f64).
//   softmax before top-k:  I = topk(l);        p = softmax(l)[I]
//   softmax after top-k:   I = topk(l);        p = softmax(l[I])             (Mixtral)
//   sigmoid:               s = sigmoid(l); I = topk(s + bias); p = s[I]; normalised if K > 1 and
//                          normalize: p / (Σ p + 1e-20)
//   group-limited (sigmoid): score(g) = sum of the top (K / groups_kept) of s + bias in group g;
//   experts
//                          outside the groups_kept best groups are −inf
// The K slots are in descending order of the selection score; ties go to the lower expert and the
// lower group; the K experts of a token are distinct even for NaN or −inf logits (NaN sorts last,
// by the raw logits), and such tokens are counted in `nonfinite_tokens`. p is taken from s, never
// from (s+bias)−bias. `normalize=false` leaves softmax-after-top-k as softmax over all experts
// taken at I (norm_topk_prob). routed_scaling multiplies p last.
//
// Shapes: logits [T, E] (f64, f32 or bf16); bias [E] compute type; experts i32 [T, K]; probs [T,
// K]. token_mask u8 [T], optional: tokens with 0 are not routed (experts −1, probs 0) and count
// nowhere. Tokens outside every sequence of `scopes` are routed (unless masked) but count in no
// statistic of a loss. Sums over tokens run in fixed blocks, in order: the bits do not depend on
// the number of threads. Values on a device (cu_seqlens, experts of backward) are not read by the
// host: there offsets are cut to the tokens that there are, and an expert outside [0, E) has no
// gradient. Sources: Jiang et al., "Mixtral of experts", 2024; DeepSeek-V3 technical
// report, 2024.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/ops/packed_sequences.h"

namespace cistron::ops {

enum class ScoreFunction { kSoftmaxBeforeTopK, kSoftmaxAfterTopK, kSigmoid };

struct RouterConfig {
  ScoreFunction score = ScoreFunction::kSoftmaxAfterTopK;
  std::int64_t num_experts = 1;  // E, 1…512
  std::int64_t top_k = 1;        // K ≤ min(E, 32)
  std::int64_t num_groups = 1;   // > 1: group-limited, sigmoid only
  std::int64_t groups_kept = 1;
  bool normalize = true;
  double routed_scaling = 1.0;
  // RouterOutputs::experts hold a choice, and are not written: it is that of another run, to be
  // compared with. The reference alone does this.
  bool given_experts = false;
};

struct RouterOutputs {
  Tensor experts{};  // i32 [T, K]
  Tensor probs{};    // compute type [T, K]
  // Statistics for the losses, one row a scope (1 row, or one a sequence); undefined: not computed.
  Tensor counts{};            // i64 [R, E]: assignments over all K slots
  Tensor score_sums{};        // f64 [R, E]: Σ_t of softmax over all E (sigmoid: s / Σ s)
  Tensor z_sums{};            // f64 [R]: Σ_t logsumexp(l)²
  Tensor nonfinite_tokens{};  // i64 []: tokens with a NaN or infinite logit
};

// `scopes` gives the sequences when statistics are one row a sequence (R = its number); with
// undefined cu_seqlens there is one row (R = 1).
void RouterForward(const Context& ctx, const RouterConfig& config, const Tensor& logits,
                   const Tensor& bias, const Tensor& token_mask, const PackedSequences& scopes,
                   const RouterOutputs& out);

// Gradient with respect to the logits of Σ dprobs·probs + Σ_r Σ_e aux_grad[r, e]·score_sums[r, e]
// + Σ_r z_grad[r]·z_sums[r]. Counts are constants.
//   dprobs [T, K] compute type; aux_grad f64 [R, E]; z_grad f64 [R] (each may be undefined);
//   dlogits [T, E] in the dtype of the logits, 0 for masked tokens
void RouterBackward(const Context& ctx, const RouterConfig& config, const Tensor& dprobs,
                    const Tensor& logits, const Tensor& experts, const Tensor& token_mask,
                    const PackedSequences& scopes, const Tensor& aux_grad, const Tensor& z_grad,
                    const Output& dlogits);

struct RouterProblem {
  DType dtype;
  RouterConfig config;
  std::int64_t tokens;
};
struct RouterRun {
  void (*forward)(const Context&, const RouterConfig&, const Tensor& logits, const Tensor& bias,
                  const Tensor& token_mask, const PackedSequences& scopes, const RouterOutputs&);
  void (*backward)(const Context&, const RouterConfig&, const Tensor& dprobs, const Tensor& logits,
                   const Tensor& experts, const Tensor& token_mask, const PackedSequences& scopes,
                   const Tensor& aux_grad, const Tensor& z_grad, const Output& dlogits);
};
using RouterImpl = Implementation<RouterProblem, RouterRun>;
std::span<const RouterImpl> RouterImpls();

}  // namespace cistron::ops
