#include "cistron/train/step_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/comm/host_communicator.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

using enum TrafficKind;

// Bytes of an element.
struct Sizes {
  std::int64_t model, compute;

  explicit Sizes(const MemoryProblem& p)
      : model(static_cast<std::int64_t>(SizeOf(ModelDType(p.precision)))),
        compute(static_cast<std::int64_t>(SizeOf(ComputeType(ModelDType(p.precision))))) {}
};

class TrafficSum {
 public:
  void Add(TrafficKind kind, const RankGroup& group, std::int64_t bytes, std::int64_t operations) {
    if (bytes == 0) return;
    for (Traffic& t : all_) {
      if (t.kind != kind || t.group.members != group.members || t.group.stride != group.stride) {
        continue;
      }
      t.bytes += bytes;
      t.operations += operations;
      return;
    }
    all_.push_back({kind, group, bytes, operations});
  }
  std::vector<Traffic> Take() { return std::move(all_); }

 private:
  std::vector<Traffic> all_;
};

// Layers whose rows of passes without backward travel as codes.
std::int64_t LayersOfQuantizedRows(const MemoryProblem& p) {
  if (p.ep_rows == TravellingRows::kExact) return 0;
  const std::int64_t layers = p.model.num_hidden_layers;
  const quant::HighPrecisionLayers exact = HighPrecisionLayersOf(p.recipe, layers);
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < layers; ++i) {
    count += exact.Contains(fmt::format("model.layers.{}.mlp.experts.gate_up_proj", i)) ? 0 : 1;
  }
  return count;
}

// Of a row as codes and scales.
std::int64_t BytesOfCodes(const MemoryProblem& p) {
  const auto layout = quant::RowCodesOf(MakeRecipe(p.precision, p.recipe));
  CISTRON_CHECK(layout.has_value(), "plan: rows of precision={} have no codes of their own",
                Name(p.precision));
  const Shape row({1, p.model.hidden_size});
  const auto scale = static_cast<std::int64_t>(
      SizeOf(layout->scaling == Scaling::kMxfp8 ? DType::kE8M0 : DType::kF32));
  return row.numel() + ScaleShape(*layout, row, Tensor(), Direction::kRowwise).numel() * scale;
}

// Token rows between the ranks of an expert group.
void AddRows(const StepProblem& s, TrafficSum& sum) {
  const MemoryProblem& p = s.memory;
  if (p.ep == 1) return;
  const Sizes size(p);
  const RankGroup group{p.ep, 1};
  // Rows of all ranks that leave theirs, in the passes of one layer over all micro-batches.
  const std::int64_t rows = s.GlobalTokens() * p.model.num_experts_per_tok / p.ep * (p.ep - 1);
  const std::int64_t row = p.model.hidden_size * size.model;
  const std::int64_t counts = p.Ranks() * (p.ep - 1) * (p.model.num_local_experts / p.ep) * 8;
  const std::int64_t micro = s.MicroSteps(), layers = p.model.num_hidden_layers;
  const std::int64_t forward = layers * (p.recompute == model::Recompute::kNone ? 1 : 2);
  // Weights of rows travel beside them; counts go ahead.
  sum.Add(kDispatch, group, forward * (rows * (row + size.compute) + micro * counts),
          2 * forward * micro);
  // Of two forward passes the first has no backward. Scales are one exchange more.
  const std::int64_t quantized =
      p.recompute == model::Recompute::kNone ? 0 : LayersOfQuantizedRows(p);
  if (quantized > 0) {
    sum.Add(kDispatch, group, quantized * rows * (BytesOfCodes(p) - row), quantized * micro);
  }
  sum.Add(kCombine, group, forward * rows * row, forward * micro);
  sum.Add(kCombineBackward, group, layers * rows * row, layers * micro);
  sum.Add(kDispatchBackward, group, layers * rows * (row + size.compute), layers * micro);
}

// How often a sharded weight is gathered: for each pass that multiplies by it.
std::int64_t UsesInAMicroBatch(const MemoryProblem& p, const std::string& parameter) {
  if (LayerOf(parameter) < 0) {
    // The head's products of both directions are made chunk by chunk, and looking up rows has no
    // product in backward.
    const bool norm = parameter == "model.norm.weight";
    return norm || p.model.tie_word_embeddings ? 2 : 1;
  }
  const bool again =
      p.recompute == model::Recompute::kLayer ||
      (p.recompute == model::Recompute::kMoe && parameter.find(".mlp.") != std::string::npos);
  return again ? 3 : 2;
}

