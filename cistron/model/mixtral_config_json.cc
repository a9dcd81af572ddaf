// config.json: what transformers 4 and 5 write, in; what transformers 5 writes, out.
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "cistron/base/error.h"
#include "cistron/io/json.h"
#include "cistron/model/mixtral_config.h"

namespace cistron::model {
namespace {

using nlohmann::json;

// Reads fields and remembers which it has seen; the others are kept for the way back.
class Reader {
 public:
  Reader(const json& document, const std::string& origin) : document_(document), origin_(origin) {}

  template <class... Args>
  [[noreturn]] void Fail(fmt::format_string<Args...> format, Args&&... args) const {
    CISTRON_THROW(kBadInput, "{}: {}", origin_,
                  fmt::vformat(format, fmt::make_format_args(args...)));
  }
  template <class... Args>
  [[noreturn]] void Refuse(fmt::format_string<Args...> format, Args&&... args) const {
    CISTRON_THROW(kUnsupported, "{}: {}", origin_,
                  fmt::vformat(format, fmt::make_format_args(args...)));
  }

  // The value of a field; null when it is missing or null.
  const json* Get(const char* key) {
    seen_.insert(key);
    const auto it = document_.find(key);
    return it == document_.end() || it->is_null() ? nullptr : &*it;
  }
  bool IsMissing(const char* key) const { return document_.find(key) == document_.end(); }

  std::int64_t Int(const char* key, const json& value) const {
    if (value.is_number_unsigned() && value.get<std::uint64_t>() <= INT64_MAX) {
      return value.get<std::int64_t>();
    }
    if (value.is_number_integer() && !value.is_number_unsigned()) return value.get<std::int64_t>();
    Fail("{} is {}; it must be an integer", key, io::Excerpt(value));
  }
  void Read(const char* key, std::int64_t& out) {
    if (const json* value = Get(key)) out = Int(key, *value);
  }
  void Read(const char* key, std::optional<std::int64_t>& out) {
    const bool missing = IsMissing(key);
    const json* value = Get(key);
    if (value != nullptr) {
      out = Int(key, *value);
    } else if (!missing) {
      out.reset();  // null said, not the default
    }
  }
  double Number(const char* key, const json& value) const {
    if (!value.is_number()) Fail("{} is {}; it must be a number", key, io::Excerpt(value));
    return value.get<double>();
  }
  void Read(const char* key, double& out) {
    if (const json* value = Get(key)) out = Number(key, *value);
  }
  void Read(const char* key, bool& out) {
    const json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_boolean()) Fail("{} is {}; it must be true or false", key, io::Excerpt(*value));
    out = value->get<bool>();
  }
  std::optional<std::string> String(const char* key) {
    const json* value = Get(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) Fail("{} is {}; it must be a string", key, io::Excerpt(*value));
    return value->get<std::string>();
  }

  json Unseen() const {
    json rest = json::object();
    for (const auto& [key, value] : document_.items()) {
      if (!seen_.contains(key)) rest[key] = value;
    }
    return rest;
  }

