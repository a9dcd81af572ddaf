// One step of training: forward and backward of every micro-batch, clipping, one AdamW update.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"

namespace cistron::train {

struct StepResult {
  double loss = 0;      // cross-entropy: Σ w·nll / Σ w over the global batch
  double aux_loss = 0;  // without its coefficient
  // Of each layer, without coefficients; empty where the config does not train them.
  std::vector<double> layer_aux_loss, z_loss;
  double grad_norm = 0;                                  // before clipping, of the whole loss
  std::vector<std::vector<std::int64_t>> expert_counts;  // [L][E]
};

// The loss that is minimised is `loss` plus the auxiliary losses times their coefficients. After
// the update each router's bias moves, where there is one. `seed`: of the run, for
// router_jitter_noise. Trains on one global batch, given as micro-batches, with learning rate `lr`.
// A loss or gradient norm that is not finite throws kNumericalFailure, naming the layer where it
// begins, before any weight or moment has changed.
StepResult TrainStep(const ops::Context& ctx, model::LocalMixtral& m,
                     optim::AdamWOptimizer& optimizer, std::span<const data::Batch> micro_batches,
                     const data::BatchTotals& totals, double lr, std::uint64_t seed = 0);

// Weights that are not finite must not be saved: throws kNumericalFailure, naming the first such
// parameter and the step whose update made it.
void CheckFiniteWeights(const nn::LocalParameterStore& store, std::int64_t step);

// The layer in a canonical parameter name; -1 for embedding, norm and head.
std::int64_t LayerOf(const std::string& parameter_name);

}  // namespace cistron::train
