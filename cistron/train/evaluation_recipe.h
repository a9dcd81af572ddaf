// The recipe under which a trained model is evaluated, as its own run did.
#pragma once

#include <filesystem>

#include "cistron/quant/autocast.h"
#include "cistron/train/precision.h"

namespace cistron::train {

struct EvaluationRecipe {
  quant::Recipe recipe = quant::BF16{};
  quant::HighPrecisionLayers high_precision;
  quant::ScalingStates states;

  // For a scope around the evaluation; this must outlive it. Nothing is recorded.
  quant::AutocastOptions Scope() { return {high_precision, &states, /*record_amax=*/false}; }
};

// For the model at `path`, as FindModel takes it. Where it comes from a run of the same precision,
// the run's options of the recipe count (recipe.*), else the defaults. Scales of delayed scaling
// are those of the checkpoint: throws kInvalidArgument where there are none, naming the newest
// checkpoint of the same run that has them.
EvaluationRecipe ReadEvaluationRecipe(const std::filesystem::path& path, Precision precision);

}  // namespace cistron::train