void AddParameters(const StepProblem& s, TrafficSum& sum) {
  const MemoryProblem& p = s.memory;
  const Sizes size(p);
  const bool quantizes = quant::Quantizes(MakeRecipe(p.precision, p.recipe));
  for (const model::ParameterInfo& parameter : model::MixtralParameters(p.model)) {
    const bool expert = IsRoutedExpert(parameter.name);
    const RankGroup group = expert ? RankGroup{p.dp, p.ep} : RankGroup{p.Ranks(), 1};
    if (group.members == 1) continue;
    const std::int64_t groups = p.Ranks() / group.members;
    const std::int64_t n = parameter.shape.numel() / (expert ? p.ep : 1);
    if (p.sharding == Sharding::kNone) {
      const std::int64_t bytes = n * GradientSize(p, parameter);
      sum.Add(kGradients, group, groups * AllReduceBytes(p.device, group.members, bytes), 1);
      continue;
    }
    const std::int64_t others = groups * (group.members - 1) * n;
    if (quantizes && parameter.name.find("_proj") != std::string::npos) {
      // Masters, from which the codes of all passes of a step are made.
      sum.Add(kGather, group, others * size.compute, 1);
    } else {
      const std::int64_t uses = UsesInAMicroBatch(p, parameter.name) * s.MicroSteps();
      sum.Add(kGather, group, uses * others * size.model, uses);
    }
    sum.Add(kReduceScatter, group, others * GradientSize(p, parameter), 1);
  }
}

// model::Mixtral's statistics of a micro-step and of a step, and the optimiser's sum of squares:
// i64 and f64 apart, each in one all-reduce.
void AddStatistics(const StepProblem& s, TrafficSum& sum) {
  const MemoryProblem& p = s.memory;
  const RankGroup world{p.Ranks(), 1};
  if (p.Ranks() == 1) return;
  const std::int64_t layers = p.model.num_hidden_layers;
  const std::int64_t counts = layers * p.model.num_local_experts;
  const auto add = [&](std::int64_t numbers, std::int64_t times) {
    sum.Add(kStatistics, world, times * AllReduceBytes(p.device, p.Ranks(), numbers * 8), times);
  };
  const bool batch = p.model.aux_scope == model::AuxScope::kBatch;
  if (batch) {
    add(counts, s.MicroSteps());
    add(counts + (p.model.moe_z_loss_coeff > 0 ? layers : 0), s.MicroSteps());
  }
  add(counts + layers, 1);
  add(batch ? 1 : 1 + 1 + 2 * layers, 1);
  add(1, 1);
}

double Log2(std::int64_t members) {
  return std::ceil(std::log2(static_cast<double>(members)));
}

// Ranks of a group on one node.
std::int64_t OnANode(const RankGroup& group, const Cluster& cluster) {
  return std::min(group.members, std::max<std::int64_t>(1, cluster.gpus_per_node / group.stride));
}

StepTime::Collective TimeOf(const Traffic& t, const Cluster& cluster) {
  const bool all_to_all = t.kind <= kDispatchBackward;
  const double bytes = static_cast<double>(t.bytes) / static_cast<double>(cluster.Ranks());
  const Collectives& c = cluster.within;
  const Link& link = all_to_all                 ? c.all_to_all
                     : t.kind == kGather        ? c.all_gather
                     : t.kind == kReduceScatter ? c.reduce_scatter
                                                : c.all_reduce;
  StepTime::Collective r;
  r.kind = t.kind;
  r.bytes =
      all_to_all ? SplitAllToAll(t.group, cluster, bytes) : SplitRing(t.group, cluster, bytes);
  double latency = 0;
  // Both kinds of link work at the same time.
  if (r.bytes.within > 0) {
    r.seconds = r.bytes.within / link.bytes_per_s;
    latency = link.latency_s;
  }
  if (r.bytes.between > 0) {
    r.seconds = std::max(r.seconds, r.bytes.between / cluster.between.bytes_per_s);
    latency += cluster.between.latency_s;
  }
  r.seconds +=
      static_cast<double>(t.operations) * latency * (all_to_all ? 1 : Log2(t.group.members));
  r.exposed = r.seconds;
  return r;
}

