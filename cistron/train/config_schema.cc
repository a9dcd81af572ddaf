#include "cistron/train/config_schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Range {
  double low = -kInf, high = kInf;
  bool low_open = false, high_open = false;

  bool Contains(double x) const {
    return (low_open ? x > low : x >= low) && (high_open ? x < high : x <= high);
  }
  std::string Text() const {
    if (high == kInf) return low == -kInf ? "" : fmt::format("{} {}", low_open ? ">" : "≥", low);
    return fmt::format("{}{}, {}{}", low_open ? '(' : '[', low, high, high_open ? ')' : ']');
  }
};
Range AtLeast(double low) {
  return {.low = low};
}
Range Above(double low) {
  return {.low = low, .low_open = true};
}
Range Between(double low, double high) {
  return {.low = low, .high = high};
}
Range HalfOpen(double low, double high) {
  return {.low = low, .high = high, .high_open = true};
}

std::string Quote(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else {
      out += c;
    }
  }
  return out + '"';
}

double ParseNumber(const ConfigValue& value, const std::string& text) {
  double x = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  if (begin != end && *begin == '+') ++begin;
  const auto [stop, error] = std::from_chars(begin, end, x);
  if (value.quoted || error != std::errc() || stop != end || begin == end || !std::isfinite(x)) {
    CISTRON_THROW(kBadInput, "is not a number");
  }
  return x;
}

std::int64_t ParseInteger(const ConfigValue& value) {
  std::int64_t n = 0;
  const std::string& text = value.text;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (!value.quoted && error == std::errc() && stop == text.data() + text.size() && !text.empty()) {
    return n;
  }
  // 1e6 and 2.5e6 are how people write large counts.
  std::optional<double> x;
  try {
    x = ParseNumber(value, text);
  } catch (const Error&) {
  }
  if (!x || *x != std::floor(*x) || std::abs(*x) > 0x1p53) {
    CISTRON_THROW(kBadInput, "is not a whole number");
  }
  return static_cast<std::int64_t>(*x);
}

void NeedScalar(const ConfigValue& value) {
  if (value.is_list) CISTRON_THROW(kBadInput, "is a list where one value is needed");
  if (value.is_null) CISTRON_THROW(kBadInput, "is null where a value is needed");
}

void NeedRange(const Range& range, double x) {
  if (!range.Contains(x)) CISTRON_THROW(kBadInput, "is out of range");
}

std::vector<std::string> Items(const ConfigValue& value) {
  if (value.is_null) return {};
  return value.is_list ? value.items : std::vector<std::string>{value.text};
}

// Accessors of a (nested) member.
template <class A>
auto At(A RunConfig::*a) {
  return [a](auto& config) -> auto& {
    return config.*a;
  };
}
template <class A, class B>
auto At(A RunConfig::*a, B A::*b) {
  return [ a, b ](auto& config) -> auto& {
    return config.*a.*b;
  };
}

template <class F>
ConfigKey Integer(std::string name, F at, Range range, std::string help,
                  KeyRole role = KeyRole::kTunable) {
  return {std::move(name),
          "integer",
          range.Text(),
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) {
            NeedScalar(value);
            const std::int64_t n = ParseInteger(value);
            NeedRange(range, static_cast<double>(n));
            at(config) = static_cast<std::remove_cvref_t<decltype(at(config))>>(n);
          },
          [=](const RunConfig& config) { return fmt::format("{}", at(config)); }};
}

template <class F>
ConfigKey OptionalInteger(std::string name, F at, Range range, std::string help,
                          KeyRole role = KeyRole::kIdentity) {
  return {std::move(name),
          "integer or null",
          range.Text(),
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) {
            if (value.is_null) {
              at(config).reset();
              return;
            }
            NeedScalar(value);
            const std::int64_t n = ParseInteger(value);
            NeedRange(range, static_cast<double>(n));
            at(config) = n;
          },
          [=](const RunConfig& config) {
            return at(config) ? fmt::format("{}", *at(config)) : std::string("null");
          }};
}

