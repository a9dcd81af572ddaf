// How the values of a configuration must fit together.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/text.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/model/hugging_face.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/config_faults.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/run_config.h"

namespace cistron::train {
namespace {

// What the router's kernels hold.
constexpr std::int64_t kMaxExperts = 512, kMaxExpertsPerToken = 32;
constexpr ErrorCode kBadInput = ErrorCode::kBadInput;

// Well-formed UTF-8 without overlong forms, surrogates and code points that do not exist.
bool IsUtf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    std::uint32_t code = lead & (0x3Fu >> more);
    for (int k = 0; k < more; ++k, ++i) {
      if (i == text.size() || (text[i] & 0xC0) != 0x80) return false;
      code = code << 6 | (text[i] & 0x3Fu);
    }
    constexpr std::uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
    if (lead < 0xC0 || lead > 0xF4 || code < kLeast[more] || code > 0x10FFFF || surrogate) {
      return false;
    }
  }
  return true;
}

// Each of what follows finds all faults of its part that do not follow from each other.

// Every value goes into checkpoints and reports as JSON, which holds no other bytes.
void FindTextFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  for (const ConfigKey& key : ConfigKeys()) {
    faults.Need(IsUtf8(key.get(loaded.config)), kBadInput,
                "{}: the value holds a byte that is not UTF-8; checkpoints cannot record it: "
                "rename the file or folder, or write the text in UTF-8",
                loaded.Where(key.name));
  }
}

void FindDeviceFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  faults.Need(c.device != DeviceChoice::kCuda || c.precision == Precision::kFp32 ||
                  c.precision == Precision::kBf16,
              ErrorCode::kUnsupported,
              "{}={}: device=cuda trains in fp32 and bf16; use one of them, or device=cpu",
              loaded.Where("precision"), Name(c.precision));
}

// True where the recipe has all options that are set.
bool FindRecipeFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  // A key with its default says nothing: a saved configuration has every key.
  const RunConfig defaults;
  bool has_all = true;
  for (const std::string& name : KeysOfOtherRecipes(c.precision)) {
    const ConfigKey& key = *FindConfigKey(name);
    has_all &= faults.Need(key.get(c) == key.get(defaults), kBadInput,
                           "{}={}: precision={} has no such option; remove the key",
                           loaded.Where(name), key.get(c), Name(c.precision));
  }
  return has_all;
}

// Experts are dealt among ranks: true where evenly.
bool FindExpertRankFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  return faults.Need(c.model.num_local_experts % c.parallel.ep == 0, kBadInput,
                     "{}: {} experts cannot be dealt evenly to {} ranks; choose a divisor",
                     loaded.Where("parallel.ep"), c.model.num_local_experts, c.parallel.ep);
}

// So are rows.
void FindRowRankFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  const std::int64_t ranks = c.Ranks();
  const std::int64_t rows = c.RowsPerStep(), micro = c.RowsPerMicroBatch();
  if (!faults.Need(
          rows % ranks == 0, kBadInput,
          "{}: {} rows of {} tokens cannot be dealt evenly to {} ranks; the nearest is {}",
          loaded.Where("batch.global_tokens"), rows, c.data.seq_len, ranks,
          std::max<std::int64_t>(1, (rows + ranks / 2) / ranks) * ranks * c.data.seq_len)) {
    return;
  }
  faults.Need(micro <= rows / ranks, kBadInput,
              "{}: a micro-batch of {} tokens is larger than the {} tokens of a step that "
              "each of {} ranks has",
              loaded.Where("batch.micro_tokens"), c.batch.micro_tokens,
              rows / ranks * c.data.seq_len, ranks);
}

