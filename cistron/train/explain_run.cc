#include "cistron/train/explain_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <string>

#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/data/corpus.h"
#include "cistron/data/stream.h"
#include "cistron/model/mixtral.h"
#include "cistron/ops/activation/scaled_activation.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/step_inputs.h"
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

// Parameters that a model would have: their shapes, and no memory.
class SpecStore final : public nn::ParameterStore {
 public:
  nn::ParameterId Register(const nn::ParameterSpec& spec) override {
    specs_.push_back(spec);
    return static_cast<nn::ParameterId>(specs_.size()) - 1;
  }
  Tensor RegisterBuffer(const nn::BufferSpec&) override { return {}; }
  Tensor Acquire(nn::ParameterId id) override { HasNone(id); }
  void Release(nn::ParameterId) override {}
  QuantizedTensor AcquireQuantized(nn::ParameterId id, const quant::Recipe&) override {
    HasNone(id);
  }
  std::uint64_t version() const override { return 0; }
  const nn::ParameterSpec& spec(nn::ParameterId id) const override {
    return specs_.at(static_cast<std::size_t>(id));
  }
  Shape LocalShape(nn::ParameterId id) const override { return spec(id).shape; }
  void SetRowParts(nn::ParameterId id, std::int64_t parts) override {
    specs_.at(static_cast<std::size_t>(id)).row_parts = parts;
  }
  ops::Output GradientOutput(nn::ParameterId id) override { HasNone(id); }

 private:
  [[noreturn]] void HasNone(nn::ParameterId id) const {
    CISTRON_THROW(kInternal, "explain: {} has a shape and no values", spec(id).name);
  }
  // Modules keep references to a name.
  std::deque<nn::ParameterSpec> specs_;
};

// Empty where the device can be used, about whose very GPU questions are then.
std::string WhyNotHere(Device device) {
  if (device.type == DeviceType::kCpu) return {};
  try {
    cuda::RequireDevice(device.index);
    return {};
  } catch (const Error& error) {
    return error.message();
  }
}

// How long the windows of a run are, and of people: where that is from.
struct Windows {
  data::WindowLengths lengths;
  std::string text;
};

// Without data: genomes fill rows, proteins and bytes are packed.
Windows AssumedWindows(const LoadedConfig& loaded) {
  const data::DataConfig& config = loaded.config.data;
  const std::string why = config.train.empty() ? "data.train names no file"
                                               : "the files of data.train are not all here";
  const std::int64_t row = config.seq_len;
  if (data::AlphabetSize(config.alphabet) == 4) {
    return {{row, row, static_cast<double>(row), 0},
            fmt::format("assumed to fill rows of data.seq_len={}, since {}", row, why)};
  }
  // About the mean of UniProt's proteins; as wide as lengths that are distributed exponentially.
  constexpr double kProtein = 350;
  const double half = std::max(0.5 * static_cast<double>(row), 1.0);
  const double mean = std::min(kProtein, half);
  return {{1, row, mean, mean * mean},
          fmt::format("assumed to be {:.0f} tokens long on average, {}, since {}", mean,
                      half < kProtein ? fmt::format("half of data.seq_len={}", row)
                                      : std::string("as proteins of UniProt are"),
                      why)};
}

Windows WindowsOf(const LoadedConfig& loaded) {
  if (!loaded.HasData()) return AssumedWindows(loaded);
  const RunConfig& config = loaded.config;
  const data::WindowLengths lengths = data::TrainingStream(data::Corpus::Open(DataOf(config)),
                                                           config.seed, config.batch.global_tokens)
                                          .window_lengths();
  return {lengths, lengths.shortest >= config.data.seq_len
                       ? fmt::format("all those of data.train fill rows of data.seq_len={}",
                                     config.data.seq_len)
                       : fmt::format("those of data.train, cut at data.seq_len={}, are {:.0f} "
                                     "tokens long on average",
                                     config.data.seq_len, lengths.mean)};
}

// Which part of the run one rank is, whose ops are told.
std::string PartText(const RunConfig& config) {
  const std::int64_t ranks = config.Ranks(), experts = config.model.num_local_experts;
  const std::string layout =
      fmt::format("{} rank{}, {}", ranks, ranks == 1 ? "" : "s", LayoutText(config));
  if (ranks == 1) return layout;
  return layout + fmt::format("; what follows is of one of them, with {} of {} experts a layer",
                              experts / config.parallel.ep, experts);
}

}  // namespace

std::vector<ops::OpChoice> ChooseImplementations(const ops::Context& ctx, const RunConfig& config,
                                                 const data::WindowLengths& windows) {
  const model::MixtralConfig& m = config.model;
  const ops::AttentionProblem attention = MicroBatchAttention(ctx, config, windows);
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
                      .num_sequences = attention.num_sequences,
                      .max_length = attention.max_length,
                      .uniform = attention.uniform},
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
  CheckExplained(loaded);
  const RunConfig& config = loaded.config;
  if (config.threads > 0) SetNumThreads(static_cast<int>(config.threads));
  const Device device = config.ComputeDevice();
  const std::string why_not_here = WhyNotHere(device);
  const ops::Context ctx = ops::Context::ForQuestions(device).WithStrict(config.strict);
  const Windows windows = WindowsOf(loaded);
  const auto choices = ChooseImplementations(ctx, config, windows.lengths);
  ops::CheckThatAllRun(ctx, choices);
  SpecStore store;
  nn::LocalTokenDispatcher dispatcher(config.model.num_local_experts);
  nn::LocalStatisticsReducer statistics;
  const model::Mixtral model(ctx, config.model, ModelDType(config.precision), store, dispatcher,
                             statistics);
  quant::ScalingStates states;
  const quant::Autocast autocast(
      MakeRecipe(config.precision, config.recipe),
      {HighPrecisionLayersOf(config.recipe, config.model.num_hidden_layers), &states,
       /*record_amax=*/false});
  CheckImplementations(ctx, choices, model);
  std::string gradients = GradientText(config.GradientDType(), config.OneMicroBatch());
  if (!gradients.empty()) gradients = fmt::format("\n{}\n", gradients);
  const std::string elsewhere =
      why_not_here.empty()
          ? ""
          : "as on a GPU that has all kernels; here nothing runs on one: " + why_not_here + "\n";
  return fmt::format(
      "layout: {}\nsequences: {}\nimplementations on {} in {}, for the {} tokens of a micro-batch "
      "(CISTRON_IMPL chooses others; `cistron info --ops` lists all)\n{}{}{}{}\n"
      "fusion of the experts\n{}",
      PartText(config), windows.text, ToString(ctx.device()), Name(config.precision),
      config.RowsPerMicroBatch() * config.data.seq_len, elsewhere, ops::FormatChosen(choices),
      gradients, RecipeText(config), model.ExplainExperts());
}

}  // namespace cistron::train
