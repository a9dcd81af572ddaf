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
  // Of these sequences, where the host knows it: for counts of work. No kernel is chosen by it.
  std::int64_t longest = 0;
  // A promise of the host: every sequence has max_length tokens, and they fill T.
  bool uniform = false;

  std::int64_t num_sequences() const { return cu_seqlens.dim(0) - 1; }
};

// B sequences of S tokens each.
PackedSequences UniformSequences(std::int64_t batch, std::int64_t length);

// From the lengths of the sequences; `tokens` ≥ their sum is T (0: the sum).
PackedSequences PackedFromLengths(std::span<const std::int64_t> lengths, std::int64_t tokens = 0);

// The same sequences where a run promises bounds that stay the same: empty ones after the last up
// to `number`, and none longer than `max_length`. Sizes alone decide which kernels run and whether
// a step is laid out as the one before; the lengths are on the device. Throws kInvalidArgument
// where the sequences, on the host, exceed a bound.
PackedSequences WithBounds(const PackedSequences& sequences, std::int64_t number,
                           std::int64_t max_length);

}  // namespace cistron::ops
