// Warm starts: the architecture comes with the weights.
#include <array>
#include <filesystem>

#include "cistron/base/error.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/model_source.h"
#include "cistron/train/run_directory.h"

namespace cistron::train {
namespace {

// Keys of model.* that say how to train, not what the weights mean.
constexpr std::array kTrainingKeys = {
    "model.router_aux_loss_coef", "model.output_router_logits",
    "model.initializer_range",    "model.moe_aux_loss_coeff",
    "model.moe_z_loss_coeff",     "model.moe_router_bias_update_rate",
    "model.router_jitter_noise",  "model.moe_router_force_load_balancing"};

bool IsTrainingKey(const std::string& key) {
  for (const char* name : kTrainingKeys) {
    if (key == name) return true;
  }
  return false;
}

model::MixtralConfig SourceConfig(const RunConfig& config) {
  const RunPaths run{config.output};
  // A run that is resumed does not need its origin any more.
  if (!std::filesystem::exists(config.init.from) && std::filesystem::exists(run.config())) {
    return LoadRunConfig(run.config(), {}).config.model;
  }
  return ReadModelConfig(FindModel(config.init.from));
}

}  // namespace

void ResolveInit(LoadedConfig& loaded) {
  if (loaded.config.init.from.empty()) return;
  const RunConfig given = loaded.config;
  RunConfig resolved = given;
  loaded.model_known = loaded.faults.Check([&] { resolved.model = SourceConfig(given); });
  if (!loaded.model_known) return;
  resolved.model.aux_scope = given.model.aux_scope;
  resolved.model.router_aux_loss_coef = given.model.router_aux_loss_coef;
  resolved.model.output_router_logits = given.model.output_router_logits;
  resolved.model.initializer_range = given.model.initializer_range;
  resolved.model.moe_aux_loss_coeff = given.model.moe_aux_loss_coeff;
  resolved.model.moe_z_loss_coeff = given.model.moe_z_loss_coeff;
  resolved.model.moe_router_bias_update_rate = given.model.moe_router_bias_update_rate;
  resolved.model.router_jitter_noise = given.model.router_jitter_noise;
  resolved.model.moe_router_force_load_balancing = given.model.moe_router_force_load_balancing;
  for (const ConfigKey& key : ConfigKeys()) {
    if (!key.name.starts_with("model.") || IsTrainingKey(key.name)) continue;
    const auto origin = loaded.origins.find(key.name);
    const bool from_command_line = origin != loaded.origins.end() && origin->second.line == 0;
    if (!from_command_line || key.get(given) == key.get(resolved)) continue;
    loaded.faults.Check([&] {
      CISTRON_THROW(kBadInput,
                    "{}: {} does not fit the weights of init.from={}, whose value is {}; "
                    "leave the key out",
                    loaded.Where(key.name), key.get(given), given.init.from.string(),
                    key.get(resolved));
    });
  }
  loaded.config = resolved;
}

}  // namespace cistron::train
