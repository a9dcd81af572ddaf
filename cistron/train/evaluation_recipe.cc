#include "cistron/train/evaluation_recipe.h"

#include <fmt/format.h>

#include <algorithm>
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

bool IsScalingState(const std::string& name) {
  return name.starts_with(kScalingPrefix);
}

// The run that `path` is, or whose final model or checkpoint it is.
std::optional<RunPaths> RunOf(const fs::path& path) {
  const fs::path folder = fs::canonical(path);
  for (const fs::path& root : {folder, folder.parent_path(), folder.parent_path().parent_path()}) {
    const RunPaths run{root};
    const bool inside =
        folder == root || folder == run.final_model() || folder.parent_path() == run.checkpoints();
    if (inside && fs::exists(run.config())) return run;
  }
  return std::nullopt;
}

// What to give instead of `path`: the newest checkpoint of its run that has states, if one has.
std::string WhereStatesAre(const fs::path& path) {
  const std::string another = "give a checkpoint of a run with precision=fp8_delayed";
  const std::optional<RunPaths> run = RunOf(path);
  if (!run) return another;
  const auto checkpoints = io::ListCheckpoints(run->checkpoints());
  for (auto it = checkpoints.rbegin(); it != checkpoints.rend(); ++it) {
    const auto names = io::CheckpointReader(*it).names();
    if (std::any_of(names.begin(), names.end(), IsScalingState)) {
      return fmt::format("give {}, the newest checkpoint of this run that holds them",
                         it->string());
    }
  }
  return fmt::format("no checkpoint of this run, of precision={}, holds them; {}",
                     Name(LoadRunConfig(run->config(), {}).config.precision), another);
}

void RestoreStates(const fs::path& path, const ModelSource& source, quant::ScalingStates& states) {
  if (source.kind != ModelKind::kCheckpoint) {
    CISTRON_THROW(kInvalidArgument,
                  "precision=fp8_delayed: {} holds weights alone, and the scales of delayed "
                  "scaling come from training; {}",
                  source.path.string(), WhereStatesAre(path));
  }
  const io::CheckpointReader reader(source.path);
  bool found = false;
  for (const std::string& name : reader.names()) {
    if (!IsScalingState(name)) continue;
    states.Restore(name.substr(kScalingPrefix.size()), reader.Read(name));
    found = true;
  }
  if (!found) {
    CISTRON_THROW(kInvalidArgument,
                  "precision=fp8_delayed: {} has no state of delayed scaling, whose scales come "
                  "from training; {}",
                  source.path.string(), WhereStatesAre(path));
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
  if (precision == Precision::kFp8Delayed) RestoreStates(path, source, result.states);
  return result;
}

}  // namespace cistron::train
