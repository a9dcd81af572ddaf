#include "cistron/train/bench_step.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/profile.h"
#include "cistron/train/step_runner.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

std::int64_t PeakRssKib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

double ProcessorMs() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

// `rows` sequences of random tokens; each position predicts the next, the last of a row nothing.
data::Batch RandomBatch(const BenchShape& shape, std::int64_t first_row, std::int64_t rows,
                        data::BatchTotals& totals) {
  const std::int64_t s = shape.sequence;
  data::Batch batch;
  batch.tokens = Tensor::Empty({rows * s}, DType::kI64);
  batch.labels = Tensor::Empty({rows * s}, DType::kI64);
  batch.weights = Tensor::Empty({rows * s}, DType::kF32);
  batch.sequences = ops::UniformSequences(rows, s);
  const auto tokens = batch.tokens.span<std::int64_t>();
  const auto labels = batch.labels.span<std::int64_t>();
  const auto weights = batch.weights.span<float>();
  // By their place in the global batch: ranks and micro-batches share out the same tokens.
  const RandomStream stream(0, "bench.tokens", 0);
  const auto first = static_cast<std::size_t>(first_row * s);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    tokens[t] = static_cast<std::int64_t>(
        stream.Below(first + t, static_cast<std::uint64_t>(shape.model.vocab_size)));
  }
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const bool last = (t + 1) % static_cast<std::size_t>(s) == 0;
    labels[t] = last ? ops::kIgnoreLabel : tokens[t + 1];
    weights[t] = last ? 0.0f : 1.0f;
    totals.weight_sum += weights[t];
  }
  totals.tokens += rows * s;
  totals.rows += rows;
  return batch;
}

// BenchResult::busiest_rank of one step: counts [L][E] of all ranks.
double BusiestRank(const std::vector<std::vector<std::int64_t>>& counts, std::int64_t ep) {
  double sum = 0;
  for (const std::vector<std::int64_t>& layer : counts) {
    const auto experts = static_cast<std::int64_t>(layer.size()) / ep;
    std::int64_t busiest = 0, all = 0;
    for (std::int64_t r = 0; r < ep; ++r) {
      const auto begin = layer.begin() + r * experts;
      const std::int64_t rows = std::accumulate(begin, begin + experts, std::int64_t{0});
      busiest = std::max(busiest, rows);
      all += rows;
    }
    sum += all > 0 ? static_cast<double>(busiest * ep) / static_cast<double>(all) : 1.0;
  }
  return counts.empty() ? 1.0 : sum / static_cast<double>(counts.size());
}

}  // namespace

namespace {

struct Row {
  const char* name;
  std::int64_t layers, hidden, ffn, heads, kv_heads, experts, top_k, sequence, batch;
};
// dna: models of the E. coli presets, 8,192 tokens a step. 8x7b: some layers of Mixtral-8x7B with a
// small vocabulary.
constexpr Row kRows[] = {{"small", 4, 192, 384, 6, 2, 8, 2, 512, 8},
                         {"wide", 4, 256, 768, 4, 2, 8, 2, 512, 4},
                         {"fine", 4, 256, 128, 4, 2, 32, 4, 512, 4},
                         {"dna_128", 4, 128, 256, 4, 4, 8, 2, 1024, 8},
                         {"dna_256", 6, 256, 512, 4, 4, 8, 2, 1024, 8},
                         {"dna_512", 8, 512, 1024, 8, 8, 8, 2, 1024, 8},
                         {"8x7b_2layers", 2, 4096, 14336, 32, 8, 8, 2, 8192, 1},
                         {"8x7b_4layers", 4, 4096, 14336, 32, 8, 8, 2, 8192, 2}};

}  // namespace

std::vector<std::string> BenchShapeNames() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.emplace_back(row.name);
  return names;
}

BenchShape NamedBenchShape(const std::string& name) {
  for (const Row& row : kRows) {
    if (name != row.name) continue;
    BenchShape shape;
    shape.model.hidden_size = row.hidden;
    shape.model.intermediate_size = row.ffn;
    shape.model.num_hidden_layers = row.layers;
    shape.model.num_attention_heads = row.heads;
    shape.model.num_key_value_heads = row.kv_heads;
    shape.model.num_local_experts = row.experts;
    shape.model.num_experts_per_tok = row.top_k;
    shape.model.max_position_embeddings = row.sequence;
    shape.model.output_router_logits = true;
    shape.sequence = row.sequence;
    shape.batch = row.batch;
    return shape;
  }
  CISTRON_THROW(kInvalidArgument, "bench: there is no shape '{}'; known: {}", name,
                fmt::join(BenchShapeNames(), ", "));
}

