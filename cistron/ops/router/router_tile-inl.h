// Steps of the router on one tile, for every instruction set. Read router_tile.h first.
//
// Sigmoids come from the C library's exp, as in the reference: they decide the choice of experts,
// which must be the same bit for bit in every implementation. Exponentials of the softmax decide
// nothing.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cistron/ops/exp-inl.h"
#include "cistron/ops/router/router_tile.h"

#if defined(CISTRON_OPS_ROUTER_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_ROUTER_TILE_INL_H_
#undef CISTRON_OPS_ROUTER_TILE_INL_H_
#else
#define CISTRON_OPS_ROUTER_TILE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {

using IntTag = hn::RebindToSigned<FloatTag>;
static_assert(kTileTokens % kLanes == 0);

// Calls f(i) for the first token i of each vector of a tile.
template <class F>
HWY_INLINE void ForEachVector(F&& f) {
  for (std::int64_t i = 0; i < kTileTokens; i += kLanes) f(i);
}

constexpr std::int32_t kTaken = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kNanKey = kTaken + 1;

// An integer that orders as the choice does: larger first, −0 equal to 0, NaN below everything
// else.
HWY_INLINE hn::Vec<IntTag> OrderedKey(FloatVec value) {
  const FloatTag d;
  const IntTag di;
  const auto bits = hn::BitCast(di, hn::Add(value, hn::Zero(d)));  // −0 + 0 = +0
  const auto magnitude = hn::And(hn::BroadcastSignBit(bits), hn::Set(di, 0x7fffffff));
  const auto ordered = hn::Xor(bits, magnitude);
  return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(value)), hn::Set(di, kNanKey), ordered);
}
HWY_INLINE std::int32_t OrderedKey(float value) {
  if (std::isnan(value)) return kNanKey;
  const auto bits = std::bit_cast<std::int32_t>(value + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

template <class T>
HWY_INLINE void LoadTile(const RouterConfig& config, const T* logits, const std::uint8_t* mask,
                         std::int64_t begin, std::int64_t end, RouterTile& tile) {
  const std::int64_t experts = config.num_experts;
  tile.count = std::min(kTileTokens, end - begin);
  std::fill(tile.logits.begin(), tile.logits.end(), 0.0f);
  for (std::int64_t i = 0; i < kTileTokens; ++i) {
    tile.routed[i] = i < tile.count && (mask == nullptr || mask[begin + i] != 0);
    if (!tile.routed[i]) continue;
    const T* row = logits + (begin + i) * experts;
    for (std::int64_t e = 0; e < experts; ++e) {
      tile.logits[static_cast<std::size_t>(e * kTileTokens + i)] = static_cast<float>(row[e]);
    }
  }
}

// softmax over all experts: largest, exponentials, their sum, log-sum-exp.
HWY_INLINE void SoftmaxOverExperts(const RouterConfig& config, RouterTile& tile) {
  const FloatTag d;
  ForEachVector([&](std::int64_t i) {
    const float* l = tile.logits.data() + i;
    float* out = tile.exponentials.data() + i;
    FloatVec largest = hn::LoadU(d, l);
    for (std::int64_t e = 1; e < config.num_experts; ++e) {
      largest = hn::Max(largest, hn::LoadU(d, l + e * kTileTokens));
    }
    FloatVec sum = hn::Zero(d);
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      const FloatVec x = Exp(hn::Sub(hn::LoadU(d, l + e * kTileTokens), largest));
      hn::StoreU(x, d, out + e * kTileTokens);
      sum = hn::Add(sum, x);
    }
    hn::StoreU(largest, d, tile.largest + i);
    hn::StoreU(sum, d, tile.sum_of_exponentials + i);
  });
  for (std::int64_t i = 0; i < kTileTokens; ++i) {
    tile.log_sum_exp[i] = tile.largest[i] + std::log(tile.sum_of_exponentials[i]);
  }
}

HWY_INLINE void SigmoidOfExperts(const RouterConfig& config, RouterTile& tile) {
  std::fill_n(tile.sum_of_sigmoids, kTileTokens, 0.0f);
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    for (std::int64_t i = 0; i < kTileTokens; ++i) {
      const auto at = static_cast<std::size_t>(e * kTileTokens + i);
      tile.sigmoids[at] = 1.0f / (1.0f + std::exp(-tile.logits[at]));
      tile.sum_of_sigmoids[i] += tile.sigmoids[at];
    }
  }
}

