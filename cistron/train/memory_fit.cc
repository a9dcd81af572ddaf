#include "cistron/train/memory_fit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <utility>
#include <vector>

#include "cistron/base/log.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::train {
namespace {
// A number in a file of the cgroup; nothing for "max" or without the file.
std::optional<std::int64_t> NumberIn(const char* file) {
  std::ifstream in(file);
  std::int64_t value = 0;
  if (in >> value) return value;
  return std::nullopt;
}

// Of the machine, whatever its cgroup may use of it.
std::int64_t SwapBytes() {
  struct sysinfo info {};
  if (sysinfo(&info) != 0) return 0;
  return static_cast<std::int64_t>(info.totalswap) * info.mem_unit;
}
}  // namespace

std::string BytesText(std::int64_t bytes) {
  const auto b = static_cast<double>(bytes);
  if (b >= 0x1p30) return fmt::format("{:.1f} GiB", b * 0x1p-30);
  if (bytes == 0) return "0";
  if (b >= 0x1p20) return fmt::format("{:.1f} MiB", b * 0x1p-20);
  return fmt::format("{:.1f} KiB", b * 0x1p-10);
}

std::string LargestTerms(const MemoryPlan& plan, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < std::min(count, plan.terms.size()); ++i) {
    const MemoryTerm& t = plan.terms[i];
    text += text.empty() ? "" : ", ";
    const bool of_parameters = t.kind <= MemoryKind::kGradients;
    text += of_parameters ? fmt::format("{} of {} {}", Name(t.kind), t.name, BytesText(t.bytes))
                          : fmt::format("{} ({}) {}", t.name, Name(t.kind), BytesText(t.bytes));
  }
  return text;
}

std::string AdviceToFit(const MemoryProblem& problem, std::int64_t bytes) {
  const std::int64_t row = std::max<std::int64_t>(problem.length, 1);
  MemoryProblem p = problem;
  std::int64_t needed = 0;
  for (; p.tokens >= row; p.tokens = p.tokens / 2 / row * row) {
    p.one_micro_batch = problem.one_micro_batch && p.tokens == problem.tokens;
    p.whole_batch = problem.whole_batch && p.tokens == problem.tokens;
    for (const auto& [recompute, name] : {std::pair{model::Recompute::kNone, "none"},
                                          {model::Recompute::kMoe, "moe"},
                                          {model::Recompute::kLayer, "layer"}}) {
      if (recompute < problem.recompute) continue;
      p.recompute = recompute;
      needed = PlanMemory(p).peak_bytes;
      std::vector<std::string> keys;
      if (recompute != problem.recompute) keys.push_back(fmt::format("recompute={}", name));
      if (p.tokens != problem.tokens) {
        keys.push_back(fmt::format("batch.micro_tokens={}", p.tokens));
      }
      if (keys.empty() || needed > bytes) continue;
      return fmt::format("{} would need {}", fmt::join(keys, " "), BytesText(needed));
    }
  }
  p.tokens = std::min(problem.tokens, row);
  p.one_micro_batch = problem.one_micro_batch && p.tokens == problem.tokens;
  p.whole_batch = problem.whole_batch && p.tokens == problem.tokens;
  std::string states;
  if (ModelDType(p.precision) == DType::kBF16 &&
      GradientDType(p.precision, p.states, p.gradients, p.whole_batch) == DType::kF32) {
    MemoryProblem rounds = p;
    rounds.gradients = OptimGradients::kBF16;
    states = fmt::format("; with optim.gradients=bf16, which rounds gradients, {}",
                         BytesText(PlanMemory(rounds).peak_bytes));
  }
  if (problem.precision == Precision::kBf16 && problem.states == OptimStates::kF32) {
    p.states = OptimStates::kBF16;
    states += fmt::format(
        "; with optim.states=bf16, which keeps no fp32 masters and trains other numbers, {}",
        BytesText(PlanMemory(p).peak_bytes));
  }
  return fmt::format(
      "even recompute=layer with one row of {} tokens at a time (batch.micro_tokens) would need "
      "{}{}; make the model smaller: model.num_hidden_layers, model.num_local_experts, "
      "model.intermediate_size{}",
      row, BytesText(needed), states,
      problem.device == DeviceType::kCuda ? "; or use more GPUs: parallel.ep, parallel.shard=full"
                                          : "");
}

Error WithMemoryAdvice(const Error& error, const MemoryProblem& problem) {
  const MemoryPlan plan = PlanMemory(problem);
  const std::int64_t memory = MemoryOf(problem.device);
  std::int64_t room = problem.device == DeviceType::kCuda ? memory - kDeviceReserve : memory;
  // What the device refused does not fit, whatever its size says: others use it too.
  room = std::min(room, plan.peak_bytes - plan.peak_bytes / 10);
  return {error.code(),
          fmt::format("{}\nthe step needs {} by its plan, most of it {}\n{} (`cistron plan` shows "
                      "all of it)",
                      error.message(), BytesText(plan.peak_bytes), LargestTerms(plan, 3),
                      AdviceToFit(problem, room)),
          error.where()};
}

std::int64_t MemoryOf(DeviceType device) {
  if (device == DeviceType::kCuda) {
    const auto devices = cuda::Devices();
    return devices.empty() ? 0 : devices.front().memory_bytes;
  }
  std::int64_t bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  for (const char* limit :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    bytes = std::min(bytes, NumberIn(limit).value_or(bytes));
  }
  return bytes;
}

std::string CpuMemoryFault(const MemoryProblem& problem, std::int64_t ranks, std::int64_t bytes) {
  const MemoryPlan plan = PlanMemory(problem);
  if (ranks * plan.peak_bytes <= bytes) return {};
  return fmt::format(
      "memory: this machine has {}, and the step needs {} by its plan{}, most of it {}. {}",
      BytesText(bytes), BytesText(ranks * plan.peak_bytes),
      ranks == 1 ? ""
                 : fmt::format(", {} on each of {} ranks here", BytesText(plan.peak_bytes), ranks),
      LargestTerms(plan, 3), AdviceToFit(problem, bytes / ranks));
}

void CheckMemory(const MemoryProblem& problem, std::int64_t ranks, bool warns) {
  const std::int64_t memory = MemoryOf(problem.device);
  if (problem.device != DeviceType::kCuda) {
    const std::string fault = CpuMemoryFault(problem, ranks, memory);
    if (fault.empty()) return;
    // Without swap the system would kill the run without a word.
    const std::int64_t swap = SwapBytes();
    if (!CpuMemoryFault(problem, ranks, memory + swap).empty()) {
      throw Error(ErrorCode::kOutOfMemory,
                  fault + (swap > 0 ? fmt::format(" There are {} of swap.", BytesText(swap)) : ""));
    }
    if (warns) LogWarning("{} It will use swap, which is slow.", fault);
    return;
  }
  if (memory == 0 || PlanMemory(problem).peak_bytes <= memory) return;
  throw WithMemoryAdvice(
      Error(ErrorCode::kOutOfMemory,
            fmt::format("memory: the GPU has {}, too little for the step", BytesText(memory))),
      problem);
}

}  // namespace cistron::train
