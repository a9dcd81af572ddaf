// Fills the tensors of a batch piece by piece.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cistron/data/batch.h"

namespace cistron::data {

class BatchBuilder {
 public:
  explicit BatchBuilder(std::int64_t tokens);

  std::int64_t remaining() const { return capacity_ - used_; }
  // Appends a sequence: labels are its own next tokens where their weight as labels is positive.
  void Append(std::span<const std::int64_t> tokens, std::span<const float> label_weights);
  // Throws kInternal unless full. Adds to the totals.
  Batch Finish(BatchTotals& totals);

 private:
  std::int64_t capacity_, used_ = 0;
  Batch batch_;
  std::vector<std::int64_t> lengths_;
};

// Batches one after another as one; none has padding.
Batch Concatenate(std::span<const Batch> batches);

}  // namespace cistron::data