model::Recompute ParseRecompute(const std::string& name) {
  if (name == "none") return model::Recompute::kNone;
  if (name == "moe") return model::Recompute::kMoe;
  CISTRON_CHECK(name == "layer", "recompute: '{}' is not one of none, moe, layer", name);
  return model::Recompute::kLayer;
}

OptimStates ParseStates(const std::string& name) {
  if (name == "bf16") return OptimStates::kBF16;
  CISTRON_CHECK(name == "fp32", "states: '{}' is not one of fp32, bf16", name);
  return OptimStates::kF32;
}

OptimGradients ParseGradients(const std::string& name) {
  if (name == "fp32") return OptimGradients::kF32;
  if (name == "bf16") return OptimGradients::kBF16;
  CISTRON_CHECK(name == "auto", "gradients: '{}' is not one of auto, fp32, bf16", name);
  return OptimGradients::kAuto;
}

namespace {
// What a configuration is refused for, of a shape.
void CheckTypes(const BenchOptions& options) {
  CISTRON_CHECK(options.states == OptimStates::kF32 || options.precision == Precision::kBf16,
                "states in bf16 without masters are for bf16, not {}; give --precision bf16",
                Name(options.precision));
  CISTRON_CHECK(options.gradients != OptimGradients::kBF16 || options.precision != Precision::kFp32,
                "gradients in bf16 are for models with bf16 weights, not {}; give --precision bf16",
                Name(options.precision));
}
}  // namespace

MemoryProblem MemoryProblemOf(const BenchShape& shape, const BenchOptions& options,
                              DeviceType device) {
  CheckTypes(options);
  const std::int64_t rows = options.micro_rows > 0 ? options.micro_rows : shape.batch;
  return {.model = shape.model,
          .precision = options.precision,
          .states = options.states,
          .gradients = options.gradients,
          .recompute = options.recompute,
          .device = device,
          .tokens = shape.sequence * rows,
          .one_micro_batch = rows >= shape.batch,
          .whole_batch = rows >= shape.batch,
          .length = shape.sequence,
          .threads = NumThreads()};
}

