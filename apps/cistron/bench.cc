// cistron bench: speed and memory of the whole training step.
#include <fmt/format.h>

#include <optional>

#include "apps/cistron/commands.h"
#include "apps/cistron/machine.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/tensor/kernel_trace.h"
#include "cistron/train/bench_step.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/memory_plan.h"

namespace cistron::app {
namespace {

class BenchCommand final : public Command {
 public:
  std::string name() const override { return "bench"; }
  std::string summary() const override { return "speed and memory of the whole training step"; }
  std::string footer() const override {
    return "Prints one JSON line: tokens_per_s of the median step after two of warm-up, its ms, "
           "the\n"
           "peak memory that the model added (rss_mib) and the last loss. The shapes are those of\n"
           "the Hugging Face peer: forward, backward, clipping at 1.0, AdamW, auxiliary loss on.\n"
           "Examples:\n"
           "  cistron bench --model small\n"
           "  cistron bench --model fine --precision bf16 --threads 2 --steps 15\n"
           "  cistron bench --model dna_128 --precision bf16 --device cuda --gaps";
  }
  void Declare(Options& options) override {
    options.Choice("--model", model_, train::BenchShapeNames(), "shape");
    options.Choice("--precision", precision_,
                   {"fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"},
                   "number format");
    options.Choice("--device", device_, {"cpu", "cuda"}, "where to compute");
    options.Choice("--recompute", recompute_, {"none", "moe", "layer"},
                   "what backward computes again instead of keeping it");
    options.Choice("--states", states_, {"fp32", "bf16"},
                   "of a bf16 model: fp32 masters and moments, or bf16 without masters");
    options.Choice("--gradients", gradients_, {"auto", "fp32", "bf16"}, "as optim.gradients");
    options.Choice("--cuda-graph", cuda_graph_, {"auto", "off"}, "as train.cuda_graph");
    options.Option("--threads", threads_, "0: all that the machine grants");
    options.Flag("--gaps", gaps_,
                 "which part of the time a GPU runs no kernel; noting that slows steps a little");
    options.Flag("--profile", profile_, "then one step more, and where its time goes, on stderr");
    options.Option("--steps", steps_, "measured steps");
    options.Option("--micro-rows", micro_rows_, "sequences computed at once; 0: the whole batch");
  }

  int Run() override {
    if (threads_ > 0) SetNumThreads(static_cast<int>(threads_));
    const train::BenchShape shape = train::NamedBenchShape(model_);
    std::optional<cuda::KernelTrace> trace;  // before the device is used
    if (gaps_) {
      CISTRON_CHECK(device_ == "cuda", "bench: --gaps are a GPU's; give --device cuda with it");
      trace.emplace();
    }
    const train::BenchOptions options{
        .precision = train::ParsePrecision(precision_),
        .steps = steps_,
        .micro_rows = micro_rows_,
        .recompute = train::ParseRecompute(recompute_),
        .states = train::ParseStates(states_),
        .gradients = train::ParseGradients(gradients_),
        .cuda_graph = cuda_graph_ == "off" ? train::CudaGraph::kOff : train::CudaGraph::kAuto,
        .trace = trace ? &*trace : nullptr,
        .profile = profile_};
    const ops::Context ctx = MakeContext(device_);
    train::CheckMemory(train::MemoryProblemOf(shape, options, ctx.device().type));
    const train::BenchResult r = train::BenchTrainStep(ctx, shape, options);
    if (!r.steps_run.empty()) fmt::print(stderr, "steps: {}\n", r.steps_run);
    if (const cuda::DeviceTime& time = r.device_time; time.kernels > 0) {
      fmt::print(stderr, "launch gaps: {:.2f}% of {:.3f} ms a step, {:.2f} us a kernel\n",
                 100 * time.gap_share(), time.span_ms / static_cast<double>(steps_),
                 (time.span_ms - time.busy_ms) * 1e3 / static_cast<double>(time.kernels));
    }
    fmt::print(stderr, "{}", r.profile);
    fmt::print(
        "{{\"model\": \"{}\", \"precision\": \"{}\", \"states\": \"{}\", \"gradients\": "
        "\"{}\", \"threads\": {}, "
        "\"tokens_per_s\": {:.0f}, "
        "\"ms\": {:.1f}, \"fastest_ms\": {:.1f}, \"rss_mib\": {}, \"device_peak_mib\": {}, "
        "\"allocations\": {}, \"loss\": {:.3f}}}\n",
        model_, precision_, states_, gradients_, NumThreads(), r.tokens_per_s, r.ms, r.fastest_ms,
        r.rss_mib, r.device_peak_mib, r.allocations, r.loss);
    return kOk;
  }

 private:
  std::string model_ = "small", precision_ = "fp32", device_ = "cpu", recompute_ = "none",
              states_ = "fp32", gradients_ = "auto", cuda_graph_ = "auto";
  bool gaps_ = false, profile_ = false;
  std::int64_t threads_ = 0, steps_ = 7, micro_rows_ = 0;
};

}  // namespace

std::unique_ptr<Command> MakeBenchCommand() {
  return std::make_unique<BenchCommand>();
}

}  // namespace cistron::app