// The distribution over all experts of the auxiliary loss: softmax, or s / Σ s.
HWY_INLINE FloatVec Distribution(const RouterConfig& config, const RouterTile& tile, std::int64_t e,
                                 std::int64_t i) {
  const FloatTag d;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  const std::vector<float>& scores = sigmoid ? tile.sigmoids : tile.exponentials;
  const float* sums = sigmoid ? tile.sum_of_sigmoids : tile.sum_of_exponentials;
  return hn::Div(hn::LoadU(d, scores.data() + e * kTileTokens + i), hn::LoadU(d, sums + i));
}

// Largest of `count` keys at a stride of one tile row, the first of equals; −1 when all are taken.
HWY_INLINE std::int64_t ArgMax(const std::int32_t* keys, std::int64_t count) {
  std::int64_t best = -1;
  std::int32_t largest = kTaken;
  for (std::int64_t j = 0; j < count; ++j) {
    if (keys[j * kTileTokens] > largest) {
      largest = keys[j * kTileTokens];
      best = j;
    }
  }
  return best;
}

// Takes the experts outside the best groups out of the choice of token i.
HWY_INLINE void LimitToGroups(const RouterConfig& config, const float* bias, std::int64_t i,
                              RouterTile& tile) {
  const std::int64_t size = config.num_experts / config.num_groups;
  const std::int64_t counted = config.top_k / config.groups_kept;
  std::int32_t* keys = tile.keys.data() + i;
  std::vector<std::int32_t> saved(static_cast<std::size_t>(size));
  std::vector<std::int32_t> group_keys(static_cast<std::size_t>(config.num_groups * kTileTokens));
  for (std::int64_t g = 0; g < config.num_groups; ++g) {
    std::int32_t* group = keys + g * size * kTileTokens;
    for (std::int64_t j = 0; j < size; ++j) {
      saved[static_cast<std::size_t>(j)] = group[j * kTileTokens];
    }
    float sum = 0;  // in descending order, as the reference adds
    for (std::int64_t n = 0; n < counted; ++n) {
      const std::int64_t j = ArgMax(group, size);
      const std::int64_t e = g * size + j;
      const float s = tile.sigmoids[static_cast<std::size_t>(e * kTileTokens + i)];
      sum += bias ? s + bias[e] : s;
      group[j * kTileTokens] = kTaken;
    }
    for (std::int64_t j = 0; j < size; ++j) {
      group[j * kTileTokens] = saved[static_cast<std::size_t>(j)];
    }
    group_keys[static_cast<std::size_t>(g * kTileTokens)] = OrderedKey(sum);
  }
  std::vector<bool> kept(static_cast<std::size_t>(config.num_groups), false);
  for (std::int64_t n = 0; n < config.groups_kept; ++n) {
    const std::int64_t g = ArgMax(group_keys.data(), config.num_groups);
    kept[static_cast<std::size_t>(g)] = true;
    group_keys[static_cast<std::size_t>(g * kTileTokens)] = kTaken;
  }
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    if (!kept[static_cast<std::size_t>(e / size)]) keys[e * kTileTokens] = kTaken;
  }
}

