// What a training or evaluation step reads.
#pragma once

#include <cstdint>

#include "cistron/ops/packed_sequences.h"
#include "cistron/tensor/tensor.h"

namespace cistron::data {

// Tokens of one micro-batch: whole rows of seq_len tokens of the global batch, one after another.
struct Batch {
  Tensor tokens;                   // i64 [T]
  Tensor labels;                   // i64 [T]: the next token, or ops::kIgnoreLabel
  Tensor weights;                  // f32 [T]: weight of each label's loss; 0 where ignored
  ops::PackedSequences sequences;  // boundaries and positions; padding lies beyond the last one
  Tensor token_mask;               // u8 [T], 0 for padding; undefined when there is none

  // Where the first token stands among all tokens of the global batch, row after row, padding
  // included: random numbers of a token are drawn by its place there, not by micro-batch or rank.
  std::int64_t first_token = 0;

  std::int64_t num_tokens() const { return tokens.dim(0); }
};

// Sums over the whole global batch, known before the step: the denominators of its means.
struct BatchTotals {
  double weight_sum = 0;    // Σ weights over all labels
  std::int64_t tokens = 0;  // tokens that are not padding (they are routed)
  std::int64_t rows = 0;    // rows of seq_len tokens
};

}  // namespace cistron::data
