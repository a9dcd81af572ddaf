// cistron plan: the memory of a training step, before it is run.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "apps/cistron/commands.h"
#include "cistron/base/error.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/bench_step.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/memory_plan.h"
#include "cistron/train/progress.h"

namespace cistron::app {
namespace {

// As the driver shows it, MiB.
struct KnownDevice {
  std::string_view name;
  std::int64_t mib;
};
constexpr std::array kDevices = {KnownDevice{"A100", 81920}, KnownDevice{"H100", 81559},
                                 KnownDevice{"H200", 143771}, KnownDevice{"B200", 183359}};

class PlanCommand final : public Command {
 public:
  std::string name() const override { return "plan"; }
  std::string summary() const override { return "the memory that a training step will need"; }
  std::string footer() const override {
    return "Of one rank. Needs neither the data nor the device of the run. Memory is that of the "
           "GPU that is here,\nelse of cluster=1xH200 (A100, H100, H200, B200) or "
           "plan.memory_gib=N. Exit status 2: it does not fit.\n"
           "Examples:\n"
           "  cistron plan --config-name L0_sanity\n"
           "  cistron plan --config-name ecoli_2min batch.micro_tokens=65536 cluster=1xH100\n"
           "  cistron plan --model 8x7b_2layers --precision bf16 --device cuda plan.memory_gib=80";
  }
  void Declare(Options& options) override {
    options.Option("--config-name", config_name_,
                   "preset of configs/ (or of $CISTRON_CONFIG_PATH), or a path to a YAML file");
    options.Option("--model", model_, "a shape of `cistron bench` in place of a configuration");
    options.Choice("--precision", precision_,
                   {"fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"},
                   "of --model");
    options.Choice("--device", device_, {"cpu", "cuda"}, "of --model");
    options.Choice("--recompute", recompute_, {"none", "moe", "layer"}, "of --model");
    options.Choice("--states", states_, {"fp32", "bf16"},
                   "of --model: AdamW's; bf16 has no masters");
    options.Option("--micro-rows", micro_rows_, "of --model: sequences at once; 0: the batch");
    options.Positional("overrides", overrides_, "key=value, over the preset", false);
  }

  int Run() override {
    TakeOwnKeys();
    const train::MemoryProblem problem = model_.empty() ? OfConfig() : OfShape();
    if (memory_ == 0) Memory(problem.device);
    const train::MemoryPlan plan = train::PlanMemory(problem);
    fmt::print("model: {} parameters; {} tokens a micro-batch of {} a step\n",
               train::FormatCount(static_cast<double>(model::ParameterCount(problem.model))),
               problem.tokens, global_tokens_);
    for (int k = 0; k < train::kMemoryKinds; ++k) {
      const auto kind = static_cast<train::MemoryKind>(k);
      fmt::print("  {:<12} {:>10}  {}\n", train::Name(kind), train::BytesText(plan.Of(kind)),
                 Parts(plan, kind));
    }
    fmt::print("  {:<12} {:>10}  in {}\n", "peak", train::BytesText(plan.peak_bytes), plan.where);
    return Verdict(problem, plan);
  }

 private:
  static std::string Parts(const train::MemoryPlan& plan, train::MemoryKind kind) {
    std::string text;
    int shown = 0;
    for (const train::MemoryTerm& t : plan.terms) {
      if (t.kind != kind || shown++ >= 3) continue;
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", t.name, train::BytesText(t.bytes));
    }
    return text;
  }

  int Verdict(const train::MemoryProblem& problem, const train::MemoryPlan& plan) const {
    if (memory_ == 0) {
      fmt::print("no GPU is here to compare with; give plan.memory_gib=N or cluster=1xH200\n");
      return kOk;
    }
    const bool gpu = problem.device == DeviceType::kCuda;
    const std::int64_t room = memory_ - (gpu ? train::kDeviceReserve : 0);
    const std::string reserve = gpu ? fmt::format(", of which {} are the device's own",
                                                  train::BytesText(train::kDeviceReserve))
                                    : std::string();
    if (plan.peak_bytes <= room) {
      fmt::print("fits: {:.0f}% of {} ({}{})\n",
                 100 * static_cast<double>(plan.peak_bytes) / static_cast<double>(room),
                 train::BytesText(memory_), where_, reserve);
      return kOk;
    }
    fmt::print("does not fit: {} are more than {} ({}{})\nlargest: {}\n{}\n",
               train::BytesText(plan.peak_bytes), train::BytesText(memory_), where_, reserve,
               train::LargestTerms(plan, 3), train::AdviceToFit(problem, room));
    return kBadUsage;
  }