// Where the codes of a row are not a function of the row alone, or coding the decoded values gives
// others, results would change.
void FindTravellingRowFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  faults.Need(
      c.parallel.ep_rows == TravellingRows::kExact ||
          quant::RowCodesOf(MakeRecipe(c.precision, c.recipe)).has_value(),
      kBadInput,
      "{}=quantized: rows have codes of their own in precision=mxfp8, and in fp8_block with "
      "recipe.power_of_two_scales=on, but not in precision={}{}; set "
      "parallel.ep_rows=exact",
      loaded.Where("parallel.ep_rows"), Name(c.precision),
      c.precision == Precision::kFp8Block ? " recipe.power_of_two_scales=off" : "");
}

// Of a run, not of one that is planned.
void CheckDevices(const LoadedConfig& loaded) {
  const RunConfig& c = loaded.config;
  if (c.device != DeviceChoice::kCuda) return;
  if (c.Ranks() > 1 && !comm::nccl::IsBuilt()) {
    CISTRON_THROW(kUnsupported,
                  "{}: {} ranks on GPUs exchange by NCCL, which this build has not: install its "
                  "header (Debian: libnccl-dev, or scripts/setup_cuda.sh), configure with "
                  "-DCISTRON_CUDA=ON and build again, "
                  "or train on one GPU or on CPUs",
                  loaded.Where(c.parallel.ep > 1 ? "parallel.ep" : "parallel.dp"), c.Ranks());
  }
  // Which GPU a rank of several has is known once they can talk.
  if (c.Ranks() == 1) cuda::RequireDevice(0);
}

// "model.layers.3.mlp.gate.weight" with the number replaced by N: what all layers have.
std::string OfAnyLayer(const std::string& name) {
  constexpr std::string_view kMark = "layers.";
  const std::size_t at = name.find(kMark);
  if (at == std::string::npos) return name;
  const std::size_t number = at + kMark.size(), rest = name.find('.', number);
  return name.substr(0, number) + "N" + (rest == std::string::npos ? "" : name.substr(rest));
}

// The parameters whose names are most like a pattern; what its stars stand for costs nothing.
std::string NearestParameters(std::string pattern,
                              const std::vector<model::ParameterInfo>& parameters) {
  std::erase(pattern, '*');
  std::vector<std::pair<int, std::string>> names;
  for (const model::ParameterInfo& p : parameters) {
    const int longer = static_cast<int>(p.name.size()) - static_cast<int>(pattern.size());
    std::pair<int, std::string> entry{EditDistance(pattern, p.name) - std::max(0, longer),
                                      OfAnyLayer(p.name)};
    const auto same = std::find_if(names.begin(), names.end(),
                                   [&](const auto& e) { return e.second == entry.second; });
    if (same == names.end()) {
      names.push_back(std::move(entry));
    } else {
      same->first = std::min(same->first, entry.first);
    }
  }
  std::stable_sort(names.begin(), names.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i) {
    text += (text.empty() ? "" : ", ") + names[i].second;
  }
  return text;
}

// What a recipe quantises: projections of attention and experts.
bool FollowsRecipe(const std::string& parameter) {
  return parameter.find("_proj") != std::string::npos;
}

// What stays in bf16 must exist, and leave something to the recipe.
void FindHighPrecisionLayerFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  if (!quant::Quantizes(MakeRecipe(c.precision, c.recipe))) return;
  const std::int64_t layers = c.model.num_hidden_layers;
  const std::int64_t first = c.recipe.first_layers_bf16, last = c.recipe.last_layers_bf16;
  // Without a sum, which may overflow.
  bool some_left = faults.Need(
      first < layers && last < layers - first, kBadInput,
      "{}: recipe.first_layers_bf16={} and recipe.last_layers_bf16={} of {} layers leave "
      "no layer in {}; lower them, or choose precision=bf16",
      loaded.Where(first > 0 ? "recipe.first_layers_bf16" : "recipe.last_layers_bf16"), first, last,
      layers, Name(c.precision));
  const auto parameters = model::MixtralParameters(c.model);
  constexpr const char* kPatterns = "recipe.bf16_patterns";
  for (const std::string& pattern : c.recipe.bf16_patterns) {
    const quant::HighPrecisionLayers one{.patterns = {pattern}};
    if (std::any_of(parameters.begin(), parameters.end(),
                    [&](const auto& p) { return one.Contains(p.name); })) {
      continue;
    }
    faults.Need(false, kBadInput,
                "{}: '{}' matches no parameter of the model, which has {} layers; the nearest "
                "names: {}",
                loaded.Where(kPatterns), pattern, layers, NearestParameters(pattern, parameters));
  }
  if (!some_left) return;
  const auto high = HighPrecisionLayersOf(c.recipe, layers);
  some_left = std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) {
    return FollowsRecipe(p.name) && !high.Contains(p.name);
  });
  faults.Need(some_left, kBadInput,
              "{}: {} leaves no projection of the {} layers in {}; leave a pattern out, or "
              "choose precision=bf16",
              loaded.Where(kPatterns), FindConfigKey(kPatterns)->get(c), layers, Name(c.precision));
}

