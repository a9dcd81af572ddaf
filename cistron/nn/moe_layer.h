// MoeLayer: router, dispatch, expert SwiGLU MLPs, combine.
//
//   l = x·Wgᵀ;  I, p = router(l);  rows = dispatch(x, I)
//   [a | b] = rows·W1[e]ᵀ;  A = silu(a)·b·p;  y[t] = Σ_k A·W2[e]ᵀ
// The probability acts between SwiGLU and the second product, so its gradient is a row sum of the
// activation's and the experts' outputs are neither kept nor recomputed. Kept for backward: x, the
// dispatched rows, the pre-activation, the routing. No token is ever dropped; there is no capacity.
#pragma once

#include <string>

#include "cistron/nn/linear.h"
#include "cistron/nn/saved.h"
#include "cistron/nn/sequential.h"
#include "cistron/nn/token_dispatcher.h"
#include "cistron/ops/router/router.h"

namespace cistron::nn {

class MoeLayer {
 public:
  struct Config {
    std::int64_t hidden = 0;  // H
    std::int64_t ffn = 0;     // F
    ops::RouterConfig router;
  };
  // Parameters: prefix + "gate.weight" [E, H], "experts.gate_up_proj" [E, 2F, H],
  // "experts.down_proj" [E, H, F].
  MoeLayer(ParameterStore& store, TokenDispatcher& dispatcher, const std::string& prefix,
           const Config& config);

  struct Routing {
    Tensor logits;  // [T, E], the model's dtype
    ops::RouterOutputs router;
  };
  // Statistics are computed where `scopes` has rows for them: see RouterForward. `statistics` asks
  // for them.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const Tensor& token_mask,
                 const ops::PackedSequences& scopes, bool statistics, Routing& routing,
                 Saved* saved) const;
  // The experts' products, and how they are fused.
  const Sequential& experts() const { return *experts_; }

  // `aux_grad` f64 [R, E], optional: gradient of the loss with respect to the score sums.
  Tensor Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& token_mask,
                  const ops::PackedSequences& scopes, const Tensor& aux_grad, Saved& saved) const;

 private:
  struct Record {
    Tensor x, logits, experts;
    std::shared_ptr<const TokenDispatcher::State> dispatch;
    std::int64_t rows = 0;
  };
  Config config_;
  TokenDispatcher* dispatcher_;
  Linear gate_;
  std::unique_ptr<Sequential> experts_;
  std::string name_;
};

}  // namespace cistron::nn
