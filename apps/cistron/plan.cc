// cistron plan: memory, traffic and time of a training step, before it is run.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "apps/cistron/commands.h"
#include "apps/cistron/plan_report.h"
#include "cistron/base/error.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/bench_step.h"
#include "cistron/train/cluster.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/memory_plan.h"
#include "cistron/train/progress.h"
#include "cistron/train/step_plan.h"

namespace cistron::app {
namespace {

class PlanCommand final : public Command {
 public:
  std::string name() const override { return "plan"; }
  std::string summary() const override {
    return "what a training step will need: memory, traffic, time, on one GPU or many";
  }
  std::string footer() const override {
    return "Needs neither the data nor the device of the run. Without cluster=: the memory of one "
           "rank "
           "beside that of\nthe GPU that is here, or of plan.memory_gib=N. cluster=8xH200 (A100, "
           "H100, "
           "H200, B200, or a YAML file) adds what\nGPUs send, the time of a step, and every layout "
           "of ranks, best first. plan.ep_buffer_factor=F: room for F\ntimes as many rows as a "
           "GPU sends, in place of parallel.ep_buffer_factor. Exit status 2: it does not fit.\n"
           "Examples:\n"
           "  cistron plan --config-name L0_sanity\n"
           "  cistron plan --config-name L1_8x7B_ep cluster=8xH200\n"
           "  cistron plan --config-name ecoli_2min batch.micro_tokens=16384 cluster=1xH100\n"
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
    options.Choice("--gradients", gradients_, {"auto", "fp32", "bf16"},
                   "of --model: as optim.gradients");
    options.Option("--micro-rows", micro_rows_, "of --model: sequences at once; 0: the batch");
    options.Flag("--simulate", simulate_,
                 "with cluster=: also send a step's messages one by one, with random routing");
    options.Flag("--json", json_,
                 "with cluster=: the table of layouts as one line of JSON, no more");
    options.Positional("overrides", overrides_, "key=value, over the preset", false);
  }

  int Run() override {
    TakeOwnKeys();
    train::StepProblem problem = model_.empty() ? OfConfig() : OfShape();
    if (cluster_) {
      if (ep_buffer_factor_) problem.memory.row_capacity = *ep_buffer_factor_;
      if (json_) {
        fmt::print("{}\n", LayoutsJson(problem, *cluster_));
        return kOk;
      }
      return ReportCluster(problem, *cluster_, simulate_);
    }
    if (json_) CISTRON_THROW(kBadInput, "--json: name the cluster, as cluster=8xH200");
    if (ep_buffer_factor_) {
      CISTRON_THROW(kBadInput,
                    "plan.ep_buffer_factor: name the cluster, as cluster=8xH200; of a "
                    "configuration give parallel.ep_buffer_factor");
    }
    if (simulate_) CISTRON_THROW(kBadInput, "--simulate: name the cluster, as cluster=8xH200");
    if (memory_ == 0) Memory(problem.memory.device);
    const train::MemoryPlan plan = train::PlanMemory(problem.memory);
    fmt::print("model: {} parameters; {} tokens a micro-batch of {} a step\n",
               train::FormatCount(static_cast<double>(model::ParameterCount(problem.memory.model))),
               problem.memory.tokens, problem.GlobalTokens());
    PrintMemory(problem.memory, plan);
    return Verdict(problem.memory, plan);
  }

 private:
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
    if (!model_.empty()) {
      fmt::print(
          "(keys of a configuration; beside --model: --recompute, --micro-rows, --states, "
          "--gradients)\n");
    }
    return kBadUsage;
  }

  // Keys of this verb alone.
  void TakeOwnKeys() {
    std::erase_if(overrides_, [&](const std::string& text) {
      const std::size_t equals = text.find('=');
      const std::string key = text.substr(0, equals),
                        value = text.substr(std::min(equals, text.size() - 1) + 1);
      if (key == "plan.memory_gib") {
        memory_ = static_cast<std::int64_t>(Number(key, value, 0, "of GiB") * 0x1p30);
        where_ = text;
      } else if (key == "plan.ep_buffer_factor") {
        ep_buffer_factor_ = Number(key, value, 1, "");
      } else if (key == "cluster") {
        cluster_ = train::FindCluster(value);
      } else {
        return false;
      }
      return true;
    });
    if (cluster_ && memory_ > 0) cluster_->memory_bytes = memory_;
  }
  static double Number(const std::string& key, const std::string& value, double least,
                       const char* what) {
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(number > 0) || number < least || number > 1e6) {
      CISTRON_THROW(kBadInput, "{}={} is not a number {}{}{} {}", key, value, what,
                    *what == '\0' ? "" : " ", least > 0 ? "of at least" : "greater than", least);
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

  // Options of a shape would be passed over beside a configuration, which has keys for them.
  void RefuseOptionsOfShapes() const {
    const struct {
      const char *option, *key;
      bool given;
    } options[] = {{"--precision", "precision", precision_ != "fp32"},
                   {"--device", "device", device_ != "cpu"},
                   {"--recompute", "recompute", recompute_ != "none"},
                   {"--states", "optim.states", states_ != "fp32"},
                   {"--gradients", "optim.gradients", gradients_ != "auto"},
                   {"--micro-rows", "batch.micro_tokens", micro_rows_ != 0}};
    for (const auto& o : options) {
      if (!o.given) continue;
      CISTRON_THROW(kBadInput, "{}: belongs to --model; of a configuration give the key {}=…",
                    o.option, o.key);
    }
  }

  train::StepProblem OfConfig() {
    RefuseOptionsOfShapes();
    const train::LoadedConfig loaded = train::LoadRun(config_name_, overrides_);
    train::CheckStep(loaded);
    train::RunConfig config = loaded.config;
    if (cluster_) config.device = train::DeviceChoice::kCuda;  // whatever the preset runs on
    return train::StepProblemOf(config);
  }
  // Of a shape: its batch on each GPU.
  train::StepProblem OfShape() {
    if (!overrides_.empty()) {
      CISTRON_THROW(
          kBadInput,
          "{}: keys are those of a configuration; --model takes --precision, --recompute, "
          "--states, --gradients and --micro-rows",
          overrides_.front());
    }
    const train::BenchShape shape = train::NamedBenchShape(model_);
    train::StepProblem s;
    s.memory = train::MemoryProblemOf(
        shape,
        {.precision = train::ParsePrecision(precision_),
         .micro_rows = micro_rows_,
         .recompute = train::ParseRecompute(recompute_),
         .states = train::ParseStates(states_),
         .gradients = train::ParseGradients(gradients_)},
        device_ == "cuda" || cluster_ ? DeviceType::kCuda : DeviceType::kCpu);
    s.rank_tokens = shape.batch * shape.sequence;
    if (cluster_) {
      s.memory.dp = cluster_->Ranks();
      s.memory.row_capacity = train::ParallelOptions().ep_buffer_factor;
    }
    return s;
  }

  std::string config_name_, model_, precision_ = "fp32", device_ = "cpu", recompute_ = "none",
                                    states_ = "fp32", gradients_ = "auto";
  std::int64_t micro_rows_ = 0, memory_ = 0;
  std::optional<double> ep_buffer_factor_;
  std::optional<train::Cluster> cluster_;
  bool simulate_ = false, json_ = false;
  std::string where_;
  std::vector<std::string> overrides_;
};

}  // namespace

std::unique_ptr<Command> MakePlanCommand() {
  return std::make_unique<PlanCommand>();
}

}  // namespace cistron::app
