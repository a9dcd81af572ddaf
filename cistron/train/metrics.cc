#include "cistron/train/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cistron/base/error.h"
#include "cistron/io/file.h"

namespace cistron::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// Lines that end; what follows the last newline was cut short by a crash.
std::vector<std::string> CompleteLines(const fs::path& file) {
  std::vector<std::string> lines;
  if (!fs::exists(file)) return lines;
  const std::string text = io::ReadFile(file);
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (end > begin) lines.push_back(text.substr(begin, end - begin));
  }
  return lines;
}

void PutHeldout(const std::optional<HeldoutMetrics>& heldout, nlohmann::ordered_json& j) {
  if (!heldout) return;
  j["heldout_loss"] = heldout->loss;
  j["heldout_bits_per_base"] = heldout->bits_per_base;
  j["heldout_bases"] = heldout->bases;
}

std::optional<HeldoutMetrics> HeldoutOf(const json& j) {
  if (!j.contains("heldout_loss")) return std::nullopt;
  return HeldoutMetrics{j.at("heldout_loss"), j.at("heldout_bits_per_base"), j.at("heldout_bases")};
}

}  // namespace

std::string ToJson(const StepMetrics& m) {
  nlohmann::ordered_json j;
  j["step"] = m.step;
  j["tokens_seen"] = m.tokens_seen;
  j["loss"] = m.loss;
  j["aux_loss"] = m.aux_loss;
  j["grad_norm"] = m.grad_norm;
  j["lr"] = m.lr;
  j["step_ms"] = m.step_ms;
  j["tokens_per_s"] = m.tokens_per_s;
  j["unpadded_tokens_per_s"] = m.unpadded_tokens_per_s;
  j["flops_per_s"] = m.flops_per_s;
  j["mfu"] = m.mfu ? nlohmann::ordered_json(*m.mfu) : nlohmann::ordered_json(nullptr);
  j["memory_peak_bytes"] = m.memory_peak_bytes;
  if (m.redone > 0) j["redone"] = m.redone;
  if (!m.layer_aux_loss.empty()) j["layer_aux_loss"] = m.layer_aux_loss;
  if (!m.z_loss.empty()) j["z_loss"] = m.z_loss;
  j["load_entropy"] = m.load_entropy;
  j["expert_load"] = m.expert_load;
  PutHeldout(m.heldout, j);
  return j.dump();
}

StepMetrics ParseStepMetrics(const std::string& line, const std::string& where) {
  try {
    const json j = json::parse(line);
    StepMetrics m;
    m.step = j.at("step");
    m.tokens_seen = j.at("tokens_seen");
    m.loss = j.at("loss");
    m.aux_loss = j.at("aux_loss");
    m.grad_norm = j.at("grad_norm");
    m.lr = j.at("lr");
    m.step_ms = j.at("step_ms");
    m.tokens_per_s = j.at("tokens_per_s");
    m.unpadded_tokens_per_s = j.at("unpadded_tokens_per_s");
    m.flops_per_s = j.value("flops_per_s", 0.0);  // runs of earlier versions lack it
    if (!j.at("mfu").is_null()) m.mfu = j.at("mfu").get<double>();
    m.memory_peak_bytes = j.at("memory_peak_bytes");
    m.redone = j.value("redone", 0);
    if (j.contains("layer_aux_loss")) {
      m.layer_aux_loss = j.at("layer_aux_loss").get<std::vector<double>>();
    }
    if (j.contains("z_loss")) m.z_loss = j.at("z_loss").get<std::vector<double>>();
    m.load_entropy = j.at("load_entropy").get<std::vector<double>>();
    m.expert_load = j.at("expert_load").get<std::vector<std::vector<double>>>();
    m.heldout = HeldoutOf(j);
    return m;
  } catch (const json::exception& error) {
    CISTRON_THROW(kBadInput, "{}: this is not a line of metrics: {}", where, error.what());
  }
}

std::vector<StepMetrics> ReadMetrics(const fs::path& file) {
  std::vector<StepMetrics> metrics;
  for (const std::string& line : CompleteLines(file)) {
    metrics.push_back(
        ParseStepMetrics(line, fmt::format("{}:{}", file.string(), metrics.size() + 1)));
  }
  return metrics;
}

void SetExpertLoad(const std::vector<std::vector<std::int64_t>>& counts, StepMetrics& metrics) {
  metrics.expert_load.clear();
  metrics.load_entropy.clear();
  for (const auto& layer : counts) {
    double total = 0;
    for (const std::int64_t n : layer) total += static_cast<double>(n);
    std::vector<double> load;
    double entropy = 0;
    for (const std::int64_t n : layer) {
      const double share = total > 0 ? static_cast<double>(n) / total : 0;
      if (share > 0) entropy -= share * std::log(share);
      load.push_back(share);
    }
    const double largest = std::log(static_cast<double>(layer.size()));
    metrics.load_entropy.push_back(largest > 0 ? entropy / largest : 1.0);
    metrics.expert_load.push_back(std::move(load));
  }
}

