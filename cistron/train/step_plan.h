// What many ranks move in a training step, how long the step takes, and which layouts of ranks fit:
// from shapes and the rates of a cluster. Formulas and assumptions: docs/plan.md. The traffic is
// that of the code (parallel/, model/mixtral.cc); whoever changes what ranks exchange changes this
// too; step_plan_test.cc compares it with what ranks send.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/train/cluster.h"
#include "cistron/train/memory_plan.h"

namespace cistron::train {

struct StepProblem {
  MemoryProblem memory;
  // Of a rank in a step, in micro-batches of memory.tokens, the last of which may have fewer; 0:
  // one micro-batch.
  std::int64_t rank_tokens = 0;

  std::int64_t RankTokens() const { return rank_tokens > 0 ? rank_tokens : memory.tokens; }
  std::int64_t MicroSteps() const { return (RankTokens() + memory.tokens - 1) / memory.tokens; }
  // Of all ranks.
  std::int64_t GlobalTokens() const { return memory.Ranks() * RankTokens(); }
};
StepProblem StepProblemOf(const RunConfig& config);

enum class TrafficKind {
  kDispatch,          // token rows, their weights and counts to the experts; again in recomputation
  kCombine,           // rows back
  kCombineBackward,   // gradients of rows to the experts
  kDispatchBackward,  // and back, with those of the weights
  kGradients,         // all-reduce, of replicated parameters
  kReduceScatter,     // of gradients of sharded parameters
  kGather,            // of sharded parameters
  kStatistics,        // of routers, losses and the norm
};
std::string_view Name(TrafficKind kind);

// Ranks that talk to each other: `members` of them, `stride` apart; the mesh has many such groups.
struct RankGroup {
  std::int64_t members = 1, stride = 1;
};

struct Traffic {
  TrafficKind kind = TrafficKind::kDispatch;
  RankGroup group;
  std::int64_t bytes = 0;       // that all ranks together send to other ranks in a step
  std::int64_t operations = 0;  // that a rank waits for
};
// Every rank sends equally many rows to each rank of its expert group. Kinds that move nothing are
// left out. One entry a kind and group.
std::vector<Traffic> TrafficOfStep(const StepProblem& problem);

// Bytes that `ranks` ranks together send in an all-reduce of `bytes`: a reduce-scatter and an
// all-gather, 2·(ranks − 1)·bytes, the least there is (Patarasuk, Yuan, "Bandwidth optimal
// all-reduce algorithms for clusters of workstations", 2009); host transports send small ones in
// one round.
std::int64_t AllReduceBytes(DeviceType device, std::int64_t ranks, std::int64_t bytes);

// What one rank sends to ranks of its node, and beyond it.
struct LinkBytes {
  double within = 0, between = 0;
};
// Of a rank that sends `bytes` in collectives of a group: to each member the same (all-to-all), or
// around rings, each of which leaves a node through another of its members.
LinkBytes SplitAllToAll(const RankGroup& group, const Cluster& cluster, double bytes);
LinkBytes SplitRing(const RankGroup& group, const Cluster& cluster, double bytes);

struct StepTime {
  struct Collective {
    TrafficKind kind = TrafficKind::kDispatch;
    LinkBytes bytes;
    double seconds = 0, exposed = 0;  // in all, and not behind other work
  };
  // Seconds of one GPU.
  double experts = 0, dense = 0, attention = 0, passes = 0, optimizer = 0;
  double slowed = 0;  // that products take longer beside collectives
  std::vector<Collective> collectives;

  double Compute() const { return experts + dense + attention + passes + optimizer; }
  double Communication() const;
  double Exposed() const;
  // Of communication: what is not hidden, and what it costs the products that hide the rest.
  double Lost() const { return Exposed() + slowed; }
  double Total() const { return Compute() + Lost(); }
};
// Rates are known for bf16 on a GPU; nothing for another precision or a CPU.
std::optional<StepTime> PredictStep(const StepProblem& problem, const Cluster& cluster);

struct PlannedLayout {
  StepProblem problem;
  MemoryPlan memory;
  std::optional<StepTime> time;
  bool fits = false;
};
// Every (dp, ep, sharding) of as many ranks as the cluster has, that divides the experts and keeps
// expert groups and nodes aligned: those that fit into `room` bytes first, the fastest first (or,
// where no time is known, the smallest). `problem` says all but the layout; its micro-batch shrinks
// where a rank has fewer rows. Throws kBadInput where no layout can be: too many ranks for the
// rows.
std::vector<PlannedLayout> RankLayouts(const StepProblem& problem, const Cluster& cluster,
                                       std::int64_t room);

}  // namespace cistron::train
