#include "cistron/train/step_inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cistron/train/precision.h"

namespace cistron::train {
namespace {

constexpr std::int64_t kAlign = 256;

// The tensors of a batch, in the order in which they lie in a block.
std::array<Tensor*, 6> TensorsOf(data::Batch& b) {
  return {&b.tokens,    &b.labels, &b.weights, &b.sequences.cu_seqlens, &b.sequences.positions,
          &b.token_mask};
}

double InverseOrZero(double x) {
  return x > 0 ? 1.0 / x : 0.0;
}

Tensor ScalarAt(const Tensor& block, std::int64_t i, DType dtype) {
  return Tensor::Borrow(static_cast<char*>(block.raw()) + 8 * i, {}, dtype, block.device());
}

std::int64_t MostSequences(const RunConfig& config, const data::WindowLengths& windows) {
  return data::SequencesBound(windows, config.RowsPerMicroBatch(), config.data.seq_len);
}

std::int64_t UsualSequences(const RunConfig& config, const data::WindowLengths& windows) {
  const std::int64_t rows = config.RowsPerMicroBatch();
  const auto tokens = static_cast<double>(rows * config.data.seq_len);
  return static_cast<std::int64_t>(std::ceil(tokens / windows.mean)) + rows - 1;
}

// Of a micro-batch of so many sequences.
ops::AttentionProblem PackedAttention(const RunConfig& config, const data::WindowLengths& windows,
                                      std::int64_t sequences) {
  const model::MixtralConfig& m = config.model;
  return {.dtype = ModelDType(config.precision),
          .config = {.num_heads = m.num_attention_heads,
                     .num_kv_heads = m.num_key_value_heads,
                     .head_dim = m.HeadDim(),
                     .window = m.sliding_window.value_or(0)},
          .tokens = config.RowsPerMicroBatch() * config.data.seq_len,
          .num_sequences = sequences,
          .max_length = windows.longest};
}

}  // namespace

StepScalars StepScalars::In(const Tensor& block) {
  return {ScalarAt(block, 0, DType::kF64), ScalarAt(block, 1, DType::kF64),
          ScalarAt(block, 2, DType::kI64), ScalarAt(block, 3, DType::kF64),
          ScalarAt(block, 4, DType::kF64)};
}

void StepScalars::Set(const Tensor& block, double lr, std::int64_t step,
                      const data::BatchTotals& totals) {
  const StepScalars s = In(block);
  *s.lr.data<double>() = lr;
  *s.step.data<double>() = static_cast<double>(step);
  *s.step_index.data<std::int64_t>() = step;
  *s.inv_weight_sum.data<double>() = InverseOrZero(totals.weight_sum);
  *s.inv_tokens.data<double>() = InverseOrZero(static_cast<double>(totals.tokens));
}

std::vector<data::Batch> MicroBatchesOf(const data::GlobalBatch& batch, std::int64_t rows_per_micro,
                                        std::int64_t rank, std::int64_t ranks) {
  std::vector<data::Batch> micro;
  const auto rows = static_cast<std::int64_t>(batch.rows.size());
  const std::int64_t together = rows_per_micro * ranks;
  for (std::int64_t begin = 0; begin < rows; begin += together) {
    const std::int64_t mine = std::min(together, rows - begin) / ranks;
    micro.push_back(batch.MicroBatch(begin + rank * mine, mine));
  }
  return micro;
}

bool KeepsSequenceBounds(const ops::Context& ctx, const RunConfig& config,
                         const data::WindowLengths& windows) {
  return ops::BoundsAreCheap(ctx, PackedAttention(config, windows, MostSequences(config, windows)),
                             PackedAttention(config, windows, UsualSequences(config, windows)));
}

ops::AttentionProblem MicroBatchAttention(const ops::Context& ctx, const RunConfig& config,
                                          const data::WindowLengths& windows) {
  if (windows.shortest >= config.data.seq_len) {
    ops::AttentionProblem full = PackedAttention(config, windows, config.RowsPerMicroBatch());
    full.uniform = true;
    return full;
  }
  return PackedAttention(config, windows,
                         KeepsSequenceBounds(ctx, config, windows)
                             ? MostSequences(config, windows)
                             : UsualSequences(config, windows));
}

StepInputs PackStep(std::span<const data::Batch> batches, const data::BatchTotals& totals,
                    Allocator& allocator) {
  StepInputs in;
  in.totals = totals;
  in.batches.assign(batches.begin(), batches.end());
  std::int64_t bytes = StepScalars::kBytes;
  const auto begin_of = [&bytes](const Tensor& t) {
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    const std::int64_t begin = bytes;
    bytes += t.bytes();
    return begin;
  };
  std::vector<std::int64_t> begins;
  for (data::Batch& b : in.batches) {
    for (const Tensor* t : TensorsOf(b)) {
      begins.push_back(*t ? begin_of(*t) : -1);
      in.layout.push_back(*t ? t->numel() : -1);
    }
    in.layout.insert(in.layout.end(),
                     {b.sequences.max_length, b.sequences.uniform ? 1 : 0, b.first_token});
  }
  in.block = Tensor::Empty({bytes}, DType::kU8, allocator);
  auto* base = static_cast<char*>(in.block.raw());
  std::size_t i = 0;
  for (data::Batch& b : in.batches) {
    for (Tensor* t : TensorsOf(b)) {
      const std::int64_t begin = begins[i++];
      if (begin < 0) continue;
      std::memcpy(base + begin, t->raw(), static_cast<std::size_t>(t->bytes()));
      *t = Tensor::Borrow(base + begin, t->shape(), t->dtype());
    }
  }
  return in;
}

std::vector<data::Batch> BatchesIn(const Tensor& block, const StepInputs& in) {
  std::vector<data::Batch> batches = in.batches;
  const auto* from = static_cast<const char*>(in.block.raw());
  for (data::Batch& b : batches) {
    for (Tensor* t : TensorsOf(b)) {
      if (!*t) continue;
      const std::ptrdiff_t begin = static_cast<const char*>(t->raw()) - from;
      *t = Tensor::Borrow(static_cast<char*>(block.raw()) + begin, t->shape(), t->dtype(),
                          block.device());
    }
  }
  return batches;
}

}  // namespace cistron::train
