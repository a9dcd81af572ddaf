// MoeLayer: router, dispatch, expert SwiGLU MLPs, combine.
//
//   x ← x·U(1 − j, 1 + j)  (with jitter, in training)
//   l = x·Wgᵀ;  I, p = router(l + bias's choice);  rows = dispatch(x, I)
//   [a | b] = rows·W1[e]ᵀ;  A = silu(a)·b·p;  y[t] = Σ_k A·W2[e]ᵀ  (+ shared(x[t]))
// The probability acts between SwiGLU and the second product, so its gradient is a row sum of the
// activation's and the experts' outputs are neither kept nor recomputed. Kept for backward: x, the
// dispatched rows, the pre-activation, the routing. No token is ever dropped; there is no capacity.
// The shared expert is a SwiGLU MLP that every token uses, an expert layer of one group, so that it
// fuses and quantises as the experts do. A CPU does not give it
// padding at the end.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "cistron/nn/linear.h"
#include "cistron/nn/saved.h"
#include "cistron/nn/sequential.h"
#include "cistron/nn/token_dispatcher.h"
#include "cistron/ops/jitter/jitter.h"
#include "cistron/ops/router/router.h"

namespace cistron::nn {

class MoeLayer {
 public:
  struct Config {
    std::int64_t hidden = 0;  // H
    std::int64_t ffn = 0;     // F
    ops::RouterConfig router;
    bool expert_bias = false;  // sigmoid scores: a bias that only selects
    double jitter = 0;         // j
    // In training the router's logits are random numbers in their place; gradients pass as if they
    // were the gate's (as Megatron-LM's moe_router_force_load_balancing does).
    bool force_balance = false;
    std::int64_t layer = 0;       // of the model, for the jitter's random numbers
    std::int64_t shared_ffn = 0;  // width of the shared expert; 0: none
  };
  // Parameters: prefix + "gate.weight" [E, H], "experts.gate_up_proj" [E, 2F, H],
  // "experts.down_proj" [E, H, F]; with a shared expert of width F' "shared_experts.gate_up_proj"
  // [1, 2F', H] and "shared_experts.down_proj" [1, H, F']. With a bias the buffer
  // "gate.e_score_correction_bias" [E].
  MoeLayer(ParameterStore& store, TokenDispatcher& dispatcher, const std::string& prefix,
           const Config& config);

  struct Routing {
    Tensor logits;  // [T, E], the model's dtype
    ops::RouterOutputs router;
  };
  // What the random numbers of a pass are functions of, besides layer and element.
  struct Noise {
    std::uint64_t seed = 0;
    Tensor step{};                 // i64 []: the update, on the device; undefined: no jitter
    std::int64_t first_token = 0;  // data::Batch::first_token
  };
  // Of which statistics: none, those of the load (counts, score sums, tokens that are not finite),
  // or z sums as well.
  enum class Statistics { kNone, kLoad, kLoadAndZ };
  // Statistics are computed where `scopes` has rows for them: see RouterForward. Where
  // `routing.router.experts` are there already, they are taken (RouterConfig::given_experts).
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const Tensor& token_mask,
                 const ops::PackedSequences& scopes, Statistics statistics, const Noise& noise,
                 Routing& routing, Saved* saved) const;
  // The experts' products, and how they are fused.
  const Sequential& experts() const { return *experts_; }

  // Its MLP that every token uses; null where there is none.
  const Sequential* shared_expert() const { return shared_.get(); }
  // [E] in the compute type; undefined where there is none.
  const Tensor& expert_bias() const { return bias_; }

  // Gradients of the loss with respect to the statistics; each may be undefined.
  struct StatisticsGradients {
    Tensor score_sums{};  // f64 [R, E]
    Tensor z_sums{};      // f64 [R]
  };
  Tensor Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& token_mask,
                  const ops::PackedSequences& scopes, const StatisticsGradients& gradients,
                  Saved& saved) const;

 private:
  struct Record {
    SavedOperand x;  // of the gate
    Tensor logits, experts;
    std::shared_ptr<const TokenDispatcher::State> dispatch;
    std::int64_t rows = 0;
    Noise noise{};
    std::int64_t shared_rows = 0;  // that the shared expert computed
  };
  // split_sizes of the shared expert, by their only value.
  class SharedSplit {
   public:
    Tensor Of(const ops::Context& ctx, std::int64_t rows);

   private:
    std::mutex mutex_;
    std::map<std::int64_t, Tensor> splits_;
  };
  // Logits that are all 1, of which random ones are made, by the number of tokens.
  class EvenLogits {
   public:
    Tensor Of(const ops::Context& ctx, std::int64_t tokens, std::int64_t experts, DType dtype);

   private:
    std::mutex mutex_;
    std::map<std::int64_t, Tensor> ones_;
  };
  ops::JitterConfig JitterOf(const Noise& noise) const {
    return {config_.jitter, noise.seed, config_.layer, noise.first_token};
  }
  Config config_;
  TokenDispatcher* dispatcher_;
  Linear gate_;
  std::unique_ptr<Sequential> experts_, shared_;
  std::unique_ptr<SharedSplit> shared_split_;
  std::unique_ptr<EvenLogits> even_logits_;  // where force_balance is set
  Tensor bias_;
  std::string name_, input_weight_;  // the layer's, and the parameter that its rows enter
};

}  // namespace cistron::nn