HWY_INLINE void ChooseExperts(const RouterConfig& config, const float* bias, RouterTile& tile) {
  const FloatTag d;
  const IntTag di;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  const float* scores = sigmoid ? tile.sigmoids.data() : tile.logits.data();
  ForEachVector([&](std::int64_t i) {
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      FloatVec score = hn::LoadU(d, scores + e * kTileTokens + i);
      if (bias) score = hn::Add(score, hn::Set(d, bias[e]));
      hn::StoreU(OrderedKey(score), di, tile.keys.data() + e * kTileTokens + i);
    }
  });
  if (config.num_groups > 1) {
    for (std::int64_t i = 0; i < tile.count; ++i) LimitToGroups(config, bias, i, tile);
  }
  for (std::int64_t k = 0; k < config.top_k; ++k) {
    std::int32_t* chosen = tile.chosen.data() + k * kTileTokens;
    ForEachVector([&](std::int64_t i) {
      auto best = hn::Set(di, kTaken);
      auto index = hn::Zero(di);
      for (std::int64_t e = 0; e < config.num_experts; ++e) {
        const auto key = hn::LoadU(di, tile.keys.data() + e * kTileTokens + i);
        const auto larger = hn::Gt(key, best);  // not for equals: the lower expert stays
        best = hn::IfThenElse(larger, key, best);
        index = hn::IfThenElse(larger, hn::Set(di, static_cast<std::int32_t>(e)), index);
      }
      hn::StoreU(index, di, chosen + i);
    });
    for (std::int64_t i = 0; i < kTileTokens; ++i) {
      tile.keys[static_cast<std::size_t>(chosen[i] * kTileTokens + i)] = kTaken;
    }
  }
}

HWY_INLINE bool Normalizes(const RouterConfig& config) {
  return config.normalize && (config.score == ScoreFunction::kSoftmaxAfterTopK ||
                              (config.score == ScoreFunction::kSigmoid && config.top_k > 1));
}

// values[k][16] = from[chosen[k]][16] for every token.
HWY_INLINE void GatherChosen(const RouterConfig& config, const std::vector<float>& from,
                             const RouterTile& tile, std::vector<float>& values) {
  for (std::size_t at = 0; at < values.size(); ++at) {
    values[at] = from[static_cast<std::size_t>(tile.chosen[at]) * kTileTokens + at % kTileTokens];
  }
}

// Probabilities of the chosen experts before routed_scaling, in tile.probs; `sums` receives what
// the normalised ones were divided by. Needs SoftmaxOverExperts where a softmax is not normalised.
HWY_INLINE void ProbabilitiesOfChosen(const RouterConfig& config, RouterTile& tile, float* sums) {
  const FloatTag d;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  const bool normalizes = Normalizes(config);
  if (sigmoid) {
    GatherChosen(config, tile.sigmoids, tile, tile.probs);
  } else {
    GatherChosen(config, normalizes ? tile.logits : tile.exponentials, tile, tile.probs);
  }
  ForEachVector([&](std::int64_t i) {
    float* p = tile.probs.data() + i;
    FloatVec sum = hn::Zero(d);
    if (!sigmoid && normalizes) {
      const FloatVec largest = hn::LoadU(d, p);  // the first is the largest
      for (std::int64_t k = 0; k < config.top_k; ++k) {
        float* at = p + k * kTileTokens;
        hn::StoreU(Exp(hn::Sub(hn::LoadU(d, at), largest)), d, at);
      }
    }
    for (std::int64_t k = 0; k < config.top_k; ++k) {
      sum = hn::Add(sum, hn::LoadU(d, p + k * kTileTokens));
    }
    if (sigmoid) sum = hn::Add(sum, hn::Set(d, 1e-20f));
    if (!normalizes) {
      sum = sigmoid ? hn::Set(d, 1.0f) : hn::LoadU(d, tile.sum_of_exponentials + i);
    }
    for (std::int64_t k = 0; k < config.top_k; ++k) {
      float* at = p + k * kTileTokens;
      hn::StoreU(hn::Div(hn::LoadU(d, at), sum), d, at);
    }
    hn::StoreU(sum, d, sums + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
