// What attention's tensor-core implementation takes, with and without CUDA in the build.
#pragma once

#include <cstdint>

#include "cistron/ops/attention/attention.h"
#include "cistron/ops/cuda/supports.h"

namespace cistron::ops::internal {

// Sums of whole heads lie in the registers of a warp.
inline constexpr std::int64_t kAttentionFlashHeadDim = 128;

inline Support AttentionFlashSupports(const AttentionProblem& p) {
  if (p.dtype != DType::kBF16) {
    return Support::No(fmt::format("operands are bf16, not {}", Name(p.dtype)));
  }
  if (p.config.head_dim > kAttentionFlashHeadDim || p.config.head_dim % 8 != 0) {
    return Support::No(fmt::format("head_dim {} is not a multiple of 8 up to {}", p.config.head_dim,
                                   kAttentionFlashHeadDim));
  }
  if (!p.aligned) return Support::No("a tensor or its rows do not begin at multiples of 16 bytes");
  // Positions, columns, tiles and blocks are counted in 32 bits; the smallest tile has 64 rows, and
  // a sequence has at least one.
  if (p.tokens > INT32_MAX || p.config.num_heads * p.config.head_dim > INT32_MAX ||
      (p.tokens / 64 + 1) * p.config.num_heads > INT32_MAX / 2) {
    return Support::No(fmt::format("{} tokens of {} heads are too many for a grid of tiles",
                                   p.tokens, p.config.num_heads));
  }
  return NeedsComputeCapabilityFrom(80);
}

}  // namespace cistron::ops::internal
