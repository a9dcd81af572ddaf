// Several sequences packed one after another along the token dimension.
#pragma once

#include <cstdint>

#include "cistron/tensor/tensor.h"

namespace cistron::ops {

// Sequence s owns tokens [cu_seqlens[s], cu_seqlens[s+1]). Attention, positions and labels never
// cross a boundary. The last entry of cu_seqlens may be below T: tokens beyond it are padding.
struct PackedSequences {
  Tensor cu_seqlens;            // i64 [S + 1], starts at 0, not decreasing
  Tensor positions;             // i64 [T], position of each token in its sequence
  std::int64_t max_length = 0;  // host bound on the longest sequence
  // A promise of the host: every sequence has max_length tokens, and they fill T.
  bool uniform = false;

  std::int64_t num_sequences() const { return cu_seqlens.dim(0) - 1; }
};

// B sequences of S tokens each.
PackedSequences UniformSequences(std::int64_t batch, std::int64_t length);

// From the lengths of the sequences; `tokens` ≥ their sum is T (0: the sum).
PackedSequences PackedFromLengths(std::span<const std::int64_t> lengths, std::int64_t tokens = 0);

}  // namespace cistron::ops
