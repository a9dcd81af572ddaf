// One step of training: forward and backward of every micro-batch, clipping, one AdamW update.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"
#include "cistron/train/step_inputs.h"

namespace cistron::train {

struct StepResult {
  double loss = 0;      // cross-entropy: Σ w·nll / Σ w over the global batch
  double aux_loss = 0;  // without its coefficient
  // Of each layer, without coefficients; empty where the config does not train them.
  std::vector<double> layer_aux_loss, z_loss;
  double grad_norm = 0;                                  // before clipping, of the whole loss
  std::vector<std::vector<std::int64_t>> expert_counts;  // [L][E]
  // Rows of experts did not fit a rank's buffer, so the step counts for nothing and is to be made
  // again; `rows_needed` is RowExchange::needed of this rank's expert group, −1 on every rank where
  // one waited in vain. False where router logits or the loss are not finite: routing that follows
  // from them is no reason for larger buffers.
  bool overflow = false;
  std::int64_t rows_needed = 0;
  int redone = 0;  // how often this step was made again
};

// What a step leaves on the device, in one block that one copy brings to the host.
struct StepSums {
  Tensor block;          // f64 [n], counts as the bits of i64 at its end
  Tensor values;         // f64: all that must be finite; the last one is the gradient norm
  model::LossSums sums;  // views of the block
  Tensor rows_needed;    // i64 []

  StepSums(const ops::Context& ctx, const model::MixtralConfig& config);
};

// Queues a step, and waits for nothing: forward and backward of micro-batches that lie where the
// context's kernels read them, the norm, clipping, AdamW, the routers' biases. Nothing of the model
// changes where a value of the step is not finite, nor in any step after it: `gate`, f64 [], at
// first 0, is NaN from then on. The optimiser counts the update.
void QueueStep(const ops::Context& ctx, model::LocalMixtral& m, optim::AdamWOptimizer& optimizer,
               std::span<const data::Batch> micro_batches, const StepScalars& scalars,
               std::uint64_t seed, const Tensor& gate, const StepSums& sums);

// Of a step whose StepSums::block, copied to the host, is `block`; `finite`: whether it changed the
// model.
StepResult ReadStep(const Tensor& block, const model::MixtralConfig& config,
                    const data::BatchTotals& totals, bool& finite);

// After a step that has overflowed, on every rank: larger buffers, of the same size everywhere, and
// gradients forgotten, so that the step can be queued again. Throws kIo where a rank did not come
// in time.
void PrepareAgain(model::LocalMixtral& m, std::int64_t step, const StepResult& result);

// The loss that is minimised is `loss` plus the auxiliary losses times their coefficients. After
// the update each router's bias moves, where there is one. `seed`: of the run, for
// router_jitter_noise. Trains on one global batch, given as micro-batches, with learning rate `lr`,
// and waits for the result. A loss or gradient norm that is not finite throws kNumericalFailure,
// naming the layer where it begins; no weight or moment has changed then.
StepResult TrainStep(const ops::Context& ctx, model::LocalMixtral& m,
                     optim::AdamWOptimizer& optimizer, std::span<const data::Batch> micro_batches,
                     const data::BatchTotals& totals, double lr, std::uint64_t seed = 0);

// Memory of the GPU that rows of experts arrive in, which is not the allocator's; 0 without.
std::int64_t ExchangeMemory(const model::LocalMixtral& m);

// Says so where no label of a step has weight.
void WarnOfNoWeight(std::int64_t step, const data::BatchTotals& totals);

// Weights that are not finite must not be saved: throws kNumericalFailure, naming the first such
// parameter and the step whose update made it.
void CheckFiniteWeights(const nn::LocalParameterStore& store, std::int64_t step);

// The layer in a canonical parameter name; -1 for embedding, norm and head.
std::int64_t LayerOf(const std::string& parameter_name);

}  // namespace cistron::train