namespace {
std::vector<BenchResult> Measure(const ops::Context& given, BenchShape shape,
                                 const BenchOptions& options,
                                 std::span<const std::int64_t> batches) {
  Profile profile(given.device());
  const ops::Context ctx = given.WithRecorder(&profile);
  CISTRON_CHECK(options.steps >= 1 && options.warmup >= 0,
                "bench: {} measured steps after {} are not at least 1 after 0", options.steps,
                options.warmup);
  const std::int64_t before = PeakRssKib();
  const bool masters = options.states == OptimStates::kF32;
  CheckTypes(options);
  model::LocalMixtral m(ctx, shape.model, ModelDType(options.precision), masters, options.mesh,
                        {.sharded = options.sharded, .expert_exchange = options.expert_exchange});
  const std::int64_t largest = *std::max_element(batches.begin(), batches.end());
  m.store.SetGradientDType(
      GradientDType(options.precision, options.states, options.gradients,
                    /*whole_batch=*/options.micro_rows == 0 || options.micro_rows >= largest));
  m.model.SetRecompute(options.recompute);
  m.store.Initialize(0, shape.model.initializer_range);
  // The peer's optimiser: torch.optim.AdamW with its defaults.
  optim::AdamWOptimizer optimizer(
      ctx, m.store,
      {.adamw = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01},
       .max_grad_norm = 1.0,
       .decay_embeddings = true,
       .decay_all = true},
      m.statistics.get());
  quant::ScalingStates scaling;
  const quant::Autocast autocast(MakeRecipe(options.precision, {}), {.states = &scaling});
  std::vector<BenchResult> results;
  for (const std::int64_t sequences : batches) {
    shape.batch = sequences;
    const std::int64_t rows = options.micro_rows > 0 ? options.micro_rows : shape.batch;
    data::BatchTotals totals;
    std::vector<data::Batch> micro;
    const std::int64_t ranks = options.mesh == nullptr ? 1 : options.mesh->size();
    const std::int64_t first_row = options.mesh == nullptr ? 0 : options.mesh->rank() * shape.batch;
    for (std::int64_t row = 0; row < shape.batch; row += rows) {
      micro.push_back(
          RandomBatch(shape, first_row + row, std::min(rows, shape.batch - row), totals));
    }
    // All ranks have as many rows, whose labels have the same weights.
    totals.weight_sum *= static_cast<double>(ranks);
    totals.tokens *= ranks;
    totals.rows *= ranks;
    std::vector<double> ms;
    BenchResult result;
    {
      // Without the recorder, which is idle until the profile starts: these steps may be captured.
      StepRunner runner(given, m, optimizer, {options.cuda_graph, 0});
      const StepInputs inputs = runner.Prepare(micro, totals);
      const std::int64_t all = options.warmup + options.steps;
      auto mark = std::chrono::steady_clock::now();
      std::int64_t allocations = 0, finished = 0;
      double cpu = ProcessorMs();
      const auto run_to = [&](std::int64_t end) {
        for (std::int64_t started = finished; finished < end; ++finished) {
          for (; started < end && runner.in_flight() < runner.Depth(); ++started) {
            runner.Start(runner.Depth() > 1 ? runner.Prepare(micro, totals) : inputs, options.lr);
            scaling.EndStep(ctx);
          }
          const StepResult step = runner.Finish();
          const auto now = std::chrono::steady_clock::now();
          if (finished >= options.warmup) {
            result.redone += step.redone;
            ms.push_back(std::chrono::duration<double, std::milli>(now - mark).count());
            result.busiest_rank.push_back(
                BusiestRank(step.expert_counts, options.mesh == nullptr ? 1 : options.mesh->ep()));
          } else {
            allocations = ctx.allocator().Stats().allocations;
            cpu = ProcessorMs();
          }
          mark = now;
          result.loss = step.loss + shape.model.router_aux_loss_coef * step.aux_loss;
        }
      };
      if (options.trace != nullptr) {
        run_to(options.warmup);
        options.trace->Restart(ctx.device());
        mark = std::chrono::steady_clock::now();
      }
      run_to(all);
      result.cpu_ms = (ProcessorMs() - cpu) / static_cast<double>(options.steps);
      if (options.trace != nullptr) result.device_time = options.trace->Read(ctx.device());
      result.steps_run = runner.note();
      result.allocations = ctx.allocator().Stats().allocations - allocations;
    }
    if (options.profile) {
      TrainStep(ctx, m, optimizer, micro, totals, options.lr);
      const Roofline peak = MeasureRoofline(ctx, ModelDType(options.precision));
      const auto begin = std::chrono::steady_clock::now();
      profile.Start();
      TrainStep(ctx, m, optimizer, micro, totals, options.lr);
      profile.End();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      result.profile = profile.Table(peak, 1, took.count());
    }
    result.step_ms = ms;
    std::sort(ms.begin(), ms.end());
    result.ms = ms[ms.size() / 2];
    result.fastest_ms = ms.front();
    result.tokens_per_s = static_cast<double>(shape.batch * shape.sequence) / result.ms * 1e3;
    if (ctx.device().type == DeviceType::kCuda) {
      result.device_peak_mib = (ctx.allocator().Stats().peak_bytes + ExchangeMemory(m)) >> 20;
    }
    result.rss_mib = (PeakRssKib() - before) / 1024;
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace

BenchResult BenchTrainStep(const ops::Context& ctx, const BenchShape& shape,
                           const BenchOptions& options) {
  try {
    return Measure(ctx, shape, options, {&shape.batch, 1}).front();
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kOutOfMemory) throw;
    throw WithMemoryAdvice(e, MemoryProblemOf(shape, options, ctx.device().type));
  }
}

std::vector<BenchResult> BenchBatches(const ops::Context& ctx, const BenchShape& shape,
                                      const BenchOptions& options,
                                      std::span<const std::int64_t> batches) {
  return Measure(ctx, shape, options, batches);
}

}  // namespace cistron::train