// Products, attention and passes over memory of a rank's micro-batches.
StepTime ComputeOf(const StepProblem& s, const GpuRates& rates) {
  const MemoryProblem& p = s.memory;
  const model::MixtralConfig& c = p.model;
  const Sizes size(p);
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double tokens = d(s.RankTokens()), layers = d(c.num_hidden_layers);
  const double h = d(c.hidden_size), f = d(c.intermediate_size), k = d(c.num_experts_per_tok);
  const double q = d(c.num_attention_heads * c.HeadDim()),
               kv = d(c.num_key_value_heads * c.HeadDim());
  // Passes over the layer's weights: forward, two of backward, and what is computed again.
  const double moe = p.recompute == model::Recompute::kNone ? 3 : 4;
  const double rest = p.recompute == model::Recompute::kLayer ? 4 : 3;

  StepTime t;
  const double mlp = 6 * tokens * h * f * layers;
  t.experts = moe * k * mlp / rates.grouped_flops;
  const double projections = 2 * tokens * h * (2 * q + 2 * kv) * layers;
  const double router = 2 * tokens * h * d(c.num_local_experts) * layers;
  const double head = 2 * tokens * h * d(c.vocab_size);
  t.dense = (rest * projections + moe * (router + d(c.n_shared_experts) * mlp) + 3 * head) /
            rates.product_flops;
  // Keys that a query sees, on average.
  const double length = d(p.length), window = d(c.sliding_window.value_or(p.length));
  const double seen = window < length ? window - window * window / (2 * length) : length / 2;
  const double scores = 4 * tokens * seen * q * layers;
  t.attention =
      (rest - 2) * scores / rates.attention_flops + 2.5 * scores / rates.attention_backward_flops;
  // Norms read two and write two tensors [T, H], two of them a layer, and as many backward; permute
  // and unpermute read and write T·H and K·T·H each way, and, between ranks, sort rows once more.
  const double norms = 16, permutes = 4 * (1 + k) + (p.ep > 1 ? 8 * k : 0);
  t.passes = (norms + permutes) * (rest / 3) * tokens * h * d(size.model) * layers /
             (rates.copy_bytes_per_s * rates.passes_of_copy);

  double update = 0, norm = 0;  // bytes
  const bool masters = p.states == OptimStates::kF32 && size.compute != size.model;
  const double state = d(masters ? size.compute : size.model);
  for (const model::ParameterInfo& parameter : model::MixtralParameters(c)) {
    const double n = d(ElementsOfRank(p, parameter)), gradient = d(GradientSize(p, parameter));
    // Gradient read; weight or master and two moments read and written; the bf16 weight written.
    update += n * (gradient + 6 * state + (masters ? d(size.model) : 0));
    norm += n * gradient;
  }
  t.optimizer =
      update / (rates.copy_bytes_per_s * rates.optimizer_of_copy) + norm / rates.copy_bytes_per_s;
  return t;
}

}  // namespace

std::string_view Name(TrafficKind kind) {
  switch (kind) {
    case kDispatch: return "dispatch";
    case kCombine: return "combine";
    case kCombineBackward: return "combine, backward";
    case kDispatchBackward: return "dispatch, backward";
    case kGradients: return "all-reduce of gradients";
    case kReduceScatter: return "reduce-scatter of gradients";
    case kGather: return "all-gather of parameters";
    case kStatistics: return "statistics";
  }
  return "";
}

StepProblem StepProblemOf(const RunConfig& c) {
  return {MemoryProblemOf(c), c.RowsPerStep() / c.Ranks() * c.data.seq_len};
}

std::int64_t AllReduceBytes(DeviceType device, std::int64_t ranks, std::int64_t bytes) {
  const bool one_round = device == DeviceType::kCpu && ranks * bytes <= comm::kOneRoundBytes;
  return (one_round ? ranks : 2) * (ranks - 1) * bytes;
}

std::vector<Traffic> TrafficOfStep(const StepProblem& problem) {
  TrafficSum sum;
  AddRows(problem, sum);
  AddParameters(problem, sum);
  AddStatistics(problem, sum);
  return sum.Take();
}

LinkBytes SplitAllToAll(const RankGroup& group, const Cluster& cluster, double bytes) {
  const std::int64_t here = OnANode(group, cluster);
  const double each = bytes / static_cast<double>(group.members - 1);
  return {each * static_cast<double>(here - 1), each * static_cast<double>(group.members - here)};
}

LinkBytes SplitRing(const RankGroup& group, const Cluster& cluster, double bytes) {
  const std::int64_t here = OnANode(group, cluster);
  if (here == group.members) return {bytes, 0};
  const double leaves = bytes / static_cast<double>(here);
  return {bytes - leaves, leaves};
}