template <class F>
ConfigKey Number(std::string name, F at, Range range, std::string help,
                 KeyRole role = KeyRole::kTunable) {
  return {std::move(name),
          "number",
          range.Text(),
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) {
            NeedScalar(value);
            const double x = ParseNumber(value, value.text);
            NeedRange(range, x);
            at(config) = x;
          },
          [=](const RunConfig& config) { return fmt::format("{}", at(config)); }};
}

template <class F>
ConfigKey Boolean(std::string name, F at, std::string help, KeyRole role = KeyRole::kTunable) {
  return {std::move(name),
          "boolean",
          "",
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) {
            NeedScalar(value);
            if (value.text != "true" && value.text != "false") {
              CISTRON_THROW(kBadInput, "is neither true nor false");
            }
            at(config) = value.text == "true";
          },
          [=](const RunConfig& config) -> std::string { return at(config) ? "true" : "false"; }};
}

template <class F>
ConfigKey PathKey(std::string name, F at, std::string help, KeyRole role) {
  return {std::move(name),
          "path",
          "",
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) {
            if (value.is_null) {
              at(config).clear();
              return;
            }
            NeedScalar(value);
            at(config) = value.text;
          },
          [=](const RunConfig& config) { return Quote(at(config).string()); }};
}

template <class F>
ConfigKey Text(std::string name, F at, std::string help) {
  return {std::move(name),
          "text",
          "",
          std::move(help),
          KeyRole::kTunable,
          [=](RunConfig& config, const ConfigValue& value) {
            if (value.is_list) NeedScalar(value);
            at(config) = value.is_null ? std::string() : value.text;
          },
          [=](const RunConfig& config) { return Quote(at(config)); }};
}

template <class F>
ConfigKey Files(std::string name, F at, std::string help) {
  return {std::move(name),
          "path or list of paths",
          "",
          std::move(help),
          KeyRole::kByContent,
          [=](RunConfig& config, const ConfigValue& value) {
            at(config).clear();
            for (const std::string& item : Items(value)) {
              if (item.empty()) CISTRON_THROW(kBadInput, "holds an empty path");
              at(config).push_back({item, 1.0});
            }
          },
          [=](const RunConfig& config) {
            std::vector<std::string> items;
            for (const data::FileSpec& file : at(config))
              items.push_back(Quote(file.path.string()));
            return fmt::format("[{}]", fmt::join(items, ", "));
          }};
}

template <class F>
ConfigKey Texts(std::string name, F at, std::string help, KeyRole role = KeyRole::kTunable) {
  return {std::move(name),
          "list of texts",
          "",
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) { at(config) = Items(value); },
          [=](const RunConfig& config) {
            std::vector<std::string> items;
            for (const std::string& text : at(config)) items.push_back(Quote(text));
            return fmt::format("[{}]", fmt::join(items, ", "));
          }};
}

template <class F>
ConfigKey Numbers(std::string name, F at, Range range, std::string help) {
  return {
      std::move(name),
      "list of numbers",
      range.Text(),
      std::move(help),
      KeyRole::kTunable,
      [=](RunConfig& config, const ConfigValue& value) {
        at(config).clear();
        for (const std::string& item : Items(value)) {
          const double x = ParseNumber(value, item);
          NeedRange(range, x);
          at(config).push_back(x);
        }
      },
      [=](const RunConfig& config) { return fmt::format("[{}]", fmt::join(at(config), ", ")); }};
}

