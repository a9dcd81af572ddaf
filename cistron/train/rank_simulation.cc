#include "cistron/train/rank_simulation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"

namespace cistron::train {
namespace {

using enum TrafficKind;
using Ranks = std::vector<std::size_t>;

std::size_t At(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// The ports of all GPUs. A message takes the port of its sender and that of its receiver for its
// length; ports within a node and beyond it are different ones.
class Network {
 public:
  explicit Network(const Cluster& cluster)
      : cluster_(cluster), inner_(At(cluster.Ranks())), outer_(At(cluster.Ranks())) {}

  bool SameNode(std::size_t a, std::size_t b) const {
    const std::size_t node = At(cluster_.gpus_per_node);
    return a / node == b / node;
  }
  // Returns when it has arrived; `ready`: when sender and receiver are.
  double Send(std::size_t from, std::size_t to, double bytes, double ready, const Link& within) {
    const bool inner = SameNode(from, to);
    std::vector<Port>& ports = inner ? inner_ : outer_;
    Port& out = ports[from];
    Port& in = ports[to];
    const double start = std::max({ready, out.sends_until, in.receives_until});
    const double end = start + bytes / (inner ? within : cluster_.between).bytes_per_s;
    out.sends_until = in.receives_until = end;
    out.sent += bytes;
    in.received += bytes;
    return end;
  }
  LinkBytes Sent(std::size_t rank) const { return {inner_[rank].sent, outer_[rank].sent}; }
  LinkBytes Received(std::size_t rank) const {
    return {inner_[rank].received, outer_[rank].received};
  }

 private:
  struct Port {
    double sends_until = 0, receives_until = 0, sent = 0, received = 0;
  };
  const Cluster& cluster_;
  std::vector<Port> inner_, outer_;
};

class Step {
 public:
  Step(const StepProblem& problem, const Cluster& cluster, const SimulationOptions& options)
      : s_(problem),
        p_(problem.memory),
        cluster_(cluster),
        options_(options),
        network_(cluster),
        clock_(At(cluster.Ranks())),
        most_rows_(At(cluster.Ranks()), 0.0) {
    CISTRON_CHECK(p_.Ranks() == cluster.Ranks(), "simulation: {} ranks on {} GPUs", p_.Ranks(),
                  cluster.Ranks());
    s_.rank_tokens = 0;  // one micro-batch
    p_.one_micro_batch = true;
    s_.memory = p_;
    const auto time = PredictStep(s_, cluster);
    if (!time) {
      CISTRON_THROW(kUnsupported,
                    "simulation: times are known for precision=bf16 on GPUs alone, not {}",
                    Name(p_.precision));
    }
    time_ = *time;
  }

  Simulation Run() {
    const std::int64_t layers = p_.model.num_hidden_layers;
    const bool again = p_.recompute != model::Recompute::kNone;
    const double l = static_cast<double>(layers);
    const double experts = time_.experts / (l * (again ? 4 : 3));
    const double rest = (time_.dense + time_.attention + time_.passes) / (3 * l);
    std::vector<std::vector<double>> routed;  // of each layer
    for (std::int64_t i = 0; i < layers; ++i) {
      routed.push_back(Route(i));
      Compute(rest);
      ThroughExperts(routed.back(), experts, kDispatch, kCombine);
    }
    for (std::int64_t i = layers; i-- > 0;) {
      const std::vector<double>& rows = routed[At(i)];
      if (again) ThroughExperts(rows, experts, kDispatch, kCombine);
      ThroughExperts(rows, 2 * experts, kCombineBackward, kDispatchBackward);
      Compute(2 * rest);
    }
    for (const Traffic& t : TrafficOfStep(s_)) {
      if (t.kind > kDispatchBackward) Rings(t);
    }
    Compute(time_.optimizer);
    return Result();
  }

 private:
  void Compute(double seconds) {
    for (double& t : clock_) t += seconds;
  }

  // Rows from each rank to each member of its expert group: [ranks, ep].
  std::vector<double> Route(std::int64_t layer) {
    const std::int64_t experts = p_.model.num_local_experts, ep = p_.ep;
    const std::int64_t k = p_.model.num_experts_per_tok, ranks = p_.Ranks();
    std::vector<double> rows(At(ranks * ep));
    const RandomStream popularity(options_.seed, "simulation.experts", At(layer));
    std::vector<double> until(At(experts));  // cumulative
    double sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      until[At(e)] = sum += std::exp(options_.skew * popularity.Normal(At(e)));
    }
    std::vector<std::int64_t> chosen;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const RandomStream stream(options_.seed, "simulation.tokens", At(layer), At(rank));
      std::uint64_t drawn = 0;
      for (std::int64_t t = 0; t < p_.tokens; ++t) {
        chosen.clear();
        while (static_cast<std::int64_t>(chosen.size()) < k) {
          const double u = static_cast<double>(stream.Uniform(drawn++)) * sum;
          const auto e = std::min<std::int64_t>(
              std::upper_bound(until.begin(), until.end(), u) - until.begin(), experts - 1);
          if (std::find(chosen.begin(), chosen.end(), e) != chosen.end()) continue;
          chosen.push_back(e);
          ++rows[At(rank * ep + e / (experts / ep))];
        }
      }
    }
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const double times = ReceivedBy(rows, rank) / static_cast<double>(p_.tokens * k);
      most_rows_[At(rank)] = std::max(most_rows_[At(rank)], times);
      overflows_ += times > p_.row_capacity;
    }
    return rows;
  }
  double ReceivedBy(const std::vector<double>& rows, std::int64_t rank) const {
    const std::int64_t first = rank / p_.ep * p_.ep;
    double sum = 0;
    for (std::int64_t i = 0; i < p_.ep; ++i) sum += rows[At((first + i) * p_.ep + rank - first)];
    return sum;
  }