IdleExperts CountIdleExperts(const std::vector<ExpertLoad>& steps) {
  IdleExperts result;
  if (steps.empty()) return result;
  const std::size_t begin = steps.size() - std::min(steps.size(), kIdleSteps);
  ExpertLoad sum = steps.back();
  for (auto& layer : sum) std::fill(layer.begin(), layer.end(), 0.0);
  for (std::size_t i = begin; i < steps.size(); ++i) {
    if (steps[i].size() != sum.size()) continue;
    ++result.steps;
    for (std::size_t l = 0; l < sum.size(); ++l) {
      for (std::size_t e = 0; e < sum[l].size(); ++e) sum[l][e] += steps[i][l].at(e);
    }
  }
  for (const auto& layer : sum) {
    const double all = std::accumulate(layer.begin(), layer.end(), 0.0);
    const auto experts = static_cast<double>(layer.size());
    result.experts = static_cast<std::int64_t>(layer.size());
    result.all += result.experts;
    result.idle += std::count_if(layer.begin(), layer.end(),
                                 [&](double share) { return share < kIdleShare / experts * all; });
  }
  return result;
}

std::string Describe(const IdleExperts& idle) {
  const std::string share = fmt::format(
      "{:.2g}% of its layer's assignments (last {} steps)",
      100 * kIdleShare / static_cast<double>(std::max<std::int64_t>(1, idle.experts)), idle.steps);
  if (idle.idle == 0)
    return fmt::format("none of {} experts is idle: each gets at least {}", idle.all, share);
  return fmt::format("{} of {} experts {} idle: {} gets less than {}", idle.idle, idle.all,
                     idle.idle == 1 ? "is" : "are", idle.idle == 1 ? "it" : "each", share);
}

void WriteSummary(const fs::path& file, const RunSummary& summary) {
  nlohmann::ordered_json j;
  j["steps"] = summary.steps;
  j["tokens"] = summary.tokens;
  j["parameters"] = summary.parameters;
  j["active_parameters"] = summary.active_parameters;
  j["train_seconds"] = summary.train_seconds;
  j["weights_checksum"] = summary.weights_checksum;
  PutHeldout(summary.heldout, j);
  io::WriteFileAtomically(file, j.dump(2) + "\n");
}

std::optional<RunSummary> ReadSummary(const fs::path& file) {
  if (!fs::exists(file)) return std::nullopt;
  try {
    const json j = json::parse(io::ReadFile(file));
    RunSummary summary;
    summary.steps = j.at("steps");
    summary.tokens = j.at("tokens");
    summary.parameters = j.at("parameters");
    summary.active_parameters = j.at("active_parameters");
    summary.train_seconds = j.at("train_seconds");
    summary.weights_checksum = j.value("weights_checksum", "");  // earlier versions made none
    summary.heldout = HeldoutOf(j);
    return summary;
  } catch (const json::exception& error) {
    CISTRON_THROW(kBadInput, "{}: this is not the summary of a run: {}", file.string(),
                  error.what());
  }
}

struct MetricsWriter::State {
  fs::path path;
  std::FILE* file = nullptr;
  long last_begin = 0;  // where the last line starts
  std::optional<StepMetrics> last;

  void WriteLine(const StepMetrics& metrics) {
    const std::string line = ToJson(metrics) + '\n';
    if (std::fseek(file, last_begin, SEEK_SET) != 0 ||
        std::fwrite(line.data(), 1, line.size(), file) != line.size() || std::fflush(file) != 0) {
      CISTRON_THROW(kIo, "{}: cannot be written: {}", path.string(), std::strerror(errno));
    }
    last = metrics;
  }
};

MetricsWriter::MetricsWriter(const fs::path& file, std::int64_t last_step)
    : state_(std::make_unique<State>()) {
  state_->path = file;
  std::string kept;
  for (const std::string& line : last_step > 0 ? CompleteLines(file) : std::vector<std::string>()) {
    StepMetrics metrics = ParseStepMetrics(line, file.string());
    if (metrics.step > last_step) break;
    state_->last = std::move(metrics);
    state_->last_begin = static_cast<long>(kept.size());
    kept += line + '\n';
  }
  io::WriteFileAtomically(file, kept);
  state_->file = std::fopen(file.c_str(), "r+b");
  if (state_->file == nullptr) {
    CISTRON_THROW(kIo, "{}: cannot be opened: {}", file.string(), std::strerror(errno));
  }
}

MetricsWriter::~MetricsWriter() {
  if (state_->file != nullptr) std::fclose(state_->file);
}

void MetricsWriter::Write(const StepMetrics& metrics) {
  if (std::fseek(state_->file, 0, SEEK_END) != 0) {
    CISTRON_THROW(kIo, "{}: cannot be written: {}", state_->path.string(), std::strerror(errno));
  }
  state_->last_begin = std::ftell(state_->file);
  state_->WriteLine(metrics);
}

void MetricsWriter::AddHeldout(const StepMetrics& metrics) {
  const auto& last = state_->last;
  // The line only grows: nothing of the old one is left behind it.
  if (last && last->step == metrics.step && !last->heldout) state_->WriteLine(metrics);
}

const std::optional<StepMetrics>& MetricsWriter::last() const {
  return state_->last;
}

}  // namespace cistron::train
