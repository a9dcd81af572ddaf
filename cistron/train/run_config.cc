// Reading and writing of configurations. yaml-cpp stands behind it and is included here alone.
#include "cistron/train/run_config.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>

#include "cistron/base/env.h"
#include "cistron/base/error.h"
#include "cistron/train/config_faults.h"
#include "cistron/train/config_schema.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

std::string ReadText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || fs::is_directory(path)) {
    CISTRON_THROW(kNotFound, "{}: the configuration cannot be opened", path.string());
  }
  return {std::istreambuf_iterator<char>(in), {}};
}

// Alone, with no tag, "~" and "null" are null; quotes make text of anything.
ConfigValue ToValue(const YAML::Node& node, const std::string& key, const ConfigOrigin& origin) {
  ConfigValue value;
  if (node.IsNull()) {
    value.is_null = true;
    return value;
  }
  if (node.IsScalar()) {
    value.text = node.Scalar();
    value.quoted = node.Tag() == "!";
    return value;
  }
  if (!node.IsSequence()) {
    CISTRON_THROW(kBadInput, "{}: {} holds a map where a value is needed", ToString(origin), key);
  }
  value.is_list = true;
  for (const YAML::Node& item : node) {
    if (!item.IsScalar()) {
      CISTRON_THROW(kBadInput, "{}: {} holds a list whose elements are not plain values",
                    ToString(origin), key);
    }
    value.items.push_back(item.Scalar());
  }
  value.text = fmt::format("[{}]", fmt::join(value.items, ", "));
  return value;
}

// What is read of a preset, and what is wrong with it.
struct Reading {
  const std::string& file;
  LoadedConfig& loaded;
  ConfigFaults& faults;
  std::set<std::string> seen = {};
};

void ReadMap(const YAML::Node& map, const std::string& prefix, Reading& reading);

void ReadEntry(const YAML::Node& key, const YAML::Node& value, const std::string& prefix,
               Reading& reading) {
  const ConfigOrigin origin{reading.file, key.Mark().line + 1};
  if (!key.IsScalar()) {
    CISTRON_THROW(kBadInput, "{}: a key must be a plain name", ToString(origin));
  }
  const std::string name = prefix + key.Scalar();
  if (value.IsMap() && IsConfigGroup(name)) return ReadMap(value, name + ".", reading);
  if (value.IsMap() && FindConfigKey(name) == nullptr) {
    CISTRON_THROW(kBadInput,
                  "{}: there is no group of keys '{}'; the nearest is '{}' (`cistron train "
                  "--keys` lists all)",
                  ToString(origin), name, NearestConfigGroup(name));
  }
  if (!reading.seen.insert(name).second) {
    CISTRON_THROW(kBadInput, "{}: {} is given twice in this file", ToString(origin), name);
  }
  if (IsConfigGroup(name) && !value.IsNull()) {
    CISTRON_THROW(kBadInput, "{}: {} is a group of keys; write its keys below it, indented",
                  ToString(origin), name);
  }
  if (IsConfigGroup(name)) return;
  SetConfigValue(reading.loaded, name, ToValue(value, name, origin), origin);
}

void ReadMap(const YAML::Node& map, const std::string& prefix, Reading& reading) {
  for (const auto& entry : map) {
    reading.faults.Check([&] { ReadEntry(entry.first, entry.second, prefix, reading); });
  }
}

int LineOf(const YAML::Mark& mark) {
  return mark.is_null() ? 1 : mark.line + 1;
}

YAML::Node ParseYaml(const std::string& text, const std::string& name) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      CISTRON_THROW(kBadInput,
                    "{}:{}: a second document begins here; a configuration is one: remove the "
                    "`---` before it",
                    name, LineOf(documents[1].Mark()));
    }
    return documents.empty() ? YAML::Node() : documents[0];
  } catch (const YAML::Exception& error) {
    const int line = LineOf(error.mark);
    CISTRON_THROW(kBadInput, "{}:{}: this is not YAML: {}", name, line, error.msg);
  }
}