 private:
  const json& document_;
  const std::string& origin_;
  std::set<std::string> seen_;
};

// Fields of the router; those that a config.json of Mixtral does not have keep their defaults.
void ReadRouter(Reader& reader, MixtralConfig& c) {
  reader.Read("router_jitter_noise", c.router_jitter_noise);
  const auto scoring = reader.String("scoring_func").value_or("softmax");
  if (scoring != "softmax" && scoring != "sigmoid") {
    reader.Refuse("scoring_func is {}; \"softmax\" and \"sigmoid\" are supported",
                  io::Quoted(scoring));
  }
  c.scoring_func = scoring == "softmax" ? ScoringFunc::kSoftmax : ScoringFunc::kSigmoid;
  reader.Read("moe_router_pre_softmax", c.moe_router_pre_softmax);
  reader.Read("norm_topk_prob", c.norm_topk_prob);
  reader.Read("routed_scaling_factor", c.routed_scaling_factor);
  reader.Read("n_group", c.n_group);
  reader.Read("topk_group", c.topk_group);
  reader.Read("moe_router_enable_expert_bias", c.moe_router_enable_expert_bias);
  reader.Read("moe_router_bias_update_rate", c.moe_router_bias_update_rate);
  reader.Read("moe_aux_loss_coeff", c.moe_aux_loss_coeff);
  reader.Read("moe_z_loss_coeff", c.moe_z_loss_coeff);
  reader.Read("moe_router_force_load_balancing", c.moe_router_force_load_balancing);
  reader.Read("n_shared_experts", c.n_shared_experts);
}

// Only what differs from Mixtral is written: other readers know nothing of these fields.
void WriteRouter(const MixtralConfig& c, json& document) {
  const MixtralConfig mixtral;
  document["router_jitter_noise"] = c.router_jitter_noise;
  const auto put = [&](const char* name, auto MixtralConfig::*field) {
    if (c.*field != mixtral.*field) document[name] = c.*field;
  };
  if (c.scoring_func == ScoringFunc::kSigmoid) document["scoring_func"] = "sigmoid";
  put("moe_router_pre_softmax", &MixtralConfig::moe_router_pre_softmax);
  put("norm_topk_prob", &MixtralConfig::norm_topk_prob);
  put("routed_scaling_factor", &MixtralConfig::routed_scaling_factor);
  put("n_group", &MixtralConfig::n_group);
  put("topk_group", &MixtralConfig::topk_group);
  put("moe_router_enable_expert_bias", &MixtralConfig::moe_router_enable_expert_bias);
  put("moe_router_bias_update_rate", &MixtralConfig::moe_router_bias_update_rate);
  put("moe_aux_loss_coeff", &MixtralConfig::moe_aux_loss_coeff);
  put("moe_z_loss_coeff", &MixtralConfig::moe_z_loss_coeff);
  put("moe_router_force_load_balancing", &MixtralConfig::moe_router_force_load_balancing);
  put("n_shared_experts", &MixtralConfig::n_shared_experts);
}

// One object of RoPE settings: rope_parameters (transformers 5) or rope_scaling (4).
void ReadRope(Reader& reader, const char* key, const json& rope, double& theta) {
  if (!rope.is_object()) reader.Fail("{} is {}; it must be an object", key, io::Excerpt(rope));
  for (const auto& [name, value] : rope.items()) {
    if (value.is_null()) continue;
    if (name == "rope_theta") {
      theta = reader.Number("rope_theta", value);
    } else if (name == "rope_type" || name == "type") {
      if (value != "default") {
        reader.Refuse("{}.{} is {}; only \"default\" rotary embeddings are supported", key, name,
                      io::Excerpt(value));
      }
    } else if (name == "partial_rotary_factor" && value == 1.0) {
      continue;
    } else {
      reader.Refuse("{}.{} = {} is not supported; only rope_theta and rope_type \"default\" are",
                    key, io::Quoted(name), io::Excerpt(value));
    }
  }
}

void RefuseWhatIsNotDone(Reader& reader) {
  if (const auto type = reader.String("model_type"); type.value_or("mixtral") != "mixtral") {
    reader.Refuse("model_type is {}; only \"mixtral\" is supported", io::Quoted(*type));
  }
  if (const json* names = reader.Get("architectures")) {
    for (const json& name : *names) {
      if (name != "MixtralForCausalLM") {
        reader.Refuse("architectures names {}; only MixtralForCausalLM is supported",
                      io::Excerpt(name));
      }
    }
  }
  if (const auto act = reader.String("hidden_act"); act.value_or("silu") != "silu") {
    reader.Refuse("hidden_act is {}; only \"silu\" is supported", io::Quoted(*act));
  }
  double dropout = 0;
  reader.Read("attention_dropout", dropout);
  if (dropout != 0) {
    reader.Refuse("attention_dropout is {}; only 0 is supported, set it to 0.0", dropout);
  }
  if (const json* quantization = reader.Get("quantization_config")) {
    reader.Refuse(
        "quantization_config is {}; quantised weights are not supported, convert the "
        "model to F32 or BF16",
        io::Excerpt(*quantization));
  }
}

}  // namespace