// "steps:10-12", "steps:10" or "none".
template <class F>
ConfigKey ProfileSteps(std::string name, F at, std::string help) {
  return {std::move(name),
          "steps:FIRST-LAST or none",
          "",
          std::move(help),
          KeyRole::kMechanical,
          [=](RunConfig& config, const ConfigValue& value) {
            NeedScalar(value);
            at(config) = {};
            if (value.text == "none") return;
            constexpr std::string_view kSteps = "steps:";
            const char* const end = value.text.data() + value.text.size();
            ProfileOptions steps;
            if (value.text.starts_with(kSteps)) {
              auto [stop, error] =
                  std::from_chars(value.text.data() + kSteps.size(), end, steps.first);
              steps.last = steps.first;
              if (error == std::errc() && stop != end && *stop == '-') {
                stop = std::from_chars(stop + 1, end, steps.last).ptr;
              }
              if (stop == end && steps.first >= 1 && steps.last >= steps.first) {
                at(config) = steps;
                return;
              }
            }
            CISTRON_THROW(kBadInput, "is neither none nor steps such as steps:10-12");
          },
          [=](const RunConfig& config) {
            const ProfileOptions& steps = at(config);
            return steps.first == 0 ? std::string("none")
                                    : fmt::format("steps:{}-{}", steps.first, steps.last);
          }};
}

template <class E>
struct NamedValue {
  const char* name;
  E value;
};

template <class F, class E, std::size_t N>
ConfigKey Choice(std::string name, F at, const NamedValue<E> (&choices)[N], std::string help,
                 KeyRole role) {
  const std::vector<NamedValue<E>> list(std::begin(choices), std::end(choices));
  std::vector<std::string> names;
  names.reserve(list.size());
  for (const auto& choice : list) names.push_back(choice.name);
  const std::string all = fmt::format("{}", fmt::join(names, "|"));
  return {std::move(name),
          all,
          "",
          std::move(help),
          role,
          [=](RunConfig& config, const ConfigValue& value) {
            NeedScalar(value);
            for (const auto& choice : list) {
              if (value.text == choice.name) {
                at(config) = choice.value;
                return;
              }
            }
            CISTRON_THROW(kBadInput, "is not one of its values");
          },
          [=](const RunConfig& config) -> std::string {
            for (const auto& choice : list) {
              if (at(config) == choice.value) return choice.name;
            }
            CISTRON_THROW(kInternal, "config: a choice without a name");
          }};
}

