// Tuned attention on the CPU: cuts a call into tasks and runs them; the kernels are in
// attention_forward_cpu.cc and attention_backward_cpu.cc.
#include <algorithm>
#include <array>

#include "cistron/base/threads.h"
#include "cistron/ops/attention/attention_blocks.h"
#include "cistron/ops/attention/attention_impls.h"

namespace cistron::ops {
namespace {

// Scratch memory of one task, from the context's allocator.
class ScratchBuffer {
 public:
  ScratchBuffer(Allocator& allocator, std::int64_t floats)
      : allocator_(allocator),
        bytes_(static_cast<std::size_t>(floats) * sizeof(float)),
        data_(static_cast<float*>(allocator.Allocate(bytes_))) {}
  ~ScratchBuffer() { allocator_.Deallocate(data_, bytes_); }
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;

  float* data() const { return data_; }

 private:
  Allocator& allocator_;
  std::size_t bytes_;
  float* data_;
};

// Pairs of query and key with queries in [first, last] of a sequence.
std::int64_t Pairs(std::int64_t first, std::int64_t last, std::int64_t window) {
  std::int64_t pairs = 0;
  const std::int64_t ramp_end = window == 0 ? last : std::min(last, window - 1);
  if (first <= ramp_end) pairs += (first + ramp_end + 2) * (ramp_end - first + 1) / 2;
  const std::int64_t flat_begin = std::max(first, ramp_end + 1);
  if (flat_begin <= last) pairs += window * (last - flat_begin + 1);
  return pairs;
}

template <class T>
void ForwardTyped(const Context& ctx, const AttentionConfig& config,
                  const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                  const Tensor& v, const Tensor& lse, const Output& o) {
  const AttentionForwardArgs<T> args{q.data<T>(),
                                     k.data<T>(),
                                     v.data<T>(),
                                     q.stride(0),
                                     k.stride(0),
                                     v.stride(0),
                                     o.tensor.stride(0),
                                     o.tensor.data<T>(),
                                     o.mode == WriteMode::kAccumulate,
                                     lse ? lse.data<float>() : nullptr,
                                     q.dim(0),
                                     config};
  const std::vector<AttentionTask> tasks =
      MakeAttentionTasks(config, sequences, TaskKind::kQueryBlocks);
  ParallelDynamic(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
    const ScratchBuffer scratch(ctx.allocator(), AttentionForwardScratch(config));
    AttentionForwardTask(args, tasks[static_cast<std::size_t>(i)], scratch.data());
  });
}

template <class T>
void BackwardTyped(const Context& ctx, const AttentionConfig& config,
                   const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                   const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                   const Output& dq, const Output& dk, const Output& dv) {
  const AttentionBackwardArgs<T> args{d_o.data<T>(),
                                      q.data<T>(),
                                      k.data<T>(),
                                      v.data<T>(),
                                      o.data<T>(),
                                      d_o.stride(0),
                                      q.stride(0),
                                      k.stride(0),
                                      v.stride(0),
                                      o.stride(0),
                                      lse.data<float>(),
                                      dq.tensor.data<T>(),
                                      dk.tensor.data<T>(),
                                      dv.tensor.data<T>(),
                                      dq.tensor.stride(0),
                                      dk.tensor.stride(0),
                                      dv.tensor.stride(0),
                                      dq.mode == WriteMode::kAccumulate,
                                      dk.mode == WriteMode::kAccumulate,
                                      dv.mode == WriteMode::kAccumulate,
                                      q.dim(0),
                                      config};
  const auto run = [&](TaskKind kind, const std::vector<AttentionTask>& tasks) {
    ParallelDynamic(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
      const AttentionTask& task = tasks[static_cast<std::size_t>(i)];
      const ScratchBuffer scratch(ctx.allocator(),
                                  AttentionBackwardScratch(config, kind, task.length));
      AttentionBackwardTask(args, kind, task, scratch.data());
    });
  };
  const std::vector<AttentionTask> whole =
      MakeAttentionTasks(config, sequences, TaskKind::kSequences);
  if (SequencesKeepBusy(whole, NumThreads())) {
    run(TaskKind::kSequences, whole);
  } else {
    run(TaskKind::kKeyBlocks, MakeAttentionTasks(config, sequences, TaskKind::kKeyBlocks));
    run(TaskKind::kQueryBlocks, MakeAttentionTasks(config, sequences, TaskKind::kQueryBlocks));
  }
}

