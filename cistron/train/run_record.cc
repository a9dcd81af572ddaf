#include "cistron/train/run_record.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cistron/base/error.h"
#include "cistron/io/file.h"
#include "cistron/io/json.h"
#include "cistron/train/run_config.h"

namespace cistron::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// A number; missing or null (how JSON writes NaN) is kMissing.
double Number(const json& object, const char* key, const std::string& origin) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return kMissing;
  if (!found->is_number()) {
    CISTRON_THROW(kBadInput, "{}: \"{}\" is {}, not a number", origin, key, found->type_name());
  }
  return found->get<double>();
}

std::vector<std::vector<double>> Matrix(const json& value, const std::string& origin,
                                        const char* key) {
  std::vector<std::vector<double>> rows;
  if (!value.is_array()) {
    CISTRON_THROW(kBadInput, "{}: \"{}\" is not an array of arrays of numbers", origin, key);
  }
  for (const json& row : value) {
    if (!row.is_array() || row.empty() || row.size() != value[0].size()) {
      CISTRON_THROW(kBadInput, "{}: rows of \"{}\" are not arrays of one length", origin, key);
    }
    auto& numbers = rows.emplace_back();
    for (const json& number : row) {
      if (!number.is_number() && !number.is_null()) {
        CISTRON_THROW(kBadInput, "{}: \"{}\" holds {}, not a number", origin, key,
                      number.type_name());
      }
      numbers.push_back(number.is_null() ? kMissing : number.get<double>());
    }
  }
  return rows;
}

// A value a layer; empty when the field is missing.
std::vector<double> Row(const json& object, const char* key, const std::string& origin) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null() || found->empty()) return {};
  return Matrix(json::array({*found}), origin, key)[0];
}

// A run of another version may have keys that this one lacks: then its data is not known.
std::optional<data::DataConfig> DataOf(const std::string& config, const std::string& origin) {
  try {
    return ParseRunConfig(config, origin, {}).config.data;
  } catch (const Error&) {
    return std::nullopt;
  }
}

json ParseObject(const std::string& text, const std::string& origin) {
  json value = io::ParseJson(text, origin);
  if (!value.is_object()) CISTRON_THROW(kBadInput, "{}: not a JSON object", origin);
  return value;
}

StepRecord ParseStep(const std::string& line, const std::string& origin) {
  const json object = ParseObject(line, origin);
  StepRecord step;
  step.step = Number(object, "step", origin);
  if (!std::isfinite(step.step)) CISTRON_THROW(kBadInput, "{}: \"step\" is missing", origin);
  const std::pair<const char*, double StepRecord::*> fields[] = {
      {"loss", &StepRecord::loss},
      {"aux_loss", &StepRecord::aux_loss},
      {"grad_norm", &StepRecord::grad_norm},
      {"lr", &StepRecord::lr},
      {"tokens_seen", &StepRecord::tokens_seen},
      {"step_ms", &StepRecord::step_ms},
      {"tokens_per_s", &StepRecord::tokens_per_s},
      {"unpadded_tokens_per_s", &StepRecord::unpadded_tokens_per_s},
      {"mfu", &StepRecord::mfu},
      {"memory_peak_bytes", &StepRecord::memory_peak_bytes},
      {"heldout_loss", &StepRecord::heldout_loss},
      {"heldout_bits_per_base", &StepRecord::heldout_bits_per_base},
      {"heldout_bases", &StepRecord::heldout_bases},
  };
  for (const auto& [key, member] : fields) step.*member = Number(object, key, origin);
  step.layer_aux_loss = Row(object, "layer_aux_loss", origin);
  step.z_loss = Row(object, "z_loss", origin);
  const auto load = object.find("expert_load");
  if (load != object.end() && !load->is_null()) {
    step.expert_load = Matrix(*load, origin, "expert_load");
  }
  return step;
}

FinalEvaluation ParseFinal(const std::string& text, const std::string& origin) {
  const json object = ParseObject(text, origin);
  return {Number(object, "heldout_loss", origin), Number(object, "heldout_bits_per_base", origin),
          Number(object, "heldout_bases", origin)};
}