double StepTime::Communication() const {
  double sum = 0;
  for (const Collective& c : collectives) sum += c.seconds;
  return sum;
}

double StepTime::Exposed() const {
  double sum = 0;
  for (const Collective& c : collectives) sum += c.exposed;
  return sum;
}

std::optional<StepTime> PredictStep(const StepProblem& problem, const Cluster& cluster) {
  if (problem.memory.device != DeviceType::kCuda || problem.memory.precision != Precision::kBf16) {
    return std::nullopt;
  }
  StepTime t = ComputeOf(problem, cluster.rates);
  for (const Traffic& traffic : TrafficOfStep(problem)) {
    StepTime::Collective c = TimeOf(traffic, cluster);
    const auto same = std::find_if(t.collectives.begin(), t.collectives.end(),
                                   [&](const auto& other) { return other.kind == c.kind; });
    if (same == t.collectives.end()) {
      t.collectives.push_back(c);
    } else {
      same->bytes.within += c.bytes.within;
      same->bytes.between += c.bytes.between;
      same->seconds += c.seconds;
      same->exposed += c.exposed;
    }
  }
  // Gradients are reduced behind backward of the last micro-batch, two thirds of its work, but for
  // those of the last layer of it, after which no work is left; sharded parameters are gathered
  // ahead of all of it.
  const auto layers = static_cast<double>(problem.memory.model.num_hidden_layers);
  double work = t.Compute() - t.optimizer;
  const auto last = static_cast<double>(problem.RankTokens() -
                                        (problem.MicroSteps() - 1) * problem.memory.tokens);
  double last_backward = work * 2 / 3 * last / static_cast<double>(problem.RankTokens());
  for (const TrafficKind kind : {kGradients, kReduceScatter, kGather}) {
    for (StepTime::Collective& c : t.collectives) {
      if (c.kind != kind) continue;
      const double most = kind == kGather ? c.seconds : c.seconds * (1 - 1 / layers);
      const double behind = std::min(kind == kGather ? work : last_backward, most);
      c.exposed = c.seconds - behind;
      t.slowed += behind * cluster.within.slows_products;
      last_backward -= behind;
      work -= behind;
    }
  }
  return t;
}

std::vector<PlannedLayout> RankLayouts(const StepProblem& problem, const Cluster& cluster,
                                       std::int64_t room) {
  const MemoryProblem& base = problem.memory;
  const std::int64_t ranks = cluster.Ranks(), experts = base.model.num_local_experts;
  const std::int64_t rows = problem.GlobalTokens() / std::max<std::int64_t>(base.length, 1);
  if (rows % ranks != 0) {
    CISTRON_THROW(kBadInput,
                  "batch.global_tokens: {} rows of {} tokens cannot be dealt evenly to {} ranks of "
                  "{}; the nearest is {}",
                  rows, base.length, ranks, cluster.name,
                  std::max<std::int64_t>(1, (rows + ranks / 2) / ranks) * ranks * base.length);
  }
  std::vector<PlannedLayout> layouts;
  for (std::int64_t ep = 1; ep <= std::min(ranks, experts); ++ep) {
    const std::int64_t node = cluster.gpus_per_node;
    if (ranks % ep != 0 || experts % ep != 0) continue;
    if (node % ep != 0 && ep % node != 0) continue;
    for (const Sharding sharding : {Sharding::kNone, Sharding::kFull}) {
      if (sharding == Sharding::kFull && ranks == 1) continue;
      PlannedLayout l;
      MemoryProblem& p = l.problem.memory;
      p = base;
      p.dp = ranks / ep;
      p.ep = ep;
      p.sharding = sharding;
      const std::int64_t rows_of_rank = rows / ranks;
      const std::int64_t micro =
          base.whole_batch ? rows_of_rank : std::min(base.tokens / base.length, rows_of_rank);
      p.tokens = micro * base.length;
      p.one_micro_batch = micro == rows_of_rank;
      l.problem.rank_tokens = rows_of_rank * base.length;
      l.memory = PlanMemory(p);
      l.time = PredictStep(l.problem, cluster);
      l.fits = l.memory.peak_bytes <= room;
      layouts.push_back(std::move(l));
    }
  }
  const auto key = [](const PlannedLayout& l) {
    const auto bytes = static_cast<double>(l.memory.peak_bytes);
    return std::pair(!l.fits, l.fits && l.time ? l.time->Total() : bytes);
  };
  std::stable_sort(layouts.begin(), layouts.end(),
                   [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return layouts;
}

}  // namespace cistron::train