  // plan.memory_gib and cluster are keys of this verb alone.
  void TakeOwnKeys() {
    std::erase_if(overrides_, [&](const std::string& text) {
      const std::size_t equals = text.find('=');
      const std::string key = text.substr(0, equals),
                        value = text.substr(std::min(equals, text.size() - 1) + 1);
      if (key == "plan.memory_gib") {
        memory_ = static_cast<std::int64_t>(Number(key, value) * 0x1p30);
        where_ = text;
        return true;
      }
      if (key != "cluster") return false;
      const std::size_t x = value.find('x');
      const auto known = std::find_if(kDevices.begin(), kDevices.end(), [&](const KnownDevice& d) {
        return x != std::string::npos && value.substr(x + 1) == d.name;
      });
      if (known == kDevices.end()) {
        CISTRON_THROW(kBadInput,
                      "{}: the cluster is NxDEVICE with one of A100, H100, H200, B200; "
                      "for another device give plan.memory_gib=N",
                      text);
      }
      if (value.substr(0, x) != "1") {
        CISTRON_THROW(kUnsupported, "{}: this version plans one GPU; give cluster=1x{}", text,
                      known->name);
      }
      memory_ = known->mib << 20;
      where_ = text;
      return true;
    });
  }
  static double Number(const std::string& key, const std::string& value) {
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(number > 0) || number > 1e6) {
      CISTRON_THROW(kBadInput, "{}={} is not a number of GiB greater than 0", key, value);
    }
    return number;
  }

  void Memory(DeviceType device) {
    memory_ = train::MemoryOf(device);
    where_ = device == DeviceType::kCpu ? "this machine" : "this GPU";
    const auto devices =
        device == DeviceType::kCpu ? std::vector<cuda::DeviceInfo>() : cuda::Devices();
    if (!devices.empty()) where_ = devices.front().name;
  }

  train::MemoryProblem OfConfig() {
    const auto preset =
        config_name_.empty() ? std::filesystem::path() : train::FindPreset(config_name_);
    train::LoadedConfig loaded = train::LoadRunConfig(preset, overrides_);
    train::ResolveInit(loaded);
    train::CheckStep(loaded);
    global_tokens_ = loaded.config.batch.global_tokens;
    return train::MemoryProblemOf(loaded.config);
  }
  train::MemoryProblem OfShape() {
    if (!overrides_.empty()) {
      CISTRON_THROW(kBadInput, "{}: keys are those of a configuration; --model takes options",
                    overrides_.front());
    }
    const train::BenchShape shape = train::NamedBenchShape(model_);
    global_tokens_ = shape.batch * shape.sequence;
    return train::MemoryProblemOf(
        shape,
        {.precision = train::ParsePrecision(precision_),
         .micro_rows = micro_rows_,
         .recompute = train::ParseRecompute(recompute_),
         .states = states_ == "bf16" ? train::OptimStates::kBF16 : train::OptimStates::kF32},
        device_ == "cuda" ? DeviceType::kCuda : DeviceType::kCpu);
  }

  std::string config_name_, model_, precision_ = "fp32", device_ = "cpu", recompute_ = "none",
                                    states_ = "fp32";
  std::int64_t micro_rows_ = 0, global_tokens_ = 0, memory_ = 0;
  std::string where_;
  std::vector<std::string> overrides_;
};

}  // namespace

std::unique_ptr<Command> MakePlanCommand() {
  return std::make_unique<PlanCommand>();
}

}  // namespace cistron::app
