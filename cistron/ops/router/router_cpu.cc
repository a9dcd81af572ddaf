// router on the CPU: vectors over the tokens of a tile (router_tile.h), threads over blocks of
// tokens. Statistics are summed token by token within a block and block by block in order, so their
// bits do not depend on the threads.
#include "cistron/base/threads.h"
#include "cistron/ops/router/router_tile.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/router/router_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/router/router_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

template <class T>
void LoadTileOf(const RouterConfig& config, const Tensor& logits, const Tensor& mask,
                std::int64_t begin, std::int64_t end, RouterTile& tile) {
  LoadTile(config, logits.data<T>(), mask ? mask.data<std::uint8_t>() : nullptr, begin, end, tile);
}

void Load(const RouterConfig& config, const Tensor& logits, const Tensor& mask, std::int64_t begin,
          std::int64_t end, RouterTile& tile) {
  if (logits.dtype() == DType::kBF16) {
    LoadTileOf<bf16>(config, logits, mask, begin, end, tile);
  } else {
    LoadTileOf<float>(config, logits, mask, begin, end, tile);
  }
}

HWY_INLINE std::int64_t CountNonfinite(const RouterConfig& config, RouterTile& tile) {
  const FloatTag d;
  const IntTag di;
  ForEachVector([&](std::int64_t i) {
    auto found = hn::Zero(di);
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      const auto l = hn::LoadU(d, tile.logits.data() + e * kTileTokens + i);
      found = hn::IfThenElse(hn::RebindMask(di, hn::IsFinite(l)), found, hn::Set(di, 1));
    }
    hn::StoreU(found, di, tile.nonfinite + i);
  });
  std::int64_t count = 0;
  for (const std::int32_t one : tile.nonfinite) count += one;
  return count;
}

HWY_INLINE void AddStatistics(const RouterForwardArgs& args, RouterTile& tile,
                              BlockStatistics& sums) {
  const FloatTag d;
  const RouterConfig& config = args.config;
  for (std::size_t at = 0; at < tile.chosen.size(); ++at) {
    if (tile.routed[at % kTileTokens]) {
      ++sums.counts[static_cast<std::size_t>(tile.chosen[at])];
    }
  }
  if (args.out.score_sums) {
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      float shares[kTileTokens];
      ForEachVector(
          [&](std::int64_t i) { hn::StoreU(Distribution(config, tile, e, i), d, shares + i); });
      for (std::int64_t i = 0; i < kTileTokens; ++i) {
        if (tile.routed[i]) sums.score_sums[static_cast<std::size_t>(e)] += shares[i];
      }
    }
  }
  if (args.out.z_sums) {
    for (std::int64_t i = 0; i < kTileTokens; ++i) {
      const double z = tile.log_sum_exp[i];
      if (tile.routed[i]) sums.z_sum += z * z;
    }
  }
}

HWY_INLINE void StoreChoice(const RouterForwardArgs& args, std::int64_t begin,
                            const RouterTile& tile) {
  const std::int64_t k = args.config.top_k;
  const float scaling = static_cast<float>(args.config.routed_scaling);
  std::int32_t* experts = args.out.experts.data<std::int32_t>() + begin * k;
  float* probs = args.out.probs.data<float>() + begin * k;
  for (std::int64_t i = 0; i < tile.count; ++i) {
    for (std::int64_t slot = 0; slot < k; ++slot) {
      const auto at = static_cast<std::size_t>(slot * kTileTokens + i);
      experts[i * k + slot] = tile.routed[i] ? tile.chosen[at] : -1;
      probs[i * k + slot] = tile.routed[i] ? tile.probs[at] * scaling : 0.0f;
    }
  }
}

