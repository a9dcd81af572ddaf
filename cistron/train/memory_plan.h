// How much memory a training step needs, from shapes alone: the step's tensors are taken and given
// back in the order of the model's code (model/mixtral.cc, nn/), and the largest moment is the
// answer. Whoever changes which tensors live when changes this too; memory_plan_test.cc compares it
// with what the allocator measures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/base/error.h"
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
  model::Recompute recompute = model::Recompute::kNone;
  DeviceType device = DeviceType::kCpu;
  std::int64_t tokens = 0;       // of a micro-batch
  bool one_micro_batch = true;   // a step has no other
  std::int64_t length = 0;       // of its rows: the longest sequence there may be
  std::int64_t eval_tokens = 0;  // of an evaluation's batch; 0: there is none
  std::int64_t threads = 1;      // of a CPU
};
MemoryProblem MemoryProblemOf(const RunConfig& config);

struct MemoryPlan {
  std::int64_t peak_bytes = 0;
  std::string where;              // "backward of layer 1: experts"
  std::vector<MemoryTerm> terms;  // at the peak, largest first
  std::int64_t Of(MemoryKind kind) const;
};
MemoryPlan PlanMemory(const MemoryProblem& problem);

// Bytes as people read them: "52.1 GiB", "310 MiB".
std::string BytesText(std::int64_t bytes);
// "moments of experts 21.0 GiB, masters of experts 10.5 GiB, …": the `count` largest.
std::string LargestTerms(const MemoryPlan& plan, std::size_t count);

// What to change so that the step fits into `bytes`: the first choice of recompute, then smaller
// micro-batches of whole rows, that does, with what it needs; or that nothing but a smaller model
// would.
std::string AdviceToFit(const MemoryProblem& problem, std::int64_t bytes);

// An error of memory with what weighs most in the step and what to change, judged by the memory
// that the device had.
Error WithMemoryAdvice(const Error& error, const MemoryProblem& problem);

// Throws kOutOfMemory, with what to change, where a GPU's memory is less than the plan's peak. A
// CPU may have swap, and is asked for memory as the step needs it.
void CheckMemory(const MemoryProblem& problem);

// Of the machine's device 0, or of the machine under its cgroup's limit; 0: not known.
std::int64_t MemoryOf(DeviceType device);
// What a GPU takes for itself before the first tensor: its context, kernels and libraries.
inline constexpr std::int64_t kDeviceReserve = std::int64_t{1} << 30;

}  // namespace cistron::train
