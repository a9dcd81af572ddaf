// What `cistron train --explain` prints.
#include <fmt/format.h>

#include "cistron/base/threads.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/ops/support_matrix.h"
#include "cistron/train/trainer.h"

namespace cistron::train {

std::string ExplainRun(const LoadedConfig& loaded) {
  CheckRunConfig(loaded);
  const RunConfig& config = loaded.config;
  if (config.threads > 0) SetNumThreads(static_cast<int>(config.threads));
  const ops::Context ctx = ops::Context(config.ComputeDevice()).WithStrict(config.strict);
  const DType dtype = ModelDType(config.precision);
  const quant::Recipe recipe = MakeRecipe(config.precision, config.recipe);
  std::vector<QuantizedLayout> layouts;
  if (quant::Quantizes(recipe)) {
    for (const auto role : {quant::TensorRole::kInput, quant::TensorRole::kWeight,
                            quant::TensorRole::kOutputGradient}) {
      layouts.push_back(quant::LayoutOf(recipe, role));
    }
  }
  std::string text = fmt::format(
      "implementations on {} in {} (asked at the sizes of a small model; CISTRON_IMPL chooses "
      "others; `cistron info --ops` lists all)\n{}",
      ToString(ctx.device()), Name(config.precision), ops::FormatChosen(ctx, dtype, layouts));
  const model::LocalMixtral model(ctx, config.model, dtype);
  quant::ScalingStates states;
  const quant::Autocast autocast(
      recipe, {HighPrecisionLayersOf(config.recipe, config.model.num_hidden_layers), &states,
               /*record_amax=*/false});
  return text + "\nfusion of the experts\n" + model.model.ExplainExperts();
}

}  // namespace cistron::train
