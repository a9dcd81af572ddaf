// What the CPU kernels of the router share: blocks of tokens, and tiles of 16 tokens side by side.
//
// A tile holds its values expert by expert, 16 tokens in a row, so that vectors run over tokens:
// the same code serves 1 and 512 experts, and each token's sums run over the experts in order, as
// in the reference.
#pragma once

#include <vector>

#include "cistron/ops/router/router_impls.h"

namespace cistron::ops {

inline constexpr std::int64_t kTileTokens = 16;
inline constexpr std::int64_t kRouterBlock = 256;  // tokens whose statistics are summed together

// Consecutive tokens of one row of the statistics; scope −1: tokens that count in none.
struct RouterBlock {
  std::int64_t begin, end, scope;
};

// Statistics of one block.
struct BlockStatistics {
  std::vector<std::int64_t> counts;  // [E]
  std::vector<double> score_sums;    // [E]
  double z_sum = 0;
  std::int64_t nonfinite = 0;
};

// Values of one tile; each vector is [experts or K][16].
struct RouterTile {
  explicit RouterTile(const RouterConfig& config)
      : logits(static_cast<std::size_t>(config.num_experts * kTileTokens)),
        exponentials(logits.size()),
        sigmoids(config.score == ScoreFunction::kSigmoid ? logits.size() : 0),
        grad(logits.size()),
        keys(logits.size()),
        probs(static_cast<std::size_t>(config.top_k * kTileTokens)),
        chosen(probs.size()) {}

  std::int64_t count = 0;     // tokens in the tile
  bool routed[kTileTokens];   // false: masked, or beyond `count`
  std::vector<float> logits;  // 0 where not routed
  std::vector<float> exponentials, sigmoids, grad;
  std::vector<std::int32_t> keys;  // order of choice; see OrderedKey
  std::vector<float> probs;
  std::vector<std::int32_t> chosen;
  // One value a token.
  float largest[kTileTokens], sum_of_exponentials[kTileTokens], sum_of_sigmoids[kTileTokens];
  float log_sum_exp[kTileTokens];
  std::int32_t nonfinite[kTileTokens];
};

// Arguments of the kernels, as in router.h.
struct RouterForwardArgs {
  const RouterConfig& config;
  const Tensor& logits;
  const Tensor& bias;
  const Tensor& token_mask;
  const RouterOutputs& out;
};
struct RouterBackwardArgs {
  const RouterConfig& config;
  const Tensor& dprobs;
  const Tensor& logits;
  const Tensor& experts;
  const Tensor& token_mask;
  const Tensor& aux_grad;
  const Tensor& z_grad;
  const Output& dlogits;
};

}  // namespace cistron::ops