  // To the experts, products in proportion to the rows, and back.
  void ThroughExperts(const std::vector<double>& rows, double even_seconds, TrafficKind to,
                      TrafficKind from) {
    if (p_.ep > 1) Exchange(rows, to, false);
    for (std::int64_t rank = 0; rank < p_.Ranks(); ++rank) {
      clock_[At(rank)] += even_seconds * ReceivedBy(rows, rank) /
                          static_cast<double>(p_.tokens * p_.model.num_experts_per_tok);
    }
    if (p_.ep > 1) Exchange(rows, from, true);
  }

  void Exchange(const std::vector<double>& rows, TrafficKind kind, bool back) {
    const std::int64_t ep = p_.ep;
    const bool weights = kind == kDispatch || kind == kDispatchBackward;
    const double row = static_cast<double>(p_.model.hidden_size) * 2 + (weights ? 4 : 0);
    const std::int64_t experts = p_.model.num_local_experts / ep;  // of a rank
    const double counts = kind == kDispatch ? 8.0 * static_cast<double>(experts) : 0.0;
    std::vector<double> done(clock_);
    for (std::int64_t first = 0; first < p_.Ranks(); first += ep) {
      for (std::int64_t shift = 1; shift < ep; ++shift) {
        for (std::int64_t i = 0; i < ep; ++i) {
          const std::int64_t j = (i + shift) % ep;
          const std::size_t from = At(first + i), to = At(first + j);
          const double moved = back ? rows[to * At(ep) + At(i)] : rows[from * At(ep) + At(j)];
          const double ready = std::max(clock_[from], clock_[to]);
          const double end =
              network_.Send(from, to, moved * row + counts, ready, cluster_.within.all_to_all);
          done[from] = std::max(done[from], end);
          done[to] = std::max(done[to], end);
        }
      }
    }
    clock_ = std::move(done);
    Latency({ep, 1}, cluster_.within.all_to_all, kind == kDispatch ? 2 : 1);
  }