std::vector<ConfigKey> MakeKeys() {
  using C = RunConfig;
  using M = model::MixtralConfig;
  using D = data::DataConfig;
  constexpr KeyRole kIdentity = KeyRole::kIdentity;
  constexpr KeyRole kMechanical = KeyRole::kMechanical;
  constexpr KeyRole kTunable = KeyRole::kTunable;
  constexpr NamedValue<CudaGraph> kGraphs[] = {{"auto", CudaGraph::kAuto},
                                               {"off", CudaGraph::kOff}};
  constexpr double kMostRanks = 65'536;  // of each kind: what is made of their product stays small
  constexpr NamedValue<Sharding> kShardings[] = {{"none", Sharding::kNone},
                                                 {"full", Sharding::kFull}};
  constexpr NamedValue<TravellingRows> kRows[] = {{"exact", TravellingRows::kExact},
                                                  {"quantized", TravellingRows::kQuantized}};
  constexpr NamedValue<bool> kEpSync[] = {{"device", false}, {"host", true}};
  constexpr NamedValue<OptimStates> kStates[] = {{"fp32", OptimStates::kF32},
                                                 {"bf16", OptimStates::kBF16}};
  constexpr NamedValue<OptimGradients> kGradients[] = {{"auto", OptimGradients::kAuto},
                                                       {"fp32", OptimGradients::kF32},
                                                       {"bf16", OptimGradients::kBF16}};
  constexpr NamedValue<DeviceChoice> kDevices[] = {{"cpu", DeviceChoice::kCpu},
                                                   {"cuda", DeviceChoice::kCuda}};
  constexpr NamedValue<Precision> kPrecisions[] = {{"fp32", Precision::kFp32},
                                                   {"bf16", Precision::kBf16},
                                                   {"fp8_delayed", Precision::kFp8Delayed},
                                                   {"fp8_current", Precision::kFp8Current},
                                                   {"fp8_block", Precision::kFp8Block},
                                                   {"mxfp8", Precision::kMxfp8}};
  constexpr NamedValue<model::Recompute> kRecompute[] = {{"none", model::Recompute::kNone},
                                                         {"moe", model::Recompute::kMoe},
                                                         {"layer", model::Recompute::kLayer}};
  constexpr NamedValue<RecipeFormat> kFormats[] = {{"auto", RecipeFormat::kAuto},
                                                   {"hybrid", RecipeFormat::kHybrid},
                                                   {"e4m3", RecipeFormat::kE4M3}};
  constexpr NamedValue<Switch> kSwitches[] = {
      {"auto", Switch::kAuto}, {"off", Switch::kOff}, {"on", Switch::kOn}};
  constexpr NamedValue<ops::AmaxCompute> kAmax[] = {{"max", ops::AmaxCompute::kMax},
                                                    {"most_recent", ops::AmaxCompute::kMostRecent}};
  using R = RecipeOptions;
  constexpr NamedValue<OnExists> kOnExists[] = {{"auto", OnExists::kAuto},
                                                {"resume", OnExists::kResume},
                                                {"fail", OnExists::kFail},
                                                {"new", OnExists::kNew}};
  constexpr NamedValue<model::AuxScope> kScopes[] = {{"batch", model::AuxScope::kBatch},
                                                     {"sequence", model::AuxScope::kSequence}};
  constexpr NamedValue<model::ScoringFunc> kScoring[] = {{"softmax", model::ScoringFunc::kSoftmax},
                                                         {"sigmoid", model::ScoringFunc::kSigmoid}};
  constexpr NamedValue<data::Alphabet> kAlphabets[] = {{"dna", data::Alphabet::kDna},
                                                       {"rna", data::Alphabet::kRna},
                                                       {"protein", data::Alphabet::kProtein},
                                                       {"bytes", data::Alphabet::kBytes}};
  constexpr NamedValue<data::SplitRule::Kind> kSplits[] = {
      {"none", data::SplitRule::Kind::kNone},
      {"region", data::SplitRule::Kind::kRegion},
      {"records", data::SplitRule::Kind::kRecords},
      {"files", data::SplitRule::Kind::kFiles}};
  const auto split_kind = [](auto& config) -> auto& {
    return config.data.split.kind;
  };
  const auto split_fraction = [](auto& config) -> auto& {
    return config.data.split.train_fraction;
  };

  return {
      Choice("device", At(&C::device), kDevices,
             "where the run computes; cuda: a GPU for each rank, in fp32 and bf16, in a build with "
             "the CUDA backend",
             kTunable),
      Choice(
          "precision", At(&C::precision), kPrecisions,
          "number formats: bf16 keeps bf16 weights with fp32 masters; fp8_* and mxfp8 are recipes "
          "over it",
          kIdentity),
      Choice("recipe.format", At(&C::recipe, &R::format), kFormats,
             "hybrid: e5m2 for gradients of outputs; auto: hybrid for fp8_delayed and fp8_current",
             kIdentity),
      Integer("recipe.margin", At(&C::recipe, &R::margin), Between(0, 64),
              "fp8_delayed: scales are divided by 2^margin", kIdentity),
      Integer("recipe.amax_history_len", At(&C::recipe, &R::amax_history_len), Between(1, 65536),
              "fp8_delayed: steps whose amax counts", kIdentity),
      Choice("recipe.amax_compute_algo", At(&C::recipe, &R::amax_compute_algo), kAmax,
             "fp8_delayed: which amax of the history counts", kIdentity),
      Choice("recipe.power_of_two_scales", At(&C::recipe, &R::power_of_two_scales), kSwitches,
             "fp8_current, fp8_block; auto: on for fp8_block", kIdentity),
      Choice("recipe.weights_2d", At(&C::recipe, &R::weights_2d), kSwitches,
             "fp8_block, mxfp8: weights in squares; auto: on for fp8_block", kIdentity),
      Integer("recipe.first_layers_bf16", At(&C::recipe, &R::first_layers_bf16), AtLeast(0),
              "layers at the start that stay in bf16", kIdentity),
      Integer("recipe.last_layers_bf16", At(&C::recipe, &R::last_layers_bf16), AtLeast(0),
              "layers at the end that stay in bf16", kIdentity),
      Texts("recipe.bf16_patterns", At(&C::recipe, &R::bf16_patterns),
            "parameter names that stay in bf16; * stands for any characters. In quotes, as "
            "[\"*.down_proj\"]: a bare * is an alias of YAML",
            kIdentity),
      PathKey("output", At(&C::output), "directory of the run", kMechanical),
      Integer("seed", At(&C::seed), AtLeast(0), "seed of weights and data order", kIdentity),
      Integer("threads", At(&C::threads), Between(0, 4096),
              "of a process; 0: OMP_NUM_THREADS, or all processors that it may use, of which ranks "
              "on one machine have equal parts",
              kMechanical),
      Boolean(
          "strict", At(&C::strict),
          "an op that its best implementation refuses, or a fusion that does not fire, is an error",
          kMechanical),
      Choice("recompute", At(&C::recompute), kRecompute,
             "what backward computes again instead of keeping it; less memory, the same results",
             kMechanical),
      Choice("aux_scope", At(&C::model, &M::aux_scope), kScopes,
             "tokens over which the auxiliary loss takes its statistics", kIdentity),
      Choice(
          "run.on_exists", [](auto& c) -> auto& { return c.run.on_exists; }, kOnExists,
          "when output holds a run; auto: resume if the configuration matches, else fail",
          kMechanical),
      PathKey("init.from", At(&C::init, &InitOptions::from),
              "Hugging Face directory or checkpoint to take the initial weights from", kTunable),

      Integer("model.vocab_size", At(&C::model, &M::vocab_size), AtLeast(1), "token ids",
              kIdentity),
      Integer("model.hidden_size", At(&C::model, &M::hidden_size), AtLeast(1), "width", kIdentity),
      Integer("model.intermediate_size", At(&C::model, &M::intermediate_size), AtLeast(1),
              "width of each expert", kIdentity),
      Integer("model.num_hidden_layers", At(&C::model, &M::num_hidden_layers), AtLeast(1), "layers",
              kIdentity),
      Integer("model.num_attention_heads", At(&C::model, &M::num_attention_heads), AtLeast(1),
              "query heads", kIdentity),
      Integer("model.num_key_value_heads", At(&C::model, &M::num_key_value_heads), AtLeast(1),
              "key and value heads", kIdentity),
      OptionalInteger("model.head_dim", At(&C::model, &M::head_dim), AtLeast(1),
                      "null: hidden_size / num_attention_heads"),
      Integer("model.num_local_experts", At(&C::model, &M::num_local_experts), AtLeast(1),
              "experts a layer", kIdentity),
      Integer("model.num_experts_per_tok", At(&C::model, &M::num_experts_per_tok), AtLeast(1),
              "experts that each token uses", kIdentity),
      Integer("model.max_position_embeddings", At(&C::model, &M::max_position_embeddings),
              AtLeast(1), "longest sequence, for the exported model", kIdentity),
      OptionalInteger("model.sliding_window", At(&C::model, &M::sliding_window), AtLeast(1),
                      "keys that a query sees; null: all before it"),
      Number("model.rope_theta", At(&C::model, &M::rope_theta), Above(0),
             "base of the rotary angles", kIdentity),
      Number("model.rms_norm_eps", At(&C::model, &M::rms_norm_eps), Above(0),
             "epsilon of the norms", kIdentity),
      Number("model.initializer_range", At(&C::model, &M::initializer_range), Above(0),
             "standard deviation of the initial weights", kIdentity),
      Number("model.router_aux_loss_coef", At(&C::model, &M::router_aux_loss_coef), AtLeast(0),
             "coefficient of the auxiliary loss"),
      Boolean("model.output_router_logits", At(&C::model, &M::output_router_logits),
              "true: the auxiliary loss is part of the training loss"),
      Choice("model.scoring_func", At(&C::model, &M::scoring_func), kScoring,
             "scores of the router (docs/router.md); Mixtral: softmax", kIdentity),
      Boolean("model.moe_router_pre_softmax", At(&C::model, &M::moe_router_pre_softmax),
              "softmax over all experts before top-k; with norm_topk_prob=false", kIdentity),
      Boolean("model.norm_topk_prob", At(&C::model, &M::norm_topk_prob),
              "probabilities of a token's experts sum to 1", kIdentity),
      Number("model.routed_scaling_factor", At(&C::model, &M::routed_scaling_factor), Above(0),
             "multiplies the probabilities of the experts", kIdentity),
      Integer("model.n_group", At(&C::model, &M::n_group), AtLeast(1),
              "groups of experts, for sigmoid scores", kIdentity),
      Integer("model.topk_group", At(&C::model, &M::topk_group), AtLeast(1),
              "groups that a token may use", kIdentity),
      Boolean("model.moe_router_enable_expert_bias",
              At(&C::model, &M::moe_router_enable_expert_bias),
              "loss-free balancing: a bias that only selects, for sigmoid scores", kIdentity),
      Number("model.moe_router_bias_update_rate", At(&C::model, &M::moe_router_bias_update_rate),
             AtLeast(0), "how far the bias moves each step"),
      Number("model.moe_aux_loss_coeff", At(&C::model, &M::moe_aux_loss_coeff), AtLeast(0),
             "coefficient of a load-balancing loss of each layer (Megatron's definition)"),
      Number("model.moe_z_loss_coeff", At(&C::model, &M::moe_z_loss_coeff), AtLeast(0),
             "coefficient of the router's z-loss of each layer"),
      Boolean("model.moe_router_force_load_balancing",
              At(&C::model, &M::moe_router_force_load_balancing),
              "to measure, not to learn: training chooses experts at random, evenly"),
      Number("model.router_jitter_noise", At(&C::model, &M::router_jitter_noise), HalfOpen(0, 1),
             "training multiplies the MoE layer's input by U(1 - j, 1 + j)"),
      Integer("model.n_shared_experts", At(&C::model, &M::n_shared_experts), AtLeast(0),
              "width, in experts, of an MLP that every token uses besides", kIdentity),
      Boolean("model.tie_word_embeddings", At(&C::model, &M::tie_word_embeddings),
              "one matrix for embedding and head", kIdentity),
      OptionalInteger("model.bos_token_id", At(&C::model, &M::bos_token_id), AtLeast(0),
                      "written to the exported model"),
      OptionalInteger("model.eos_token_id", At(&C::model, &M::eos_token_id), AtLeast(0),
                      "written to the exported model"),
      OptionalInteger("model.pad_token_id", At(&C::model, &M::pad_token_id), AtLeast(0),
                      "written to the exported model"),

      Files("data.train", At(&C::data, &D::train), "FASTA or JSONL files, plain, gzip or bgzip"),
      Numbers("data.weights", At(&C::data_weights), Above(0),
              "how often an epoch shows each file of data.train; empty: once"),
      Files("data.heldout", At(&C::data, &D::heldout), "held-out files, for data.split=files"),
      Choice("data.alphabet", At(&C::data, &D::alphabet), kAlphabets, "letters of the sequences",
             kIdentity),
      Choice("data.split", split_kind, kSplits,
             "what is held out: the end of each record, whole records, files, nothing", kTunable),
      Number("data.train_fraction", split_fraction, Between(0, 1),
             "part that trains with data.split=region or records"),
      Integer(
          "data.split_key", [](auto& config) -> auto& { return config.data.split.key; }, AtLeast(0),
          "draws other records with data.split=records"),
      Integer("data.seq_len", At(&C::data, &D::seq_len), AtLeast(2), "tokens of a row", kIdentity),
      Integer("data.stride", At(&C::data, &D::stride), AtLeast(0),
              "bases between the starts of training windows, at most seq_len; 0: seq_len",
              kIdentity),
      Number("data.reverse_complement", At(&C::data, &D::reverse_complement), Between(0, 1),
             "probability that a training window is read from the other strand; DNA and RNA only"),
      Boolean("data.upper_case", At(&C::data, &D::upper_case), "read lower case as upper case"),
      Number("data.soft_mask_weight", At(&C::data, &D::soft_mask_weight), AtLeast(0),
             "weight of the loss of lower-case bases"),
      Boolean("data.begin_token", At(&C::data, &D::begin_token), "a begin token before each record",
              kIdentity),
      Boolean("data.end_token", At(&C::data, &D::end_token), "an end token after each record",
              kIdentity),
      Texts("data.tag_delimiters", At(&C::data, &D::tag_delimiters),
            "one byte each; what stands between two of the same is not scored"),
      Text("data.json_field", At(&C::data, &D::json_field),
           "field of JSONL records; empty: sequence, or text"),
      PathKey("data.cache_dir", At(&C::data, &D::cache_dir),
              "where files that cannot seek are kept decoded", kMechanical),
      Integer("data.cache_limit_bytes", At(&C::data, &D::cache_limit_bytes), AtLeast(0),
              "size limit of that cache", kMechanical),

      Integer("batch.global_tokens", At(&C::batch, &BatchOptions::global_tokens), AtLeast(1),
              "tokens of a step", kIdentity),
      Integer("batch.micro_tokens", At(&C::batch, &BatchOptions::micro_tokens), AtLeast(0),
              "tokens that a rank computes at once; 0: all of its part of the batch"),
      Integer("train.steps", At(&C::train, &TrainOptions::steps), AtLeast(1), "updates in all"),
      Choice("train.cuda_graph", At(&C::train, &TrainOptions::cuda_graph), kGraphs,
             "on a GPU: auto captures a step whose shapes stay the same and replays it, the bits "
             "are those of off",
             kMechanical),

      Choice("optim.states", At(&C::optim, &OptimOptions::states), kStates,
             "of precision=bf16: fp32 masters and moments, or bf16: weights and moments in bf16 "
             "without masters, rounded to nearest at every update",
             kIdentity),
      Choice("optim.gradients", At(&C::optim, &OptimOptions::gradients), kGradients,
             "of matrices in a bf16 model: bf16 takes 2 bytes a parameter less and rounds the sum "
             "at every micro-batch; auto: bf16 where optim.states=bf16 and batch.micro_tokens does "
             "not cut the batch, else fp32",
             kTunable),
      Number("optim.lr", At(&C::optim, &OptimOptions::lr), AtLeast(0), "peak learning rate"),
      Number("optim.beta1", At(&C::optim, &OptimOptions::beta1), HalfOpen(0, 1), "AdamW"),
      Number("optim.beta2", At(&C::optim, &OptimOptions::beta2), HalfOpen(0, 1), "AdamW"),
      Number("optim.eps", At(&C::optim, &OptimOptions::eps), AtLeast(0), "AdamW"),
      Number("optim.weight_decay", At(&C::optim, &OptimOptions::weight_decay), AtLeast(0),
             "decoupled decay, multiplied by the rate"),
      Boolean("optim.decay_embeddings", At(&C::optim, &OptimOptions::decay_embeddings),
              "embeddings decay too"),
      Boolean("optim.decay_all", At(&C::optim, &OptimOptions::decay_all),
              "norms, biases and embeddings decay too, as torch does without groups"),
      Integer("optim.warmup_steps", At(&C::optim, &OptimOptions::warmup_steps), AtLeast(0),
              "updates of linear warm-up"),
      Integer("optim.decay_end", At(&C::optim, &OptimOptions::decay_end), AtLeast(0),
              "update at which the cosine reaches its floor; 0: the last"),
      Number("optim.floor_ratio", At(&C::optim, &OptimOptions::floor_ratio), Between(0, 1),
             "floor of the rate as a part of the peak"),
      Number("optim.clip", At(&C::optim, &OptimOptions::clip), AtLeast(0),
             "largest global gradient norm; 0: no clipping"),

      Integer("eval.every", At(&C::eval, &EvalOptions::every), AtLeast(0),
              "steps between held-out evaluations; 0: only at the end"),
      Integer(
          "eval.tokens", At(&C::eval, &EvalOptions::tokens), AtLeast(0),
          "tokens of such an evaluation, evenly spread; 0: the whole held-out part, as the last "
          "evaluation of a run always is"),
      Integer("checkpoint.every", At(&C::checkpoint, &CheckpointOptions::every), AtLeast(0),
              "steps between checkpoints; 0: only at the end", kMechanical),
      Integer("checkpoint.keep", At(&C::checkpoint, &CheckpointOptions::keep), AtLeast(1),
              "checkpoints kept", kMechanical),
      Boolean("checkpoint.background", At(&C::checkpoint, &CheckpointOptions::background),
              "write checkpoints from a copy in host memory while training goes on", kMechanical),
      Boolean("checkpoint.at_end", At(&C::checkpoint, &CheckpointOptions::at_end),
              "save after the last step, and write the Hugging Face directory; false, to measure: "
              "the run leaves its metrics and a checksum of the weights",
              kMechanical),
      Integer("parallel.dp", At(&C::parallel, &ParallelOptions::dp), Between(1, kMostRanks),
              "data-parallel groups of ranks; dp times ep is the number of ranks", kMechanical),
      Integer("parallel.ep", At(&C::parallel, &ParallelOptions::ep), Between(1, kMostRanks),
              "ranks that share the experts, each with an equal part of them", kMechanical),
      Choice("parallel.shard", At(&C::parallel, &ParallelOptions::shard), kShardings,
             "full: ranks that would hold the same parameters each keep a shard of weights, "
             "gradients, masters and moments, and gather weights when they need them; none",
             kMechanical),
      Choice(
          "parallel.ep_rows", At(&C::parallel, &ParallelOptions::ep_rows), kRows,
          "quantized: token rows travel to experts as codes and scales of mxfp8 or fp8_block, half "
          "the bytes, in passes that have no weight gradients (evaluation, and those that are "
          "recomputed); exact. Results are the same bits",
          kMechanical),
      Choice("parallel.ep_sync", At(&C::parallel, &ParallelOptions::ep_by_host), kEpSync,
             "how ranks with a GPU each learn how many rows of experts they get. device: kernels "
             "tell each other and write rows into each other's memory, no host waits; where GPUs "
             "cannot reach each other it is host, and the run says so. host: exact counts are read "
             "in every layer, rows go through NCCL. Without meaning on CPUs",
             kMechanical),
      Number("parallel.ep_buffer_factor", At(&C::parallel, &ParallelOptions::ep_buffer_factor),
             Above(0),
             "with ep_sync=device: rows that a rank has room for, over those of an even share. A "
             "step that needs more is made again with larger buffers, no token is dropped. Without "
             "meaning on CPUs, whose buffers are as large as what is received",
             kMechanical),
      Integer("parallel.timeout", At(&C::parallel, &ParallelOptions::timeout),
              Between(1, 1'000'000),
              "seconds that a rank waits for others in one exchange before it ends the run",
              kMechanical),
      ProfileSteps("profile", At(&C::profile),
                   "steps:10-12 tells where the time of these steps goes, op by op, in the output "
                   "and in the report; none"),
      Integer("log.every", At(&C::log, &LogOptions::every), AtLeast(1),
              "steps between lines when the output is not a terminal", kMechanical),
  };
}

}  // namespace

std::span<const ConfigKey> ConfigKeys() {
  static const std::vector<ConfigKey> keys = MakeKeys();
  return keys;
}

}  // namespace cistron::train