// Zeros in rows beyond the last sequence; Accumulate leaves them.
void ClearPadding(const PackedSequences& sequences, const Output& out) {
  if (out.mode == WriteMode::kAccumulate) return;
  const std::int64_t used = sequences.cu_seqlens.data<std::int64_t>()[sequences.num_sequences()];
  const std::int64_t row_bytes =
      out.tensor.stride(0) * static_cast<std::int64_t>(SizeOf(out.tensor.dtype()));
  for (std::int64_t t = used; t < out.tensor.dim(0); ++t) {
    char* row = static_cast<char*>(out.tensor.raw()) + t * row_bytes;
    std::fill_n(row, out.tensor.dim(1) * static_cast<std::int64_t>(SizeOf(out.tensor.dtype())),
                char{0});
  }
}

Support Supports(const AttentionProblem& problem) {
  if (problem.dtype == DType::kF32 || problem.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(problem.dtype)));
}

void Forward(const Context& ctx, const AttentionConfig& config, const PackedSequences& sequences,
             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
             const Output& o) {
  if (q.dtype() == DType::kBF16) {
    ForwardTyped<bf16>(ctx, config, sequences, q, k, v, lse, o);
  } else {
    ForwardTyped<float>(ctx, config, sequences, q, k, v, lse, o);
  }
  ClearPadding(sequences, o);
  const std::int64_t used = sequences.cu_seqlens.data<std::int64_t>()[sequences.num_sequences()];
  for (std::int64_t h = 0; lse && h < config.num_heads; ++h) {
    std::fill_n(lse.data<float>() + h * lse.dim(1) + used, lse.dim(1) - used, 0.0f);
  }
}

void Backward(const Context& ctx, const AttentionConfig& config, const PackedSequences& sequences,
              const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
              const Tensor& lse, const Output& dq, const Output& dk, const Output& dv) {
  if (q.dtype() == DType::kBF16) {
    BackwardTyped<bf16>(ctx, config, sequences, d_o, q, k, v, o, lse, dq, dk, dv);
  } else {
    BackwardTyped<float>(ctx, config, sequences, d_o, q, k, v, o, lse, dq, dk, dv);
  }
  for (const Output* out : {&dq, &dk, &dv}) ClearPadding(sequences, *out);
}

}  // namespace

std::vector<AttentionTask> MakeAttentionTasks(const AttentionConfig& config,
                                              const PackedSequences& sequences, TaskKind kind) {
  const std::int64_t* cu = sequences.cu_seqlens.data<std::int64_t>();
  const std::int64_t heads =
      kind == TaskKind::kQueryBlocks ? config.num_heads : config.num_kv_heads;
  std::vector<AttentionTask> tasks;
  for (std::int64_t s = 0; s < sequences.num_sequences(); ++s) {
    const std::int64_t begin = cu[s], length = cu[s + 1] - cu[s];
    if (length == 0) continue;
    const std::int64_t block = kind == TaskKind::kSequences   ? length
                               : kind == TaskKind::kKeyBlocks ? kKeyBlock
                                                              : kQueryBlock;
    for (std::int64_t i = 0; i * block < length; ++i) {
      const std::int64_t first = i * block, last = std::min(length, first + block) - 1;
      // A key block is seen from as many queries as the mirrored query block sees keys.
      const std::int64_t cost = kind == TaskKind::kKeyBlocks
                                    ? Pairs(length - 1 - last, length - 1 - first, config.window)
                                    : Pairs(first, last, config.window);
      for (std::int64_t h = 0; h < heads; ++h) tasks.push_back({begin, length, h, i, cost});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const auto& a, const auto& b) { return a.cost > b.cost; });
  return tasks;
}

bool SequencesKeepBusy(const std::vector<AttentionTask>& sequences, int threads) {
  // The largest-first schedule: each task goes to the thread that is free first.
  std::vector<std::int64_t> busy(static_cast<std::size_t>(threads), 0);
  std::int64_t total = 0;
  for (const AttentionTask& task : sequences) {
    *std::min_element(busy.begin(), busy.end()) += task.cost;
    total += task.cost;
  }
  return 5 * *std::max_element(busy.begin(), busy.end()) * threads <= 7 * total;
}

AttentionImpl CpuAttention() {
  return {"cpu", Supports, {Forward, Backward}};
}

}  // namespace cistron::ops