bool IsWordByte(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

// A message of model::OptionFaults, which speaks of the fields of a config.json, in the keys of a
// run: "n_group = 2 …" becomes "model.n_group=2 …", after the place of the first one that was set.
std::string InKeysOfARun(const LoadedConfig& loaded, std::string message) {
  constexpr std::string_view kHead = "Mixtral config: ", kIs = " = ";
  if (message.starts_with(kHead)) message.erase(0, kHead.size());
  std::string text, where;
  for (std::size_t at = 0; at < message.size();) {
    std::size_t end = at;
    while (end < message.size() && IsWordByte(message[end])) ++end;
    if (end == at) {
      text += message[at++];
      continue;
    }
    const std::string word = message.substr(at, end - at), key = "model." + word;
    const bool is_key = FindConfigKey(key) != nullptr;
    text += is_key ? key : word;
    if (is_key && where.empty() && loaded.origins.contains(key)) where = loaded.Where(key) + ": ";
    at = end;
    if (is_key && message.compare(at, kIs.size(), kIs) == 0) {
      text += '=';
      at += kIs.size();
    }
  }
  return where + text;
}

// Keys of the router that do nothing beside the others are refused where they were set, as options
// of another recipe are. Neither the default, which a saved configuration has, nor a coefficient
// of 0, which asks for nothing, was set; nor was what came with a model, as the config.json of
// every Mixtral has a coefficient without the switch.
void FindEffectFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const model::MixtralConfig& m = loaded.config.model;
  const RunConfig defaults;
  struct Need {
    const char* key;
    bool asks, met;
    const char* remedy;
  };
  for (const Need& need :
       {Need{"model.router_aux_loss_coef", m.router_aux_loss_coef != 0, m.output_router_logits,
             "model.output_router_logits=true"},
        Need{"model.moe_router_bias_update_rate", m.moe_router_bias_update_rate != 0,
             m.moe_router_enable_expert_bias, "model.moe_router_enable_expert_bias=true"}}) {
    const ConfigKey& key = *FindConfigKey(need.key);
    const std::string value = key.get(loaded.config);
    const bool was_set = loaded.origins.contains(key.name) && value != key.get(defaults);
    faults.Need(!need.asks || need.met || !was_set, kBadInput,
                "{}={} has no effect without {}; add that, or remove the key",
                loaded.Where(key.name), value, need.remedy);
  }
}

