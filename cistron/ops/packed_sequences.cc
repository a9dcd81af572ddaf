#include "cistron/ops/packed_sequences.h"

#include <algorithm>
#include <vector>

namespace cistron::ops {

PackedSequences UniformSequences(std::int64_t batch, std::int64_t length) {
  return PackedFromLengths(std::vector<std::int64_t>(static_cast<std::size_t>(batch), length));
}

PackedSequences PackedFromLengths(std::span<const std::int64_t> lengths, std::int64_t tokens) {
  std::int64_t sum = 0;
  for (const std::int64_t n : lengths) {
    CISTRON_CHECK(n >= 0, "PackedSequences: length {} is negative", n);
    sum += n;
  }
  if (tokens == 0) tokens = sum;
  CISTRON_CHECK(tokens >= sum, "PackedSequences: {} tokens do not hold sequences of {} in all",
                tokens, sum);
  PackedSequences packed;
  packed.cu_seqlens = Tensor::Empty({static_cast<std::int64_t>(lengths.size()) + 1}, DType::kI64);
  packed.positions = Tensor::Zeros({tokens}, DType::kI64);
  std::int64_t* cu = packed.cu_seqlens.data<std::int64_t>();
  std::int64_t* position = packed.positions.data<std::int64_t>();
  *cu = 0;
  for (const std::int64_t n : lengths) {
    for (std::int64_t i = 0; i < n; ++i) *position++ = i;
    cu[1] = cu[0] + n;
    ++cu;
    packed.max_length = std::max(packed.max_length, n);
  }
  packed.longest = packed.max_length;
  packed.uniform = packed.max_length > 0 &&
                   packed.max_length * static_cast<std::int64_t>(lengths.size()) == tokens &&
                   sum == tokens;
  return packed;
}

PackedSequences WithBounds(const PackedSequences& sequences, std::int64_t number,
                           std::int64_t max_length) {
  const std::span<const std::int64_t> cu = sequences.cu_seqlens.span<std::int64_t>();
  CISTRON_CHECK(number >= sequences.num_sequences() && max_length >= sequences.max_length,
                "PackedSequences: {} sequences of up to {} tokens exceed the bounds {} and {}",
                sequences.num_sequences(), sequences.max_length, number, max_length);
  PackedSequences bounded = sequences;
  bounded.cu_seqlens = Tensor::Empty({number + 1}, DType::kI64);
  const std::span<std::int64_t> ends = bounded.cu_seqlens.span<std::int64_t>();
  std::fill(std::copy(cu.begin(), cu.end(), ends.begin()), ends.end(), cu.back());
  bounded.max_length = max_length;
  bounded.uniform = false;
  return bounded;
}

}  // namespace cistron::ops