MixtralConfig ParseMixtralConfig(const std::string& text, const std::string& origin,
                                 std::string* dtype) {
  const json document = io::ParseJson(text, origin);
  if (!document.is_object()) {
    CISTRON_THROW(kBadInput, "{}: is not a JSON object, so not a model's config.json", origin);
  }
  Reader reader(document, origin);
  RefuseWhatIsNotDone(reader);

  // What a missing field means is Hugging Face's MixtralConfig().
  MixtralConfig c;
  c.vocab_size = 32000;
  c.hidden_size = 4096;
  c.intermediate_size = 14336;
  c.num_hidden_layers = 32;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 8;
  c.num_local_experts = 8;
  c.num_experts_per_tok = 2;
  c.max_position_embeddings = 4096 * 32;
  c.bos_token_id = 1;
  c.eos_token_id = 2;

  reader.Read("vocab_size", c.vocab_size);
  reader.Read("hidden_size", c.hidden_size);
  reader.Read("intermediate_size", c.intermediate_size);
  reader.Read("num_hidden_layers", c.num_hidden_layers);
  reader.Read("num_attention_heads", c.num_attention_heads);
  // null: as many as query heads.
  if (!reader.IsMissing("num_key_value_heads")) c.num_key_value_heads = c.num_attention_heads;
  reader.Read("num_key_value_heads", c.num_key_value_heads);
  reader.Read("head_dim", c.head_dim);
  reader.Read("num_local_experts", c.num_local_experts);
  reader.Read("num_experts_per_tok", c.num_experts_per_tok);
  reader.Read("max_position_embeddings", c.max_position_embeddings);
  reader.Read("sliding_window", c.sliding_window);
  reader.Read("rms_norm_eps", c.rms_norm_eps);
  reader.Read("initializer_range", c.initializer_range);
  reader.Read("router_aux_loss_coef", c.router_aux_loss_coef);
  reader.Read("output_router_logits", c.output_router_logits);
  ReadRouter(reader, c);
  reader.Read("tie_word_embeddings", c.tie_word_embeddings);
  reader.Read("bos_token_id", c.bos_token_id);
  // A list of ends is legal: the first one is the model's, and the list is kept.
  json all_ends;
  if (const json* eos = reader.Get("eos_token_id"); eos != nullptr && eos->is_array()) {
    if (eos->empty()) reader.Fail("eos_token_id is an empty list");
    for (const json& id : *eos) reader.Int("eos_token_id", id);
    c.eos_token_id = (*eos)[0].get<std::int64_t>();
    all_ends = *eos;
  } else {
    reader.Read("eos_token_id", c.eos_token_id);
  }
  reader.Read("pad_token_id", c.pad_token_id);

  reader.Read("rope_theta", c.rope_theta);
  if (const json* rope = reader.Get("rope_scaling")) {
    ReadRope(reader, "rope_scaling", *rope, c.rope_theta);
  }
  if (const json* rope = reader.Get("rope_parameters")) {
    ReadRope(reader, "rope_parameters", *rope, c.rope_theta);
  }

  const auto scope = reader.String("cistron_aux_scope").value_or("batch");
  if (scope != "batch" && scope != "sequence") {
    reader.Fail("cistron_aux_scope is {}; it must be \"batch\" or \"sequence\"", io::Quoted(scope));
  }
  c.aux_scope = scope == "batch" ? AuxScope::kBatch : AuxScope::kSequence;

  const auto old_dtype = reader.String("torch_dtype");
  const auto stored = reader.String("dtype");
  if (dtype != nullptr) *dtype = stored.value_or(old_dtype.value_or("float32"));

  json extra = reader.Unseen();
  if (!all_ends.is_null()) extra["eos_token_id"] = all_ends;
  c.extra_json = io::DumpJson(extra);
  try {
    Validate(c);
  } catch (const Error& e) {
    CISTRON_THROW(kBadInput, "{}: {}", origin, e.message());
  }
  return c;
}

std::string ToJson(const MixtralConfig& c, const std::string& dtype) {
  json document = io::ParseJson(c.extra_json, "MixtralConfig::extra_json");
  CISTRON_CHECK(document.is_object(), "ToJson: extra_json is not a JSON object");
  const auto optional = [](const std::optional<std::int64_t>& value) {
    return value ? json(*value) : json(nullptr);
  };
  document["architectures"] = json::array({"MixtralForCausalLM"});
  document["model_type"] = "mixtral";
  document["hidden_act"] = "silu";
  document["attention_dropout"] = 0.0;
  WriteRouter(c, document);
  document["dtype"] = dtype;
  document["vocab_size"] = c.vocab_size;
  document["hidden_size"] = c.hidden_size;
  document["intermediate_size"] = c.intermediate_size;
  document["num_hidden_layers"] = c.num_hidden_layers;
  document["num_attention_heads"] = c.num_attention_heads;
  document["num_key_value_heads"] = c.num_key_value_heads;
  document["head_dim"] = optional(c.head_dim);
  document["num_local_experts"] = c.num_local_experts;
  document["num_experts_per_tok"] = c.num_experts_per_tok;
  document["max_position_embeddings"] = c.max_position_embeddings;
  document["sliding_window"] = optional(c.sliding_window);
  document["rope_parameters"] = {{"rope_theta", c.rope_theta}, {"rope_type", "default"}};
  document["rms_norm_eps"] = c.rms_norm_eps;
  document["initializer_range"] = c.initializer_range;
  document["router_aux_loss_coef"] = c.router_aux_loss_coef;
  document["output_router_logits"] = c.output_router_logits;
  document["tie_word_embeddings"] = c.tie_word_embeddings;
  document["bos_token_id"] = optional(c.bos_token_id);
  // A kept list stays as long as its first end is still the model's.
  const auto ends = document.find("eos_token_id");
  if (ends == document.end() || !ends->is_array() || ends->empty() ||
      (*ends)[0] != optional(c.eos_token_id)) {
    document["eos_token_id"] = optional(c.eos_token_id);
  }
  document["pad_token_id"] = optional(c.pad_token_id);
  if (c.aux_scope != AuxScope::kBatch) document["cistron_aux_scope"] = "sequence";
  if (!document.contains("use_cache")) document["use_cache"] = true;
  document["transformers_version"] = kTransformersVersion;
  return io::DumpJson(document, 2) + "\n";
}

}  // namespace cistron::model