// True where the model's parameters can be listed.
bool FindModelFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const model::MixtralConfig& m = loaded.config.model;
  const std::size_t before = faults.size();
  faults.Need(m.num_experts_per_tok <= m.num_local_experts, kBadInput,
              "{}: each token would use {} of {} experts; lower "
              "model.num_experts_per_tok or raise model.num_local_experts",
              loaded.Where("model.num_experts_per_tok"), m.num_experts_per_tok,
              m.num_local_experts);
  faults.Need(m.num_local_experts <= kMaxExperts, kBadInput,
              "{}: {} experts; at most {} are supported", loaded.Where("model.num_local_experts"),
              m.num_local_experts, kMaxExperts);
  faults.Need(m.num_experts_per_tok <= kMaxExpertsPerToken, kBadInput,
              "{}: {} experts a token; at most {} are supported",
              loaded.Where("model.num_experts_per_tok"), m.num_experts_per_tok,
              kMaxExpertsPerToken);
  if (faults.Need(m.head_dim || m.hidden_size % m.num_attention_heads == 0, kBadInput,
                  "{}: hidden size {} is not divisible by {} heads; change one, or set "
                  "model.head_dim",
                  loaded.Where("model.hidden_size"), m.hidden_size, m.num_attention_heads)) {
    faults.Need(m.HeadDim() % 2 == 0, kBadInput,
                "{}: head width {} is odd; rotary embedding turns pairs, so it must be "
                "even",
                loaded.Where("model.head_dim"), m.HeadDim());
  }
  faults.Need(m.num_attention_heads % m.num_key_value_heads == 0, kBadInput,
              "{}: {} query heads cannot share {} key-value heads evenly; one must "
              "divide the other",
              loaded.Where("model.num_key_value_heads"), m.num_attention_heads,
              m.num_key_value_heads);
  const std::int64_t ids = data::SmallestVocabulary(loaded.config.data.alphabet);
  faults.Need(m.vocab_size >= ids, kBadInput,
              "{}: vocabulary {} is too small; token ids are byte values, so it must "
              "be at least {}",
              loaded.Where("model.vocab_size"), m.vocab_size, ids);
  // The router's options, which must fit together; each is named in the message.
  for (const std::string& text : model::OptionFaults(m)) {
    faults.Need(false, kBadInput, "{}", InKeysOfARun(loaded, text));
  }
  FindEffectFaults(loaded, faults);
  if (faults.size() > before) return false;
  // Sizes beyond any machine.
  return faults.Check([&] {
    try {
      model::Validate(m);
    } catch (const Error& e) {
      CISTRON_THROW(kBadInput, "{}", InKeysOfARun(loaded, e.message()));
    }
  });
}

void FindDataFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  faults.Need(!c.data.train.empty(), kBadInput,
              "data.train names no file; give data.train=FILE or "
              "data.train=[FILE, FILE]");
  faults.Need(c.data.train.empty() || c.data_weights.empty() ||
                  c.data_weights.size() == c.data.train.size(),
              kBadInput, "{}: {} mixing weights for {} files of data.train",
              loaded.Where("data.weights"), c.data_weights.size(), c.data.train.size());
  faults.Need(c.data.stride <= c.data.seq_len, kBadInput,
              "{}={} is larger than data.seq_len={}: it would leave bases between windows unread; "
              "lower it, or give 0, which stands for seq_len",
              loaded.Where("data.stride"), c.data.stride, c.data.seq_len);
  const bool by_files = c.data.split.kind == data::SplitRule::Kind::kFiles;
  faults.Need(!by_files || !c.data.heldout.empty(), kBadInput,
              "{}: data.split=files holds out the files of data.heldout, which names "
              "none",
              loaded.Where("data.split"));
  faults.Need(by_files || c.data.heldout.empty(), kBadInput,
              "{}: files are held out only with data.split=files", loaded.Where("data.heldout"));
}

// True where batches are whole rows.
bool FindBatchFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  const std::int64_t row = c.data.seq_len;
  faults.Need(!loaded.model_known || row <= c.model.max_position_embeddings, kBadInput,
              "{}: rows of {} tokens are longer than model.max_position_embeddings={}; lower "
              "one or raise the other",
              loaded.Where("data.seq_len"), row, c.model.max_position_embeddings);
  bool whole = true;
  for (const auto& [key, tokens] : {std::pair{"batch.global_tokens", c.batch.global_tokens},
                                    std::pair{"batch.micro_tokens", c.batch.micro_tokens}}) {
    whole &= faults.Need(tokens % row == 0, kBadInput,
                         "{}: {} tokens are not whole rows of data.seq_len={} tokens; the "
                         "nearest is {}",
                         loaded.Where(key), tokens, row,
                         std::max<std::int64_t>(1, (tokens + row / 2) / row) * row);
  }
  return faults.Need(c.batch.micro_tokens <= c.batch.global_tokens, kBadInput,
                     "{}: a micro-batch of {} tokens is larger than the global batch of {}",
                     loaded.Where("batch.micro_tokens"), c.batch.micro_tokens,
                     c.batch.global_tokens) &&
         whole;
}

void FindStateFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  const RunConfig& c = loaded.config;
  const bool fp32 = c.precision == Precision::kFp32;
  faults.Need(c.optim.gradients != OptimGradients::kBF16 || !fp32, kBadInput,
              "{}=bf16: gradients in bf16 are for models with bf16 weights, precision=fp32 has "
              "fp32 ones; leave the key out, or set precision=bf16",
              loaded.Where("optim.gradients"));
  faults.Need(c.HasMasters() || c.precision == Precision::kBf16, kBadInput,
              "{}=bf16: states in bf16 without masters are for precision=bf16; {} {}",
              loaded.Where("optim.states"), Name(c.precision),
              fp32 ? "has fp32 weights, which are their own masters"
                   : "quantises its weights from fp32 masters");
}

void FindScheduleFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  faults.Need(loaded.config.profile.last <= loaded.config.train.steps, kBadInput,
              "{}: the run ends with step {}; name earlier ones", loaded.Where("profile"),
              loaded.config.train.steps);
  const Schedule s = loaded.config.MakeSchedule();
  const bool by_key = loaded.config.optim.decay_end > 0;
  // A tenth, as is usual.
  faults.Need(s.warmup_steps <= s.decay_end, kBadInput,
              "{}={}: the {} ends before its warm-up does, {}={}; add optim.warmup_steps={}",
              loaded.Where(by_key ? "optim.decay_end" : "train.steps"), s.decay_end,
              by_key ? "rate's decay" : "run", loaded.Where("optim.warmup_steps"), s.warmup_steps,
              s.decay_end / 10);
}

void FindOutputFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  faults.Need(!loaded.config.output.empty(), kBadInput,
              "output names no directory; give output=DIRECTORY");
}

// Those that ask for what others have found wrong come only where these have found nothing.
void FindStepFaults(const LoadedConfig& loaded, ConfigFaults& faults) {
  FindTextFaults(loaded, faults);
  FindDeviceFaults(loaded, faults);
  const bool recipe = FindRecipeFaults(loaded, faults);
  const bool model = loaded.model_known && FindModelFaults(loaded, faults);
  const bool batch = FindBatchFaults(loaded, faults);
  if (model) FindHighPrecisionLayerFaults(loaded, faults);
  const bool ranks = !loaded.model_known || FindExpertRankFaults(loaded, faults);
  if (batch && ranks) FindRowRankFaults(loaded, faults);
  if (recipe) FindTravellingRowFaults(loaded, faults);
  FindScheduleFaults(loaded, faults);
  FindStateFaults(loaded, faults);
}

}  // namespace

void CheckStep(const LoadedConfig& loaded) {
  ConfigFaults faults = loaded.faults;
  FindStepFaults(loaded, faults);
  faults.Throw();
}

void CheckRunConfig(const LoadedConfig& loaded) {
  ConfigFaults faults = loaded.data_faults;
  faults.Add(loaded.faults);
  FindStepFaults(loaded, faults);
  faults.Check([&] { CheckDevices(loaded); });
  FindDataFaults(loaded, faults);
  FindOutputFaults(loaded, faults);
  faults.Throw();
}

void CheckExplained(const LoadedConfig& loaded) {
  ConfigFaults faults = loaded.faults;
  FindStepFaults(loaded, faults);
  if (loaded.HasData()) FindDataFaults(loaded, faults);
  faults.Throw();
}

}  // namespace cistron::train
