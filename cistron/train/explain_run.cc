#include "cistron/train/explain_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/ops/activation/scaled_activation.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/trainer.h"

namespace cistron::train {
namespace {

std::vector<QuantizedLayout> LayoutsOf(const quant::Recipe& recipe) {
  std::vector<QuantizedLayout> layouts;
  if (!quant::Quantizes(recipe)) return layouts;
  for (const auto role : {quant::TensorRole::kInput, quant::TensorRole::kWeight,
                          quant::TensorRole::kOutputGradient}) {
    layouts.push_back(quant::LayoutOf(recipe, role));
  }
  return layouts;
}

std::vector<std::string> UnusedOps(const model::MixtralConfig& m) {
  std::vector<std::string> names = {"grouped_bias"};
  for (const ops::ActivationKind kind : ops::kActivationKinds) {
    names.push_back(fmt::format("activation {}", ops::Name(kind)));
  }
  if (m.router_jitter_noise == 0) names.push_back("jitter");
  return names;
}

// The recipe's name and the keys that it has, `auto` resolved; empty where there is none.
std::string RecipeText(const RunConfig& config) {
  const quant::Recipe recipe = MakeRecipe(config.precision, config.recipe);
  if (!quant::Quantizes(recipe)) return "";
  RunConfig resolved;
  resolved.recipe = Resolve(config.precision, config.recipe);
  const auto others = KeysOfOtherRecipes(config.precision);
  std::string text = fmt::format("\nrecipe {}\n", quant::Name(recipe));
  for (const ConfigKey& key : ConfigKeys()) {
    if (!key.name.starts_with("recipe.")) continue;
    if (std::find(others.begin(), others.end(), key.name) != others.end()) continue;
    text += fmt::format("  {:<36} {}\n", key.name, key.get(resolved));
  }
  return text;
}

}  // namespace

std::vector<ops::OpChoice> ChooseImplementations(const ops::Context& ctx, const RunConfig& config) {
  const model::MixtralConfig& m = config.model;
  const DType dtype = ModelDType(config.precision);
  return ops::ChooseImplementations(
      ctx, {.dtype = dtype,
            .optimizer_dtype = config.HasMasters() ? ComputeType(dtype) : dtype,
            .sizes = {.tokens = config.RowsPerMicroBatch() * config.data.seq_len,
                      .hidden = m.hidden_size,
                      .ffn = m.intermediate_size,
                      .vocab = m.vocab_size,
                      .experts = m.num_local_experts,
                      .top_k = m.num_experts_per_tok,
                      .heads = m.num_attention_heads,
                      .kv_heads = m.num_key_value_heads,
                      .head_dim = m.HeadDim(),
                      .window = m.sliding_window.value_or(0),
                      .sequence = config.data.seq_len},
            .layouts = LayoutsOf(MakeRecipe(config.precision, config.recipe)),
            .unused = UnusedOps(m)});
}

void CheckImplementations(const ops::Context& ctx, const std::vector<ops::OpChoice>& choices,
                          const model::Mixtral& model) {
  ops::CheckThatAllRun(ctx, choices);
  if (!ctx.strict()) return;
  std::vector<std::string> lines = ops::StrictRefusals(choices);
  for (std::string& line : model.FusionRefusals()) lines.push_back(std::move(line));
  if (lines.empty()) return;
  CISTRON_THROW(kUnsupported,
                "strict=true refuses this run:\n  {}\nfollow the remedies, or set "
                "strict=false",
                fmt::join(lines, "\n  "));
}

std::string ExplainRun(const LoadedConfig& loaded) {
  CheckRunConfig(loaded);
  const RunConfig& config = loaded.config;
  if (config.threads > 0) SetNumThreads(static_cast<int>(config.threads));
  const ops::Context ctx = ops::Context(config.ComputeDevice()).WithStrict(config.strict);
  const auto choices = ChooseImplementations(ctx, config);
  ops::CheckThatAllRun(ctx, choices);  // before the model takes its memory
  const model::LocalMixtral model(ctx, config.model, ModelDType(config.precision));
  quant::ScalingStates states;
  const quant::Autocast autocast(
      MakeRecipe(config.precision, config.recipe),
      {HighPrecisionLayersOf(config.recipe, config.model.num_hidden_layers), &states,
       /*record_amax=*/false});
  CheckImplementations(ctx, choices, model.model);
  std::string gradients = GradientText(config.GradientDType(), config.OneMicroBatch());
  if (!gradients.empty()) gradients = fmt::format("\n{}\n", gradients);
  return fmt::format(
      "implementations on {} in {}, for the {} tokens of a micro-batch (CISTRON_IMPL chooses "
      "others; `cistron info --ops` lists all)\n{}{}{}\nfusion of the experts\n{}",
      ToString(ctx.device()), Name(config.precision),
      config.RowsPerMicroBatch() * config.data.seq_len, ops::FormatChosen(choices), gradients,
      RecipeText(config), model.model.ExplainExperts());
}

}  // namespace cistron::train
