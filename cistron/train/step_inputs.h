// What a step reads, in one block of memory, so that one copy brings it to a device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cistron/data/stream.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/tensor/tensor.h"
#include "cistron/train/run_config.h"

namespace cistron::train {

// Values that change from step to step, as scalars on the device.
struct StepScalars {
  Tensor lr;              // f64 []
  Tensor step;            // f64 []: number of the update, from 1
  Tensor step_index;      // i64 []: the same
  Tensor inv_weight_sum;  // f64 []: 1 / Σ weights of the global batch, 0 without any
  Tensor inv_tokens;      // f64 []: 1 / routed tokens of the global batch

  static constexpr std::int64_t kBytes = 64;
  // In the first kBytes of a block.
  static StepScalars In(const Tensor& block);
  // Writes them into a block of the host.
  static void Set(const Tensor& block, double lr, std::int64_t step,
                  const data::BatchTotals& totals);
};

struct StepInputs {
  Tensor block;                      // u8 [bytes], of the host; undefined: not packed
  std::vector<data::Batch> batches;  // views of the block, or what was given
  data::BatchTotals totals;
  // Equal where blocks are laid out alike and the batches' sizes and bounds are the same.
  std::vector<std::int64_t> layout;
};

// The micro-batches of one of `ranks`, `rows_per_micro` rows at once. In each micro-step the ranks
// have consecutive rows, so that all of them together see what one rank with larger micro-batches
// sees. `ranks` divides the rows of the batch.
std::vector<data::Batch> MicroBatchesOf(const data::GlobalBatch& batch, std::int64_t rows_per_micro,
                                        std::int64_t rank, std::int64_t ranks);

// Whether micro-batches of packed sequences keep their bounds (GlobalBatch::windows), so that steps
// are laid out alike: where that makes the attention that `ctx` chooses slower on a GPU
// (ops::BoundsAreCheap), they have the sizes of their own sequences.
bool KeepsSequenceBounds(const ops::Context& ctx, const RunConfig& config,
                         const data::WindowLengths& windows);

// The problem that a micro-batch from windows of such lengths is for attention: rows of one
// sequence each, or as many packed ones as the bounds say; without bounds, as most have.
ops::AttentionProblem MicroBatchAttention(const ops::Context& ctx, const RunConfig& config,
                                          const data::WindowLengths& windows);

// Packs micro-batches into memory of `allocator`.
StepInputs PackStep(std::span<const data::Batch> batches, const data::BatchTotals& totals,
                    Allocator& allocator);
// The batches in a copy of inputs.block.
std::vector<data::Batch> BatchesIn(const Tensor& block, const StepInputs& inputs);

}  // namespace cistron::train