void ForwardBlock(const RouterForwardArgs& args, const RouterBlock& block, RouterTile& tile,
                  BlockStatistics& sums) {
  const RouterConfig& config = args.config;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  const bool needs_softmax = (!sigmoid && (!Normalizes(config) || args.out.score_sums)) ||
                             static_cast<bool>(args.out.z_sums);
  const float* bias = args.bias ? args.bias.data<float>() : nullptr;
  for (std::int64_t begin = block.begin; begin < block.end; begin += kTileTokens) {
    Load(config, args.logits, args.token_mask, begin, block.end, tile);
    sums.nonfinite += CountNonfinite(config, tile);
    if (sigmoid) SigmoidOfExperts(config, tile);
    if (needs_softmax) SoftmaxOverExperts(config, tile);
    ChooseExperts(config, bias, tile);
    float divisors[kTileTokens];
    ProbabilitiesOfChosen(config, tile, divisors);
    StoreChoice(args, begin, tile);
    if (block.scope >= 0) AddStatistics(args, tile, sums);
  }
}

// Gradient of Σ dprobs·probs, added to tile.grad.
HWY_INLINE void AddProbabilityGradient(const RouterBackwardArgs& args, std::int64_t begin,
                                       RouterTile& tile) {
  const FloatTag d;
  const RouterConfig& config = args.config;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid, normalizes = Normalizes(config);
  const std::int64_t k = config.top_k;
  const std::int32_t* experts = args.experts.data<std::int32_t>() + begin * k;
  const float* dprobs = args.dprobs.data<float>() + begin * k;
  for (std::size_t at = 0; at < tile.chosen.size(); ++at) {
    const std::int64_t i = static_cast<std::int64_t>(at) % kTileTokens;
    tile.chosen[at] =
        tile.routed[i] ? experts[i * k + static_cast<std::int64_t>(at) / kTileTokens] : 0;
  }
  float divisors[kTileTokens], inner[kTileTokens] = {};
  ProbabilitiesOfChosen(config, tile, divisors);
  const auto upstream = [&](std::int64_t i, std::int64_t slot) {
    return dprobs[i * k + slot] * static_cast<float>(config.routed_scaling);
  };
  for (std::int64_t slot = 0; slot < k; ++slot) {
    for (std::int64_t i = 0; i < kTileTokens; ++i) {
      if (!tile.routed[i]) continue;
      inner[i] += upstream(i, slot) * tile.probs[static_cast<std::size_t>(slot * kTileTokens + i)];
    }
  }
  if (!sigmoid && !normalizes) {
    // Every expert shares the denominator.
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      ForEachVector([&](std::int64_t i) {
        float* at = tile.grad.data() + e * kTileTokens + i;
        const FloatVec share = hn::Mul(hn::LoadU(d, inner + i), Distribution(config, tile, e, i));
        hn::StoreU(hn::Sub(hn::LoadU(d, at), share), d, at);
      });
    }
  }
  for (std::int64_t slot = 0; slot < k; ++slot) {
    for (std::int64_t i = 0; i < kTileTokens; ++i) {
      if (!tile.routed[i]) continue;
      const auto at = static_cast<std::size_t>(slot * kTileTokens + i);
      const auto to = static_cast<std::size_t>(tile.chosen[at] * kTileTokens + i);
      const float through = normalizes ? upstream(i, slot) - inner[i] : upstream(i, slot);
      if (sigmoid) {
        const float s = tile.sigmoids[to];
        tile.grad[to] += (normalizes ? through / divisors[i] : through) * s * (1 - s);
      } else {
        tile.grad[to] += tile.probs[at] * through;
      }
    }
  }
}

// Gradient of Σ_e aux[e]·distribution[e], added to tile.grad.
HWY_INLINE void AddAuxiliaryGradient(const RouterConfig& config, const double* aux,
                                     RouterTile& tile) {
  const FloatTag d;
  ForEachVector([&](std::int64_t i) {
    FloatVec inner = hn::Zero(d);
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      inner = hn::Add(
          inner, hn::Mul(hn::Set(d, static_cast<float>(aux[e])), Distribution(config, tile, e, i)));
    }
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      float* at = tile.grad.data() + e * kTileTokens + i;
      const FloatVec difference = hn::Sub(hn::Set(d, static_cast<float>(aux[e])), inner);
      FloatVec term = hn::Mul(difference, Distribution(config, tile, e, i));
      if (config.score == ScoreFunction::kSigmoid) {
        // distribution·(1 − s) = s·(1 − s) / Σ s
        const FloatVec s = hn::LoadU(d, tile.sigmoids.data() + e * kTileTokens + i);
        term = hn::Mul(term, hn::Sub(hn::Set(d, 1.0f), s));
      }
      hn::StoreU(hn::Add(hn::LoadU(d, at), term), d, at);
    }
  });
}

