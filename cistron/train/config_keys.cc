// What is made of the table of configuration keys: look-up, help, comparison.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/text.h"
#include "cistron/train/config_schema.h"

namespace cistron::train {

const ConfigKey* FindConfigKey(const std::string& name) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

namespace {
// The first key below a group's name; empty when it is not a group.
std::string FirstKeyOf(const std::string& group) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.name.starts_with(group + ".")) return key.name;
  }
  return {};
}
}  // namespace

bool IsConfigGroup(const std::string& name) {
  return !FirstKeyOf(name).empty();
}

std::string NearestConfigGroup(const std::string& name) {
  std::string nearest;
  for (const ConfigKey& key : ConfigKeys()) {
    for (std::size_t dot = key.name.find('.'); dot != std::string::npos;
         dot = key.name.find('.', dot + 1)) {
      const std::string group = key.name.substr(0, dot);
      if (nearest.empty() || EditDistance(name, group) < EditDistance(name, nearest)) {
        nearest = group;
      }
    }
  }
  return nearest;
}

namespace {
// What other programs call a key; without groups. Those of Megatron-LM are the options of its
// megatron/training/arguments.py, those of DeepSeek the fields of its config.json.
constexpr std::pair<std::string_view, const char*> kAliases[] = {
    {"learning_rate", "optim.lr"},
    {"max_lr", "optim.lr"},
    {"warmup", "optim.warmup_steps"},
    {"grad_clip", "optim.clip"},
    {"max_grad_norm", "optim.clip"},
    {"batch_size", "batch.global_tokens"},
    {"micro_batch_size", "batch.micro_tokens"},
    {"max_steps", "train.steps"},
    {"num_steps", "train.steps"},
    {"epochs", "train.steps"},
    {"seq_length", "data.seq_len"},
    {"context_length", "data.seq_len"},
    {"n_layers", "model.num_hidden_layers"},
    {"num_layers", "model.num_hidden_layers"},
    {"num_experts", "model.num_local_experts"},
    {"n_routed_experts", "model.num_local_experts"},
    {"top_k", "model.num_experts_per_tok"},
    {"moe_router_topk", "model.num_experts_per_tok"},
    {"moe_router_score_function", "model.scoring_func"},
    {"moe_router_num_groups", "model.n_group"},
    {"moe_router_group_topk", "model.topk_group"},
    {"moe_router_topk_scaling_factor", "model.routed_scaling_factor"},
    {"moe_router_load_balancing_type", "model.moe_aux_loss_coeff"},
    {"aux_loss_alpha", "model.moe_aux_loss_coeff"},
    {"seq_aux", "aux_scope"},
    {"moe_input_jitter_eps", "model.router_jitter_noise"},
    {"moe_shared_expert_intermediate_size", "model.n_shared_experts"},
    {"moe_ffn_hidden_size", "model.intermediate_size"},
    {"ffn_hidden_size", "model.intermediate_size"},
    {"moe_intermediate_size", "model.intermediate_size"},
    {"num_query_groups", "model.num_key_value_heads"},
    {"kv_channels", "model.head_dim"},
    {"rotary_base", "model.rope_theta"},
    {"norm_epsilon", "model.rms_norm_eps"},
    {"init_method_std", "model.initializer_range"},
    {"window_size", "model.sliding_window"},
    {"global_batch_size", "batch.global_tokens"},
    {"train_iters", "train.steps"},
    {"lr_warmup_iters", "optim.warmup_steps"},
    {"min_lr", "optim.floor_ratio"},
    {"dtype", "precision"},
    {"output_dir", "output"},
};
}  // namespace

const ConfigKey* NearestConfigKey(const std::string& name) {
  std::string last = name.substr(name.rfind('.') + 1);
  std::replace(last.begin(), last.end(), '-', '_');  // as options of a command line are written
  for (const auto& [alias, key] : kAliases) {
    if (last == alias) return FindConfigKey(key);
  }
  // A key without its group ("lr", "hidden_size") is near the full one.
  const auto distance = [&name](const ConfigKey& key) {
    const std::size_t dot = key.name.find('.');
    const int whole = EditDistance(name, key.name);
    if (dot == std::string::npos) return whole;
    return std::min(whole, EditDistance(name, key.name.substr(dot + 1)) + 1);
  };
  const auto keys = ConfigKeys();
  const ConfigKey& nearest = *std::min_element(
      keys.begin(), keys.end(),
      [&](const ConfigKey& a, const ConfigKey& b) { return distance(a) < distance(b); });
  // A third of the name is another word.
  const int near = std::max(2, static_cast<int>(name.size()) / 3);
  return distance(nearest) <= near ? &nearest : nullptr;
}

void SetConfigValue(LoadedConfig& loaded, const std::string& name, const ConfigValue& value,
                    const ConfigOrigin& origin) {
  const ConfigKey* key = FindConfigKey(name);
  if (key == nullptr && IsConfigGroup(name)) {
    CISTRON_THROW(kBadInput, "{}: {} is a group of keys; set one of them, such as {}",
                  ToString(origin), name, FirstKeyOf(name));
  }
  if (key == nullptr) {
    const ConfigKey* nearest = NearestConfigKey(name);
    CISTRON_THROW(kBadInput, "{}: there is no key '{}'{} (`cistron train --keys` lists all)",
                  ToString(origin), name,
                  nearest == nullptr ? "" : fmt::format("; did you mean '{}'?", nearest->name));
  }
  try {
    key->set(loaded.config, value);
  } catch (const Error& error) {
    const std::string range = key->range.empty() ? "" : ", " + key->range;
    throw Error(ErrorCode::kBadInput, fmt::format("{}: {}={} {} ({}{})", ToString(origin), name,
                                                  value.is_null ? "null" : value.text,
                                                  error.message(), key->type, range));
  }
  loaded.origins[name] = origin;
}

std::string DescribeConfigKeys() {
  const RunConfig defaults;
  std::string out;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string value = fmt::format("{}={}", key.name, key.get(defaults));
    const bool says_range = !key.range.empty();
    out += fmt::format("  {:<42} {}\n  {:<42}   {}{}{}\n", value, key.help, "", key.type,
                       says_range ? ", " : "", says_range ? key.range : "");
  }
  return out;
}

std::string LayoutText(const RunConfig& config) {
  std::string text;
  for (const char* key : {"parallel.dp", "parallel.ep", "parallel.shard"}) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, FindConfigKey(key)->get(config));
  }
  return text;
}

namespace {
// The same run with every `auto` replaced by what it comes to.
RunConfig WithoutAuto(const RunConfig& config) {
  RunConfig plain = config;
  plain.recipe = Resolve(config.precision, config.recipe);
  plain.optim.gradients =
      config.GradientDType() == DType::kBF16 ? OptimGradients::kBF16 : OptimGradients::kF32;
  return plain;
}
}  // namespace

std::vector<ConfigDifference> CompareConfigs(const RunConfig& saved, const RunConfig& given) {
  const RunConfig plain_saved = WithoutAuto(saved), plain_given = WithoutAuto(given);
  std::vector<ConfigDifference> differences;
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.role == KeyRole::kMechanical || key.role == KeyRole::kByContent) continue;
    std::string a = key.get(saved), b = key.get(given);
    if (a == b || key.get(plain_saved) == key.get(plain_given)) continue;
    differences.push_back({key.name, key.role, std::move(a), std::move(b)});
  }
  return differences;
}

}  // namespace cistron::train
