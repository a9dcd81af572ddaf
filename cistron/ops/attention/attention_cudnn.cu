// Attention through cuDNN: brings the operands into the form that its graphs take, and results back
// into that of attention.h. Plans: attention_cudnn_plan.h; sizes: attention_cudnn_shape.h.
#include <algorithm>
#include <mutex>
#include <set>
#include <string>

#include "cistron/base/log.h"
#include "cistron/ops/attention/attention_cudnn_plan.h"
#include "cistron/ops/attention/attention_cudnn_shape.h"
#include "cistron/ops/attention/attention_impls.h"
#include "cistron/ops/attention/attention_supports_cudnn.h"
#include "cistron/ops/attention/attention_tile.cuh"
#include "cistron/ops/cuda/rows.cuh"

namespace cistron::ops {
namespace internal {
namespace {

// The offsets of a plan's operands, one array each.
struct OffsetArrays {
  std::int64_t* at[kCudnnOperands];
  std::int64_t row_strides[kCudnnOperands];
};

// Lengths of `batch` sequences and the elements before each; those beyond the last are empty. No
// sequence gets longer than the plan, whatever the offsets say.
__global__ void sequences_kernel(SequenceRows sequences, std::int64_t batch, std::int64_t length,
                                 std::int32_t* lengths, OffsetArrays offsets) {
  for (std::int64_t s = GridStart(); s <= batch; s += GridStep()) {
    const std::int64_t begin = sequences.Begin(min(s, sequences.number));
    if (s < batch) {
      const std::int64_t own = s < sequences.number ? sequences.End(s) - begin : 0;
      lengths[s] = static_cast<std::int32_t>(min(own, length));
    }
    for (int i = 0; i < kCudnnOperands; ++i) {
      if (offsets.at[i] != nullptr) offsets.at[i][s] = begin * offsets.row_strides[i];
    }
  }
}

// cuDNN's log-sum-exp, [heads / at_once, batch, at_once, length] (a block a launch of `at_once`
// heads), and ours, [heads, T].
struct LseLayout {
  SequenceRows sequences;
  std::int64_t batch, heads, at_once, length;

  __device__ std::int64_t count() const { return batch * heads * length; }
  // Place in ours of a place in cuDNN's; -1 where there is no token.
  __device__ std::int64_t Ours(std::int64_t theirs) const {
    const std::int64_t row = theirs % length;
    std::int64_t rest = theirs / length;
    const std::int64_t head_of_launch = rest % at_once;
    rest /= at_once;
    const std::int64_t sequence = rest % batch, launch = rest / batch;
    if (sequence >= sequences.number) return -1;
    const std::int64_t begin = sequences.Begin(sequence);
    if (row >= sequences.End(sequence) - begin) return -1;
    return (launch * at_once + head_of_launch) * sequences.tokens + begin + row;
  }
};
__global__ void lse_from_cudnn_kernel(LseLayout layout, const float* theirs, float* ours) {
  for (std::int64_t i = GridStart(); i < layout.count(); i += GridStep()) {
    const std::int64_t to = layout.Ours(i);
    if (to >= 0) ours[to] = theirs[i];
  }
}
__global__ void lse_to_cudnn_kernel(LseLayout layout, const float* ours, float* theirs) {
  for (std::int64_t i = GridStart(); i < layout.count(); i += GridStep()) {
    const std::int64_t from = layout.Ours(i);
    theirs[i] = from >= 0 ? ours[from] : 0.0f;
  }
}

__global__ void clear_lse_kernel(SequenceRows sequences, std::int64_t heads, float* lse) {
  const std::int64_t used = sequences.Begin(sequences.number);
  const std::int64_t padding = sequences.tokens - used;
  for (std::int64_t i = GridStart(); i < heads * padding; i += GridStep()) {
    lse[i / padding * sequences.tokens + used + i % padding] = 0.0f;
  }
}

__global__ void store_rows_kernel(const bf16* from, std::int64_t rows, std::int64_t width, bf16* to,
                                  std::int64_t stride, bool accumulate) {
  for (std::int64_t i = GridStart(); i < rows * width; i += GridStep()) {
    StoreElement(to[i / width * stride + i % width], Value(from[i]), accumulate);
  }
}

// Whether cuDNN takes a matrix as it is: every head begins on 16 bytes. Ragged backward takes only
// rows one after another: with atomic additions cuDNN 9.19 confuses the offsets of q and dq (of k
// and dk) where their strides differ.
bool Fits(const Tensor& t, bool dense_rows) {
  return TakesPacks(t) && (!dense_rows || t.IsContiguous());
}
Tensor Fitting(const Context& ctx, const Tensor& t, bool dense_rows) {
  if (Fits(t, dense_rows)) return t;
  const Tensor copy = ctx.Empty(t.shape(), t.dtype());
  const auto row = static_cast<std::size_t>(t.dim(1)) * sizeof(bf16);
  cuda::Check(cudaMemcpy2DAsync(
                  copy.raw(), row, t.raw(), static_cast<std::size_t>(t.stride(0)) * sizeof(bf16),
                  row, static_cast<std::size_t>(t.dim(0)), cudaMemcpyDefault, StreamOf(ctx)),
              "attention: copy of rows");
  return copy;
}

// Where cuDNN writes a result: the output itself, or a temporary that Store moves or adds to it.
class Result {
 public:
  Result(const Context& ctx, const Output& out, const CudnnShape& shape, bool dense_rows)
      : out_(out),
        direct_(!Accumulates(out) && Fits(out.tensor, dense_rows)),
        tensor_(direct_ ? out.tensor : ctx.Empty(out.tensor.shape(), DType::kBF16)),
        whole_(!shape.ragged) {}