// Gradient of z·logsumexp², added to tile.grad: 2·z·logsumexp·softmax.
HWY_INLINE void AddZGradient(const RouterConfig& config, double z, RouterTile& tile) {
  const FloatTag d;
  ForEachVector([&](std::int64_t i) {
    const FloatVec factor =
        hn::Mul(hn::Set(d, 2 * static_cast<float>(z)), hn::LoadU(d, tile.log_sum_exp + i));
    const FloatVec sum = hn::LoadU(d, tile.sum_of_exponentials + i);
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      float* at = tile.grad.data() + e * kTileTokens + i;
      const FloatVec softmax =
          hn::Div(hn::LoadU(d, tile.exponentials.data() + e * kTileTokens + i), sum);
      hn::StoreU(hn::Add(hn::LoadU(d, at), hn::Mul(factor, softmax)), d, at);
    }
  });
}

template <class T>
void StoreGradient(const RouterBackwardArgs& args, std::int64_t begin, const RouterTile& tile) {
  const std::int64_t experts = args.config.num_experts;
  T* out = args.dlogits.tensor.data<T>() + begin * experts;
  const bool accumulate = args.dlogits.mode == WriteMode::kAccumulate;
  for (std::int64_t i = 0; i < tile.count; ++i) {
    for (std::int64_t e = 0; e < experts; ++e) {
      T& to = out[i * experts + e];
      const float value =
          tile.routed[i] ? tile.grad[static_cast<std::size_t>(e * kTileTokens + i)] : 0.0f;
      if (!accumulate) {
        to = T(value);
      } else if (tile.routed[i]) {
        to = T(static_cast<float>(to) + value);
      }
    }
  }
}

