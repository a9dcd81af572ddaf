// What ranks that are threads send over each link in a training step, and the memory that each
// takes, beside what is planned for them (cistron/train/step_plan.h).
//
//   rank_traffic [RANKS …]      8 and 64 unless told; each layout whose ep is 8 or less
//
// The model is small, every rank has 256 tokens, routing is that of random weights. Links are those
// between pairs of ranks, in both directions; memory is that of tensors.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "cistron/train/measure_ranks.h"
#include "cistron/train/value_range.h"

namespace cistron::train {
namespace {

StepProblem Problem(std::int64_t dp, std::int64_t ep) {
  StepProblem s;
  MemoryProblem& p = s.memory;
  p.model.vocab_size = 256;
  p.model.hidden_size = 64;
  p.model.intermediate_size = 128;
  p.model.num_hidden_layers = 2;
  p.model.num_attention_heads = 4;
  p.model.num_key_value_heads = 2;
  p.model.num_local_experts = 8;
  p.model.num_experts_per_tok = 2;
  p.model.max_position_embeddings = 64;
  p.model.moe_aux_loss_coeff = 0.01;
  p.precision = Precision::kBf16;
  p.tokens = 256;
  p.length = 64;
  p.dp = dp;
  p.ep = ep;
  return s;
}

void Show(std::int64_t dp, std::int64_t ep) {
  const StepProblem s = Problem(dp, ep);
  const auto n = static_cast<std::size_t>(s.memory.Ranks());
  const MeasuredRanks one = MeasureRanks(s, 1), two = MeasureRanks(s, 2);
  // Pairs that share experts' rows, and pairs that only reduce.
  ValueRange within, beyond, memory;
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      if (from == to) continue;
      const auto bytes = static_cast<double>(two.sent[from * n + to] - one.sent[from * n + to]);
      const std::size_t group = static_cast<std::size_t>(ep);
      (from / group == to / group ? within : beyond).Add(bytes);
    }
    memory.Add(static_cast<double>(two.peaks[from]));
  }
  // A host all-reduce exchanges between every two of its ranks.
  double rows = 0, sums = 0, experts = 0;
  for (const Traffic& t : TrafficOfStep(s)) {
    (t.kind <= TrafficKind::kDispatchBackward ? rows
     : t.group.stride == 1                    ? sums
                                              : experts) += static_cast<double>(t.bytes);
  }
  const double pairs = static_cast<double>(n * (n - 1)),
               group_pairs = static_cast<double>(n) * static_cast<double>(ep - 1);
  const double sum_of_pair = sums / pairs;
  const double planned_within = group_pairs > 0 ? rows / group_pairs + sum_of_pair : 0;
  const double planned_beyond =
      pairs > group_pairs ? sum_of_pair + experts / (pairs - group_pairs) : 0;
  const MemoryPlan plan = PlanMemory(s.memory);
  const auto planned = static_cast<double>(plan.peak_bytes - plan.Of(MemoryKind::kCommunication));
  const auto line = [](const char* what, double expected, const ValueRange& r, double unit) {
    if (r.count == 0) return;
    fmt::print("  {:<36} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>8.3f}\n", what, expected / unit,
               r.Mean() / unit, r.least / unit, r.most / unit, r.Mean() / expected);
  };
  fmt::print("dp {} ep {}\n  {:<36} {:>9} {:>9} {:>9} {:>9} {:>8}\n", dp, ep, "", "planned", "mean",
             "least", "most", "ratio");
  line("sent, pair of one expert group, KiB", planned_within, within, 1024);
  line("sent, other pair, KiB", planned_beyond, beyond, 1024);
  line("memory of a rank, KiB", planned, memory, 1024);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  std::vector<std::int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.empty()) sizes = {8, 64};
  for (const std::int64_t ranks : sizes) {
    if (ranks < 2 || ranks > 512) {
      fmt::print(stderr, "rank_traffic: {} ranks; between 2 and 512 threads\n", ranks);
      return 2;
    }
    for (const std::int64_t ep : {1, 2, 4, 8}) {
      if (ranks % ep == 0) Show(ranks / ep, ep);
    }
  }
  return 0;
}

}  // namespace
}  // namespace cistron::train

int main(int argc, char** argv) {
  try {
    return cistron::train::Main(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "rank_traffic: {}\n", e.what());
    return 1;
  }
}
