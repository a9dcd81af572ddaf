// How much memory a training step needs, from shapes alone: the step's tensors are taken and given
// back in the order of the model's code (model/mixtral.cc, nn/), and the largest moment is the
// answer. Whoever changes which tensors live when changes this too; memory_plan_test.cc compares it
// with what the allocator measures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/model/hugging_face.h"
#include "cistron/model/mixtral_config.h"
#include "cistron/tensor/device.h"
#include "cistron/train/memory_ledger.h"
#include "cistron/train/precision.h"
#include "cistron/train/run_config.h"

namespace cistron::train {

struct MemoryProblem {
  model::MixtralConfig model;
  Precision precision = Precision::kFp32;
  RecipeOptions recipe{};
  OptimStates states = OptimStates::kF32;
  OptimGradients gradients = OptimGradients::kAuto;
  model::Recompute recompute = model::Recompute::kNone;
  DeviceType device = DeviceType::kCpu;
  std::int64_t tokens = 0;       // of a micro-batch
  bool one_micro_batch = true;   // a step has no other
  bool whole_batch = true;       // RunConfig::WholeBatch
  std::int64_t length = 0;       // of its rows: the longest sequence there may be
  std::int64_t eval_tokens = 0;  // of an evaluation's batch; 0: there is none
  std::int64_t threads = 1;      // of a CPU
  // Of many ranks; all else is one rank's.
  std::int64_t dp = 1, ep = 1;
  Sharding sharding = Sharding::kNone;
  TravellingRows ep_rows = TravellingRows::kExact;
  // Rows that the experts of a rank have room for, as a multiple of tokens · top_k: 1 where every
  // rank gets as many as it sends and buffers are exact, above it where they are made beforehand.
  double row_capacity = 1;

  std::int64_t Ranks() const { return dp * ep; }
  // Of one micro-batch, that this rank's experts have room for.
  std::int64_t ExpertRows(std::int64_t of_tokens) const;
};
MemoryProblem MemoryProblemOf(const RunConfig& config);

// Whether a parameter is one of the routed experts, which expert parallelism divides.
bool IsRoutedExpert(const std::string& parameter);
// What a rank holds of a parameter, in elements: its experts, its shard.
std::int64_t ElementsOfRank(const MemoryProblem& problem, const model::ParameterInfo& parameter);
// Bytes of an element of its gradient.
std::int64_t GradientSize(const MemoryProblem& problem, const model::ParameterInfo& parameter);

struct MemoryPlan {
  std::int64_t peak_bytes = 0;
  std::string where;              // "backward of layer 1: experts"
  std::vector<MemoryTerm> terms;  // at the peak, largest first
  // Of rows between ranks, which may be most at another moment.
  std::int64_t most_dispatch_bytes = 0;
  std::int64_t Of(MemoryKind kind) const;
};
MemoryPlan PlanMemory(const MemoryProblem& problem);

// Of collectives on a GPU, where there are ranks to talk to: an assumption (docs/plan.md).
inline constexpr std::int64_t kCollectiveReserve = std::int64_t{1} << 30;

}  // namespace cistron::train