void BackwardBlock(const RouterBackwardArgs& args, const RouterBlock& block, RouterTile& tile) {
  const RouterConfig& config = args.config;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  const bool counts = block.scope >= 0;
  const bool needs_softmax = !sigmoid || (counts && args.z_grad);
  for (std::int64_t begin = block.begin; begin < block.end; begin += kTileTokens) {
    Load(config, args.logits, args.token_mask, begin, block.end, tile);
    if (sigmoid) SigmoidOfExperts(config, tile);
    if (needs_softmax) SoftmaxOverExperts(config, tile);
    std::fill(tile.grad.begin(), tile.grad.end(), 0.0f);
    if (args.dprobs) AddProbabilityGradient(args, begin, tile);
    if (counts && args.aux_grad) {
      AddAuxiliaryGradient(config, args.aux_grad.data<double>() + block.scope * config.num_experts,
                           tile);
    }
    if (counts && args.z_grad) AddZGradient(config, args.z_grad.data<double>()[block.scope], tile);
    if (args.logits.dtype() == DType::kBF16) {
      StoreGradient<bf16>(args, begin, tile);
    } else {
      StoreGradient<float>(args, begin, tile);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(ForwardBlock);
HWY_EXPORT(BackwardBlock);

Support SupportsRouter(const RouterProblem& problem) {
  if (problem.dtype == DType::kF64) return Support::No("fp64 runs in the reference");
  if (problem.dtype != DType::kF32 && problem.dtype != DType::kBF16) {
    return Support::No("only f32 and bf16");
  }
  if (problem.config.given_experts) return Support::No("given experts are for the reference");
  return Support::Yes();
}

void AppendBlocks(std::int64_t begin, std::int64_t end, std::int64_t scope,
                  std::vector<RouterBlock>& blocks) {
  for (; begin < end; begin += kRouterBlock) {
    blocks.push_back({begin, std::min(begin + kRouterBlock, end), scope});
  }
}

// All tokens, cut into blocks that lie within one sequence each.
std::vector<RouterBlock> BlocksOf(const PackedSequences& scopes, std::int64_t tokens) {
  std::vector<RouterBlock> blocks;
  if (!scopes.cu_seqlens) {
    AppendBlocks(0, tokens, 0, blocks);
    return blocks;
  }
  const std::int64_t* cu = scopes.cu_seqlens.data<std::int64_t>();
  for (std::int64_t s = 0; s < scopes.num_sequences(); ++s) {
    AppendBlocks(cu[s], cu[s + 1], s, blocks);
  }
  AppendBlocks(cu[scopes.num_sequences()], tokens, -1, blocks);
  return blocks;
}

void ForwardCpu(const Context&, const RouterConfig& config, const Tensor& logits,
                const Tensor& bias, const Tensor& token_mask, const PackedSequences& scopes,
                const RouterOutputs& out) {
  const std::vector<RouterBlock> blocks = BlocksOf(scopes, logits.dim(0));
  const auto experts = static_cast<std::size_t>(config.num_experts);
  std::vector<BlockStatistics> sums(blocks.size());
  const RouterForwardArgs args{config, logits, bias, token_mask, out};
  ParallelChunks(static_cast<std::int64_t>(blocks.size()), 1,
                 [&](std::int64_t begin, std::int64_t end, int) {
                   RouterTile tile(config);
                   for (std::int64_t b = begin; b < end; ++b) {
                     BlockStatistics& block = sums[static_cast<std::size_t>(b)];
                     block.counts.assign(experts, 0);
                     block.score_sums.assign(experts, 0.0);
                     HWY_DYNAMIC_DISPATCH(ForwardBlock)
                     (args, blocks[static_cast<std::size_t>(b)], tile, block);
                   }
                 });
  for (const Tensor& t : {out.counts, out.score_sums, out.z_sums, out.nonfinite_tokens}) {
    if (t) FillZero(t);
  }
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (out.nonfinite_tokens) *out.nonfinite_tokens.data<std::int64_t>() += sums[b].nonfinite;
    const std::int64_t scope = blocks[b].scope;
    if (scope < 0) continue;
    for (std::size_t e = 0; e < experts; ++e) {
      const std::int64_t at = scope * config.num_experts + static_cast<std::int64_t>(e);
      if (out.counts) out.counts.data<std::int64_t>()[at] += sums[b].counts[e];
      if (out.score_sums) out.score_sums.data<double>()[at] += sums[b].score_sums[e];
    }
    if (out.z_sums) out.z_sums.data<double>()[scope] += sums[b].z_sum;
  }
}

void BackwardCpu(const Context&, const RouterConfig& config, const Tensor& dprobs,
                 const Tensor& logits, const Tensor& experts, const Tensor& token_mask,
                 const PackedSequences& scopes, const Tensor& aux_grad, const Tensor& z_grad,
                 const Output& dlogits) {
  const std::vector<RouterBlock> blocks = BlocksOf(scopes, logits.dim(0));
  const RouterBackwardArgs args{config,     dprobs,   logits, experts,
                                token_mask, aux_grad, z_grad, dlogits};
  ParallelChunks(static_cast<std::int64_t>(blocks.size()), 1,
                 [&](std::int64_t begin, std::int64_t end, int) {
                   RouterTile tile(config);
                   for (std::int64_t b = begin; b < end; ++b) {
                     HWY_DYNAMIC_DISPATCH(BackwardBlock)
                     (args, blocks[static_cast<std::size_t>(b)], tile);
                   }
                 });
}

}  // namespace

constinit const RouterImpl kRouterCpu = {"cpu", SupportsRouter, {ForwardCpu, BackwardCpu}};

}  // namespace cistron::ops
#endif  // HWY_ONCE