ExpertBases ParseExpertBases(const std::string& text, const std::string& origin) {
  const json object = ParseObject(text, origin);
  ExpertBases result;
  const auto bases = object.find("bases"), counts = object.find("counts");
  if (bases == object.end() || !bases->is_array() || counts == object.end() ||
      !counts->is_array()) {
    CISTRON_THROW(kBadInput, "{}: \"bases\" or \"counts\" is missing", origin);
  }
  for (const json& base : *bases) {
    if (!base.is_string()) CISTRON_THROW(kBadInput, "{}: \"bases\" holds no texts", origin);
    result.bases.push_back(base.get<std::string>());
  }
  for (const json& layer : *counts) {
    result.counts.push_back(Matrix(layer, origin, "counts"));
    for (const auto& expert : result.counts.back()) {
      if (expert.size() != result.bases.size()) {
        CISTRON_THROW(kBadInput, "{}: {} counts of an expert for {} bases", origin, expert.size(),
                      result.bases.size());
      }
    }
  }
  return result;
}

std::vector<std::pair<std::string, std::string>> ParseMachine(const std::string& text,
                                                              const std::string& origin) {
  std::vector<std::pair<std::string, std::string>> entries;
  const json object = ParseObject(text, origin);
  for (const auto& [key, value] : object.items()) {
    entries.emplace_back(key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return entries;
}

// Calls `use(text, origin)` with the content of a file that may be missing.
template <class F>
void IfThere(const fs::path& path, F&& use) {
  if (fs::exists(path)) use(io::ReadFile(path), path.string());
}

}  // namespace

std::size_t RunRecord::layers() const {
  for (const StepRecord& step : steps) {
    if (!step.expert_load.empty()) return step.expert_load.size();
  }
  return 0;
}

std::size_t RunRecord::experts() const {
  for (const StepRecord& step : steps) {
    if (!step.expert_load.empty()) return step.expert_load[0].size();
  }
  return 0;
}

void ParseMetrics(const std::string& text, const std::string& origin, RunRecord& record) {
  std::size_t begin = 0;
  for (int line_number = 1; begin < text.size(); ++line_number) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const bool complete = end < text.size();
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string line_origin = fmt::format("{}:{}", origin, line_number);
    StepRecord step;
    try {
      step = ParseStep(line, line_origin);
    } catch (const Error&) {
      if (complete) throw;
      record.partial_last_line = true;
      break;
    }
    // After a crash a run starts again from its checkpoint: what follows replaces what was lost.
    while (!record.steps.empty() && record.steps.back().step >= step.step) record.steps.pop_back();
    if (record.layers() != 0 && !step.expert_load.empty() &&
        (step.expert_load.size() != record.layers() ||
         step.expert_load[0].size() != record.experts())) {
      CISTRON_THROW(kBadInput, "{}: expert_load is {}×{}, but {}×{} in earlier lines", line_origin,
                    step.expert_load.size(), step.expert_load[0].size(), record.layers(),
                    record.experts());
    }
    record.steps.push_back(std::move(step));
  }
  if (record.steps.empty()) {
    CISTRON_THROW(kBadInput, "{}: no step has been logged yet; run `cistron train` first", origin);
  }
}

RunRecord ReadRunRecord(const fs::path& directory) {
  if (!fs::is_directory(directory)) {
    CISTRON_THROW(kNotFound, "{}: no such run directory", directory.string());
  }
  const fs::path metrics = directory / "metrics.jsonl";
  if (!fs::exists(metrics)) {
    CISTRON_THROW(kNotFound, "{}: not there; give the directory that `cistron train` wrote",
                  metrics.string());
  }
  RunRecord record;
  const fs::path plain = fs::absolute(directory).lexically_normal();
  record.name = (plain.has_filename() ? plain : plain.parent_path()).filename().string();
  ParseMetrics(io::ReadFile(metrics), metrics.string(), record);
  IfThere(directory / "config.yaml", [&](std::string text, const std::string& origin) {
    record.data = DataOf(text, origin);
    record.config = std::move(text);
  });
  IfThere(directory / "profile.txt",
          [&](std::string text, const std::string&) { record.profile = std::move(text); });
  IfThere(directory / "final.json", [&](const std::string& text, const std::string& origin) {
    record.final_evaluation = ParseFinal(text, origin);
  });
  IfThere(directory / "expert_bases.json", [&](const std::string& text, const std::string& origin) {
    record.expert_bases = ParseExpertBases(text, origin);
  });
  IfThere(directory / "machine.json", [&](const std::string& text, const std::string& origin) {
    record.machine = ParseMachine(text, origin);
  });
  if (fs::exists(directory / "baseline.json")) {
    record.baseline = ReadBaseline(directory / "baseline.json");
  }
  return record;
}

}  // namespace cistron::train