void ApplyOverride(const std::string& text, LoadedConfig& loaded) {
  const ConfigOrigin origin{"the command line", 0};
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    CISTRON_THROW(kBadInput, "the command line: '{}' is not of the form key=value{}", text,
                  FindConfigKey(text) ? "; write " + text + "=VALUE" : std::string());
  }
  const std::string key = text.substr(0, equals), written = text.substr(equals + 1);
  // Only null, lists and quoted texts need YAML; everything else is the text itself, so that a
  // path may hold any character.
  ConfigValue value;
  if (written == "null" || written == "~") {
    value.is_null = true;
  } else if (!written.empty() && (written[0] == '[' || written[0] == '"' || written[0] == '\'')) {
    try {
      value = ToValue(YAML::Load(written), key, origin);
    } catch (const YAML::Exception& error) {
      CISTRON_THROW(kBadInput, "the command line: the value of {} cannot be read: {}", text,
                    error.msg);
    }
  } else {
    value.text = written;
  }
  SetConfigValue(loaded, key, value, origin);
}

std::vector<fs::path> Presets(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (fs::directory_iterator it(folder, ignored), end; it != end; it.increment(ignored)) {
    if (it->path().extension() == ".yaml") files.push_back(it->path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::string ToString(const ConfigOrigin& origin) {
  return origin.line > 0 ? fmt::format("{}:{}", origin.file, origin.line) : origin.file;
}

std::string LoadedConfig::Where(const std::string& key) const {
  const auto it = origins.find(key);
  return it == origins.end() ? key : fmt::format("{} ({})", key, ToString(it->second));
}

LoadedConfig ParseRunConfig(const std::string& yaml, const std::string& name,
                            const std::vector<std::string>& overrides) {
  LoadedConfig loaded;
  ConfigFaults faults;
  const YAML::Node root = ParseYaml(yaml, name);
  if (root.IsMap()) {
    Reading reading{name, loaded, faults};
    ReadMap(root, "", reading);
  } else if (!root.IsNull()) {
    CISTRON_THROW(kBadInput, "{}:{}: a configuration is a list of `key: value` lines", name,
                  LineOf(root.Mark()));
  }
  for (const std::string& text : overrides) {
    faults.Check([&] { ApplyOverride(text, loaded); });
  }
  faults.Throw();
  return loaded;
}

LoadedConfig LoadRunConfig(const fs::path& yaml_file, const std::vector<std::string>& overrides) {
  const std::string text = yaml_file.empty() ? std::string() : ReadText(yaml_file);
  return ParseRunConfig(text, yaml_file.string(), overrides);
}

std::vector<fs::path> PresetFolders() {
  std::vector<fs::path> folders;
  if (const auto path = GetEnv("CISTRON_CONFIG_PATH")) {
    std::size_t begin = 0;
    while (begin <= path->size()) {
      const std::size_t end = std::min(path->find(':', begin), path->size());
      if (end > begin) folders.emplace_back(path->substr(begin, end - begin));
      begin = end + 1;
    }
  }
  folders.emplace_back("configs");
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  if (!program.empty()) {
    // PREFIX/bin/cistron of an installation.
    folders.push_back(program.parent_path().parent_path() / "share/cistron/configs");
  }
  folders.emplace_back(CISTRON_SOURCE_CONFIGS);
  return folders;
}

fs::path FindPreset(const std::string& name) {
  std::error_code ignored;
  if (fs::is_regular_file(name, ignored)) return name;
  std::string sought, known;
  std::set<fs::path> seen;
  for (const fs::path& folder : PresetFolders()) {
    const fs::path file = folder / (name + ".yaml");
    if (fs::is_regular_file(file, ignored)) return file;
    if (!seen.insert(fs::weakly_canonical(folder, ignored)).second) continue;
    sought += "\n  " + folder.string();
    for (const fs::path& preset : Presets(folder)) known += " " + preset.stem().string();
  }
  CISTRON_THROW(kNotFound,
                "there is no preset '{}', nor a file of that name; known presets:{}; "
                "sought in{}",
                name, known.empty() ? " none" : known, sought);
}

void ResolveDataPaths(LoadedConfig& loaded, const fs::path& preset) {
  std::error_code ignored;
  const fs::path folder = fs::absolute(preset, ignored).parent_path();
  // The places tried when there is no such file, else empty.
  const auto resolve = [&](fs::path& path) {
    std::vector<fs::path> places = {fs::absolute(path)};
    if (path.is_relative() && !preset.empty()) {
      places.insert(places.end(), {folder / path, folder.parent_path() / path});
    }
    std::string tried;
    for (const fs::path& place : places) {
      if (fs::exists(place, ignored)) {
        path = fs::weakly_canonical(place);
        return std::string();
      }
      const std::string line = "\n  " + place.lexically_normal().string();
      if (tried.find(line) == std::string::npos) tried += line;  // two places may be one
    }
    path = fs::weakly_canonical(places[0]);
    return tried;
  };
  const auto resolve_all = [&](const char* key, std::vector<data::FileSpec>& files) {
    for (data::FileSpec& file : files) {
      loaded.data_faults.Check([&] {
        const std::string name = file.path.string(), tried = resolve(file.path);
        if (tried.empty()) return;
        CISTRON_THROW(kNotFound, "{}: {}: there is no such file; sought as{}", key, name, tried);
      });
    }
  };
  RunConfig& config = loaded.config;
  resolve_all("data.train", config.data.train);
  resolve_all("data.heldout", config.data.heldout);
  if (!config.init.from.empty()) resolve(config.init.from);
}

LoadedConfig LoadRun(const std::string& preset, const std::vector<std::string>& overrides) {
  const fs::path file = preset.empty() ? fs::path() : FindPreset(preset);
  LoadedConfig loaded = LoadRunConfig(file, overrides);
  ResolveDataPaths(loaded, file);
  ResolveInit(loaded);
  return loaded;
}

data::DataConfig DataOf(const RunConfig& config) {
  data::DataConfig data = config.data;
  for (std::size_t i = 0; i < config.data_weights.size(); ++i) {
    data.train[i].weight = config.data_weights[i];
  }
  return data;
}

DType GradientDType(Precision precision, OptimStates states, OptimGradients gradients,
                    bool whole_batch) {
  const bool narrow = gradients == OptimGradients::kAuto
                          ? states == OptimStates::kBF16 && whole_batch
                          : gradients == OptimGradients::kBF16;
  const DType model = ModelDType(precision);
  return narrow ? model : ComputeType(model);
}

std::string GradientText(DType gradients, bool one_micro_batch) {
  if (gradients != DType::kBF16) return {};
  return fmt::format("gradients of matrices in bf16{}",
                     one_micro_batch ? "" : ", rounded at every micro-batch");
}

std::string RunConfig::WhyRowsByHost() const {
  if (parallel.ep_by_host) return "parallel.ep_sync=host";
  const quant::Recipe r = MakeRecipe(precision, recipe);
  if (!quant::Quantizes(r)) return {};
  return fmt::format("{} keeps state on the host, and no step of it can be made again",
                     quant::Name(r));
}

std::string ToYaml(const RunConfig& config) {
  std::string out, group;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::size_t dot = key.name.find('.');
    if (dot == std::string::npos) {
      out += fmt::format("{}: {}\n", key.name, key.get(config));
      continue;
    }
    const std::string prefix = key.name.substr(0, dot);
    if (prefix != group) out += fmt::format("{}:\n", prefix);
    group = prefix;
    out += fmt::format("  {}: {}\n", key.name.substr(dot + 1), key.get(config));
  }
  return out;
}

}  // namespace cistron::train