  // What PredictStep counts for so many operations.
  void Latency(const RankGroup& group, const Link& within, double operations) {
    const bool leaves = group.members * group.stride > cluster_.gpus_per_node;
    const bool stays = group.stride < cluster_.gpus_per_node;
    const double each = (stays ? within.latency_s : 0) + (leaves ? cluster_.between.latency_s : 0);
    Compute(operations * each);
  }

  // All groups of a kind, all of its operations as one: their bytes around rings.
  void Rings(const Traffic& t) {
    const bool all_reduce = t.kind == kGradients || t.kind == kStatistics;
    const Link& link = t.kind == kGather          ? cluster_.within.all_gather
                       : t.kind == kReduceScatter ? cluster_.within.reduce_scatter
                                                  : cluster_.within.all_reduce;
    const std::int64_t n = t.group.members, stride = t.group.stride, groups = p_.Ranks() / n;
    const std::int64_t steps = (all_reduce ? 2 : 1) * (n - 1);
    const double whole = static_cast<double>(t.bytes) / static_cast<double>(groups * steps);
    for (std::int64_t g = 0; g < groups; ++g) {
      Ranks members;
      const std::int64_t first = g / stride * stride * n + g % stride;
      for (std::int64_t i = 0; i < n; ++i) members.push_back(At(first + i * stride));
      RingsOf(members, whole, steps, link);
    }
    Latency(t.group, link,
            static_cast<double>(t.operations) * std::ceil(std::log2(static_cast<double>(n))));
  }

  // As many rings as there are members on a node: each leaves it through another one. In a step
  // every member sends its neighbour the part that it got last.
  void RingsOf(const Ranks& members, double whole, std::int64_t steps, const Link& link) {
    std::size_t here = 1;
    while (here < members.size() && network_.SameNode(members[0], members[here])) ++here;
    const std::size_t n = members.size(), rings = here == n ? 1 : here;
    double ready = 0;
    for (const std::size_t rank : members) ready = std::max(ready, clock_[rank]);
    const double part = whole / static_cast<double>(n * rings);
    std::vector<std::vector<double>> has(rings, std::vector<double>(n, ready)), gets = has;
    for (std::int64_t step = 0; step < steps; ++step) {
      for (std::size_t ring = 0; ring < rings; ++ring) {
        const auto rank = [&](std::size_t i) {
          const std::size_t node = i / here * here;
          return members[node + (i % here + ring) % here];
        };
        for (std::size_t i = 0; i < n; ++i) {
          const std::size_t next = (i + 1) % n;
          gets[ring][next] = network_.Send(rank(i), rank(next), part, has[ring][i], link);
        }
        std::swap(has[ring], gets[ring]);
      }
    }
    double done = ready;
    for (const auto& ring : has) done = std::max(done, *std::max_element(ring.begin(), ring.end()));
    for (const std::size_t rank : members) clock_[rank] = done;
  }

  Simulation Result() {
    Simulation r;
    r.problem = s_;
    r.overflows = overflows_;
    r.seconds = *std::max_element(clock_.begin(), clock_.end());
    for (std::size_t i = 0; i < clock_.size(); ++i) {
      MemoryProblem exact = p_;
      exact.row_capacity = most_rows_[i];
      r.ranks.push_back({network_.Sent(i), network_.Received(i), clock_[i], most_rows_[i],
                         PlanMemory(exact).peak_bytes});
    }
    return r;
  }

  StepProblem s_;
  MemoryProblem p_;
  const Cluster& cluster_;
  const SimulationOptions options_;
  StepTime time_;
  Network network_;
  std::vector<double> clock_, most_rows_;
  std::int64_t overflows_ = 0;
};

}  // namespace

Simulation SimulateStep(const StepProblem& problem, const Cluster& cluster,
                        const SimulationOptions& options) {
  return Step(problem, cluster, options).Run();
}

}  // namespace cistron::train
