// The table of configuration keys. Parsing, `--help`, errors, the saved YAML and the comparison of
// two configurations all derive from it; a new key is one line of config_schema.cc.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cistron/train/run_config.h"

namespace cistron::train {

// A value as written: a scalar or a list of scalars.
struct ConfigValue {
  bool is_list = false;
  bool is_null = false;
  bool quoted = false;             // in quotes: text, even if it looks like a number
  std::string text;                // scalar; for a list, as shown in errors
  std::vector<std::string> items;  // elements of a list
};

// What a resumed run may do with a value that differs from the saved one.
enum class KeyRole {
  kIdentity,    // part of what the saved state means: it must be the same
  kTunable,     // run.on_exists=resume may change it
  kByContent,   // names files whose content the state remembers (Corpus::fingerprint): the names
                // are not compared, so that a run and its data may move
  kMechanical,  // does not decide what is computed: never compared
};

struct ConfigKey {
  std::string name;
  std::string type;   // "integer", "number", "boolean", "text", "path", "a|b|c", "list of …"
  std::string range;  // "≥ 1"; empty when any value of the type is legal
  std::string help;
  KeyRole role;
  // Throws kBadInput with what is wrong with the value alone; the caller adds key, file and line.
  std::function<void(RunConfig&, const ConfigValue&)> set;
  // The value as YAML.
  std::function<std::string(const RunConfig&)> get;
};

std::span<const ConfigKey> ConfigKeys();
// Null when there is no such key.
const ConfigKey* FindConfigKey(const std::string& name);
// Whether keys begin with this name and a dot.
bool IsConfigGroup(const std::string& name);
// The group with the smallest edit distance.
std::string NearestConfigGroup(const std::string& name);
// The key that a wrong name most likely means: what other programs call so, or the nearest by edit
// distance; null when none is near.
const ConfigKey* NearestConfigKey(const std::string& name);

// Sets a key; errors carry key, value and origin.
void SetConfigValue(LoadedConfig& loaded, const std::string& key, const ConfigValue& value,
                    const ConfigOrigin& origin);

// A table of all keys with type, default, range and help, for `--help`.
std::string DescribeConfigKeys();

// "parallel.dp=1 parallel.ep=2 parallel.shard=none"
std::string LayoutText(const RunConfig& config);

struct ConfigDifference {
  std::string key;
  KeyRole role;
  std::string saved, given;  // as YAML
};
// Keys whose values differ; mechanical ones and those compared by content are left out, as is an
// `auto` that comes to the other's value.
std::vector<ConfigDifference> CompareConfigs(const RunConfig& saved, const RunConfig& given);

}  // namespace cistron::train
