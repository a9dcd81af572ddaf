#include "cistron/data/batch_builder.h"

#include <algorithm>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/data/stream.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::data {
namespace {

Batch EmptyBatch(std::int64_t tokens) {
  Batch batch;
  batch.tokens = Tensor::Empty({tokens}, DType::kI64);
  batch.labels = Tensor::Empty({tokens}, DType::kI64);
  batch.weights = Tensor::Empty({tokens}, DType::kF32);
  return batch;
}

}  // namespace

BatchBuilder::BatchBuilder(std::int64_t tokens) : capacity_(tokens), batch_(EmptyBatch(tokens)) {}

void BatchBuilder::Append(std::span<const std::int64_t> tokens,
                          std::span<const float> label_weights) {
  const auto n = static_cast<std::int64_t>(tokens.size());
  CISTRON_INVARIANT(n <= remaining() && label_weights.size() == tokens.size(),
                    "BatchBuilder: {} tokens do not fit in {}", n, remaining());
  std::int64_t* token = batch_.tokens.data<std::int64_t>() + used_;
  std::int64_t* label = batch_.labels.data<std::int64_t>() + used_;
  float* weight = batch_.weights.data<float>() + used_;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool scored = i + 1 < tokens.size() && label_weights[i + 1] > 0;
    token[i] = tokens[i];
    label[i] = scored ? tokens[i + 1] : ops::kIgnoreLabel;
    weight[i] = scored ? label_weights[i + 1] : 0.0f;
  }
  lengths_.push_back(n);
  used_ += n;
}

Batch BatchBuilder::Finish(BatchTotals& totals) {
  CISTRON_INVARIANT(remaining() == 0, "BatchBuilder: {} tokens are missing", remaining());
  batch_.sequences = ops::PackedFromLengths(lengths_);
  for (const float weight : batch_.weights.span<float>()) totals.weight_sum += weight;
  totals.tokens += used_;
  ++totals.rows;
  return std::move(batch_);
}

Batch Concatenate(std::span<const Batch> batches) {
  std::int64_t tokens = 0;
  std::vector<std::int64_t> lengths;
  for (const Batch& batch : batches) {
    tokens += batch.num_tokens();
    const auto cu = batch.sequences.cu_seqlens.span<std::int64_t>();
    for (std::size_t s = 1; s < cu.size(); ++s) lengths.push_back(cu[s] - cu[s - 1]);
  }
  Batch all = EmptyBatch(tokens);
  std::int64_t at = 0;
  for (const Batch& batch : batches) {
    std::ranges::copy(batch.tokens.span<std::int64_t>(), all.tokens.data<std::int64_t>() + at);
    std::ranges::copy(batch.labels.span<std::int64_t>(), all.labels.data<std::int64_t>() + at);
    std::ranges::copy(batch.weights.span<float>(), all.weights.data<float>() + at);
    at += batch.num_tokens();
  }
  all.sequences = ops::PackedFromLengths(lengths);
  return all;
}

Batch GlobalBatch::MicroBatch(std::int64_t begin, std::int64_t count) const {
  const auto n = static_cast<std::int64_t>(rows.size());
  CISTRON_CHECK(begin >= 0 && count >= 1 && begin <= n - count,
                "GlobalBatch::MicroBatch: rows [{}, {}) of {}", begin, begin + count, n);
  Batch batch = Concatenate(
      std::span(rows).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)));
  if (windows.longest > 0 && windows.shortest < seq_len) {
    std::int64_t number = SequencesBound(windows, count, seq_len);
    while (number < batch.sequences.num_sequences()) number *= 2;
    batch.sequences = ops::WithBounds(batch.sequences, number, windows.longest);
  }
  for (std::int64_t i = 0; i < begin; ++i) {
    batch.first_token += rows[static_cast<std::size_t>(i)].num_tokens();
  }
  return batch;
}

}  // namespace cistron::data
