#include "cistron/train/evaluation_recipe.h"

#include <optional>
#include <string>

#include "cistron/base/error.h"
#include "cistron/train/model_source.h"
#include "cistron/train/run_directory.h"
#include "cistron/train/training_state.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

// The configuration of the run that made the model, where that is known.
std::optional<RunConfig> ConfigOfRun(const ModelSource& source) {
  if (source.kind == ModelKind::kCheckpoint) {
    return CheckpointRunConfig(io::CheckpointReader(source.path), source.path);
  }
  // The final model of a run lies in it.
  const fs::path folder = fs::canonical(source.path);
  const RunPaths run{folder.parent_path()};
  if (folder != run.final_model() || !fs::exists(run.config())) return std::nullopt;
  return LoadRunConfig(run.config(), {}).config;
}

void RestoreStates(const ModelSource& source, quant::ScalingStates& states) {
  if (source.kind != ModelKind::kCheckpoint) {
    CISTRON_THROW(
        kInvalidArgument,
        "precision=fp8_delayed: {} holds weights alone, and the scales of delayed scaling "
        "come from training; give a checkpoint of a run with precision=fp8_delayed",
        source.path.string());
  }
  const io::CheckpointReader reader(source.path);
  bool found = false;
  for (const std::string& name : reader.names()) {
    if (!name.starts_with(kScalingPrefix)) continue;
    states.Restore(name.substr(kScalingPrefix.size()), reader.Read(name));
    found = true;
  }
  if (!found) {
    CISTRON_THROW(
        kInvalidArgument,
        "precision=fp8_delayed: {} has no state of delayed scaling, whose scales come from "
        "training; give a checkpoint of a run with precision=fp8_delayed",
        source.path.string());
  }
}

}  // namespace

EvaluationRecipe ReadEvaluationRecipe(const fs::path& path, Precision precision) {
  EvaluationRecipe result;
  result.recipe = MakeRecipe(precision, {});
  if (!quant::Quantizes(result.recipe)) return result;
  const ModelSource source = FindModel(path);
  const std::optional<RunConfig> config = ConfigOfRun(source);
  const RecipeOptions options =
      config && config->precision == precision ? config->recipe : RecipeOptions{};
  result.recipe = MakeRecipe(precision, options);
  result.high_precision = HighPrecisionLayersOf(options, ReadModelConfig(source).num_hidden_layers);
  if (precision == Precision::kFp8Delayed) RestoreStates(source, result.states);
  return result;
}

}  // namespace cistron::train