  const Tensor& tensor() const { return tensor_; }
  void Store(const Context& ctx, const SequenceRows& sequences) const {
    if (!whole_) ClearPadding<bf16>(ctx, sequences, Write(tensor_));
    if (direct_) return;
    const std::int64_t rows = tensor_.dim(0), width = tensor_.dim(1);
    store_rows_kernel<<<BlocksFor(rows * width), kThreads, 0, StreamOf(ctx)>>>(
        tensor_.data<bf16>(), rows, width, out_.tensor.data<bf16>(), out_.tensor.stride(0),
        Accumulates(out_));
    CheckLaunch("attention");
  }

 private:
  const Output& out_;
  bool direct_;
  Tensor tensor_;
  bool whole_;  // cuDNN writes every row
};

// What cuDNN refuses is told once, not in every layer of every step.
void WarnOnce(const std::string& refusal) {
  static std::mutex mutex;
  static auto& told = *new std::set<std::string>();
  const std::lock_guard lock(mutex);
  if (!told.insert(refusal).second) return;
  LogWarning("{}; our own kernel runs in its place, and is slower", refusal);
}

// Our own kernel for a problem that cuDNN has no plan for.
template <class... Matrices>
const AttentionRun& OwnKernel(AttentionProblem problem, const Matrices&... matrices) {
  problem.aligned = (TakesPacks(matrices) && ...);
  return kAttentionFlash.supports(problem) ? kAttentionFlash.run : kAttentionCuda.run;
}

// One call: the plan's sizes and what its launches share.
class Call {
 public:
  Call(const Context& ctx, const PackedSequences& sequences, const AttentionProblem& problem,
       bool backward, bool deterministic)
      : ctx_(ctx),
        config_(problem.config),
        rows_{sequences.cu_seqlens.data<std::int64_t>(), sequences.num_sequences(), problem.tokens},
        shape_(CudnnShapeOf(problem)),
        key_(CudnnKeyOf(problem, backward, deterministic)) {}

  const SequenceRows& rows() const { return rows_; }
  const CudnnShape& shape() const { return shape_; }

  void Set(CudnnOperand operand, const Tensor& t) {
    const auto i = static_cast<std::size_t>(operand);
    arguments_.matrices[i] = t.raw();
    // The stride of a single row says nothing.
    key_.row_strides[i] = t.dim(0) > 1 ? t.stride(0) : t.dim(1);
  }

