// What is made of the table of configuration keys: look-up, help, comparison.
#include <fmt/format.h>

#include <algorithm>
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

const ConfigKey& NearestConfigKey(const std::string& name) {
  // A key without its group ("lr", "hidden_size") is near the full one.
  const auto distance = [&name](const ConfigKey& key) {
    const std::size_t dot = key.name.find('.');
    const int whole = EditDistance(name, key.name);
    if (dot == std::string::npos) return whole;
    return std::min(whole, EditDistance(name, key.name.substr(dot + 1)) + 1);
  };
  const auto keys = ConfigKeys();
  return *std::min_element(keys.begin(), keys.end(), [&](const ConfigKey& a, const ConfigKey& b) {
    return distance(a) < distance(b);
  });
}

void SetConfigValue(LoadedConfig& loaded, const std::string& name, const ConfigValue& value,
                    const ConfigOrigin& origin) {
  const ConfigKey* key = FindConfigKey(name);
  if (key == nullptr && IsConfigGroup(name)) {
    CISTRON_THROW(kBadInput, "{}: {} is a group of keys; set one of them, such as {}",
                  ToString(origin), name, FirstKeyOf(name));
  }
  if (key == nullptr) {
    CISTRON_THROW(kBadInput,
                  "{}: there is no key '{}'; the nearest is '{}' (`cistron train --keys` "
                  "lists all)",
                  ToString(origin), name, NearestConfigKey(name).name);
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
    const bool says_range = !key.range.empty() && key.type != "boolean";
    out += fmt::format("  {:<42} {}\n  {:<42}   {}{}{}\n", value, key.help, "", key.type,
                       says_range ? ", " : "", says_range ? key.range : "");
  }
  return out;
}

std::vector<ConfigDifference> CompareConfigs(const RunConfig& saved, const RunConfig& given) {
  std::vector<ConfigDifference> differences;
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.role == KeyRole::kMechanical || key.role == KeyRole::kByContent) continue;
    std::string a = key.get(saved), b = key.get(given);
    if (a != b) differences.push_back({key.name, key.role, std::move(a), std::move(b)});
  }
  return differences;
}

}  // namespace cistron::train
