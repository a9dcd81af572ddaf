// Whether a step fits into a device, and what people are told where it does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cistron/base/error.h"
#include "cistron/train/memory_plan.h"

namespace cistron::train {

// Bytes as people read them: "52.1 GiB", "310 MiB".
std::string BytesText(std::int64_t bytes);
// "moments of experts 21.0 GiB, masters of experts 10.5 GiB, …": the `count` largest.
std::string LargestTerms(const MemoryPlan& plan, std::size_t count);

// What to change so that the step fits into `bytes`: the first choice of recompute, then smaller
// micro-batches of whole rows, that does, with what it needs; or that none does, and what else
// there is: states in bf16, a smaller model, more GPUs.
std::string AdviceToFit(const MemoryProblem& problem, std::int64_t bytes);

// An error of memory with what weighs most in the step and what to change, judged by the memory
// that the device had.
Error WithMemoryAdvice(const Error& error, const MemoryProblem& problem);

// Throws kOutOfMemory, with what to change, where a GPU's memory, or a machine's with its swap, is
// less than the plan's peak of the `ranks` ranks that share it. Where swap would be used it warns,
// if `warns`: one rank for all.
void CheckMemory(const MemoryProblem& problem, std::int64_t ranks = 1, bool warns = true);
// What to change, where a machine with `bytes` of memory has less than the plan's peak of that many
// ranks; else empty.
std::string CpuMemoryFault(const MemoryProblem& problem, std::int64_t ranks, std::int64_t bytes);

// Of the machine's device 0, or of the machine under its cgroup's limit; 0: not known.
std::int64_t MemoryOf(DeviceType device);
// What a GPU takes for itself before the first tensor: its context, kernels and libraries.
inline constexpr std::int64_t kDeviceReserve = std::int64_t{1} << 30;

}  // namespace cistron::train