  // Whether cuDNN has a plan for the operands that are set. Where it has none a warning says so,
  // once for each plan, and under `strict` that is an error.
  bool HasPlan() {
    try {
      plan_ = &FindCudnnPlan(key_);
      return true;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported || ctx_.strict()) throw;
      WarnOnce(e.message());
      return false;
    }
  }

  // Runs the plan, once for as many heads as it takes; `stats` as LseLayout has it.
  void Run(float* stats) {
    const std::int64_t group = config_.num_heads / config_.num_kv_heads;
    MakeSequences();
    CudnnPlan& plan = *plan_;
    const Tensor workspace =
        ctx_.Empty({std::max<std::int64_t>(1, plan.workspace_bytes())}, DType::kU8);
    for (std::int64_t head = 0; head < config_.num_kv_heads; head += key_.kv_heads) {
      CudnnArguments own = arguments_;
      for (int i = 0; i < kCudnnOperands; ++i) {
        const auto operand = static_cast<CudnnOperand>(i);
        void*& data = own.matrices[static_cast<std::size_t>(i)];
        if (data == nullptr) continue;
        data =
            static_cast<bf16*>(data) + head * (CudnnOfKeys(operand) ? 1 : group) * config_.head_dim;
      }
      own.stats = stats + head * group * shape_.batch * shape_.length;
      plan.Run(ctx_.stream().handle, own, workspace.raw());
    }
  }

  LseLayout Lse() const {
    return {rows_, shape_.batch, config_.num_heads, key_.heads, shape_.length};
  }
  // Whether cuDNN's log-sum-exp lies as ours does.
  bool SameLse() const { return !shape_.ragged && shape_.batch == 1; }

 private:
  void MakeSequences() {
    if (!shape_.ragged) return;
    lengths_ = ctx_.Empty({shape_.batch}, DType::kI32);
    offsets_ = ctx_.Empty({kCudnnOperands, shape_.batch + 1}, DType::kI64);
    arguments_.lengths = lengths_.raw();
    OffsetArrays arrays{};
    for (int i = 0; i < kCudnnOperands; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (arguments_.matrices[at] == nullptr) continue;
      arrays.at[i] = offsets_.data<std::int64_t>() + i * (shape_.batch + 1);
      arrays.row_strides[i] = key_.row_strides[at];
      arguments_.offsets[at] = arrays.at[i];
    }
    sequences_kernel<<<BlocksFor(shape_.batch + 1), kThreads, 0, StreamOf(ctx_)>>>(
        rows_, shape_.batch, shape_.length, lengths_.data<std::int32_t>(), arrays);
    CheckLaunch("attention");
  }

  const Context& ctx_;
  AttentionConfig config_;
  SequenceRows rows_;
  CudnnShape shape_;
  CudnnPlanKey key_;
  CudnnPlan* plan_ = nullptr;
  CudnnArguments arguments_;
  Tensor lengths_, offsets_;
};

AttentionProblem ProblemOf(const AttentionConfig& config, const PackedSequences& sequences,
                           const Tensor& q) {
  return {q.dtype(),        config, q.dim(0), sequences.num_sequences(), sequences.max_length,
          sequences.uniform};
}

unsigned LseBlocks(const CudnnShape& shape, std::int64_t heads) {
  return BlocksFor(shape.batch * shape.length * heads);
}

void Forward(const Context& ctx, const AttentionConfig& config, const PackedSequences& sequences,
             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
             const Output& o) {
  if (q.dim(0) == 0) return;
  const AttentionProblem problem = ProblemOf(config, sequences, q);
  Call call(ctx, sequences, problem, /*backward=*/false, /*deterministic=*/true);
  const CudnnShape& shape = call.shape();
  const Tensor own_q = Fitting(ctx, q, false), own_k = Fitting(ctx, k, false);
  const Tensor own_v = Fitting(ctx, v, false);
  const Result result(ctx, o, shape, false);
  call.Set(CudnnOperand::kQ, own_q);
  call.Set(CudnnOperand::kK, own_k);
  call.Set(CudnnOperand::kV, own_v);
  call.Set(CudnnOperand::kO, result.tensor());
  if (!call.HasPlan()) {
    return OwnKernel(problem, q, k, v, o.tensor).forward(ctx, config, sequences, q, k, v, lse, o);
  }
  const bool direct = lse && call.SameLse();
  const Tensor stats =
      direct ? lse : ctx.Empty({shape.batch * config.num_heads * shape.length}, DType::kF32);
  call.Run(stats.data<float>());
  result.Store(ctx, call.rows());
  if (lse && !direct) {
    lse_from_cudnn_kernel<<<LseBlocks(shape, config.num_heads), kThreads, 0, StreamOf(ctx)>>>(
        call.Lse(), stats.data<float>(), lse.data<float>());
    CheckLaunch("attention");
    if (shape.ragged) {
      clear_lse_kernel<<<64, kThreads, 0, StreamOf(ctx)>>>(call.rows(), config.num_heads,
                                                           lse.data<float>());
      CheckLaunch("attention");
    }
  }
}

template <bool kDeterministic>
void Backward(const Context& ctx, const AttentionConfig& config, const PackedSequences& sequences,
              const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
              const Tensor& lse, const Output& dq, const Output& dk, const Output& dv) {
  if (q.dim(0) == 0) return;
  const AttentionProblem problem = ProblemOf(config, sequences, q);
  Call call(ctx, sequences, problem, /*backward=*/true, kDeterministic);
  const CudnnShape& shape = call.shape();
  const bool dense_rows = shape.ragged;
  const auto fitting = [&](const Tensor& t) { return Fitting(ctx, t, dense_rows); };
  const Tensor own_q = fitting(q), own_k = fitting(k), own_v = fitting(v);
  const Tensor own_o = fitting(o), own_do = fitting(d_o);
  const Result result_q(ctx, dq, shape, dense_rows), result_k(ctx, dk, shape, dense_rows);
  const Result result_v(ctx, dv, shape, dense_rows);
  call.Set(CudnnOperand::kQ, own_q);
  call.Set(CudnnOperand::kK, own_k);
  call.Set(CudnnOperand::kV, own_v);
  call.Set(CudnnOperand::kO, own_o);
  call.Set(CudnnOperand::kDO, own_do);
  call.Set(CudnnOperand::kDQ, result_q.tensor());
  call.Set(CudnnOperand::kDK, result_k.tensor());
  call.Set(CudnnOperand::kDV, result_v.tensor());
  if (!call.HasPlan()) {
    return OwnKernel(problem, q, k, v, o, d_o, dq.tensor, dk.tensor, dv.tensor)
        .backward(ctx, config, sequences, d_o, q, k, v, o, lse, dq, dk, dv);
  }
  Tensor stats = lse;
  if (!call.SameLse()) {
    stats = ctx.Empty({shape.batch * config.num_heads * shape.length}, DType::kF32);
    lse_to_cudnn_kernel<<<LseBlocks(shape, config.num_heads), kThreads, 0, StreamOf(ctx)>>>(
        call.Lse(), lse.data<float>(), stats.data<float>());
    CheckLaunch("attention");
  }
  call.Run(stats.data<float>());
  for (const Result* result : {&result_q, &result_k, &result_v}) result->Store(ctx, call.rows());
}

// Whether cuDNN has a plan it is asked where the plan is needed: a question here would make plans,
// and those of backward in an evaluation too.
template <bool kDeterministic>
Support Supports(const AttentionProblem& p) {
  const Support support = AttentionCudnnSupports<kDeterministic>(p);
  if (!support || cuda::ComputeCapability() == 0) return support;
  return CudnnMissing().empty() ? support : Support::No(CudnnMissing());
}

}  // namespace

}  // namespace internal

extern constinit const AttentionImpl kAttentionCudnn = {
    "cudnn",
    internal::Supports<true>,
    {internal::Forward, internal::Backward<true>},
    DeviceType::kCuda};
extern constinit const AttentionImpl kAttentionCudnnAtomics = {
    "cudnn_atomics",
    internal::Supports<false>,
    {internal::Forward, internal::Backward<false>},
    DeviceType::kCuda};

}  // namespace cistron::ops
