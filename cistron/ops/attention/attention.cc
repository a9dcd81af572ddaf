// Argument checks and choice of the implementation of attention.
#include "cistron/ops/attention/attention.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>
#include <vector>

#include "cistron/ops/attention/attention_cudnn_shape.h"
#include "cistron/ops/attention/attention_impls.h"
#include "cistron/ops/op_work.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::ops {
namespace {

void CheckConfig(const AttentionConfig& c) {
  CISTRON_CHECK(c.num_heads >= 1 && c.num_kv_heads >= 1 && c.num_heads % c.num_kv_heads == 0,
                "attention: {} key/value heads do not divide {} query heads", c.num_kv_heads,
                c.num_heads);
  CISTRON_CHECK(c.head_dim >= 1, "attention: head_dim {} is not positive", c.head_dim);
  CISTRON_CHECK(c.window >= 0, "attention: window {} is negative (0 means none)", c.window);
}

void CheckRows(std::string_view name, const Tensor& t, DType dtype, std::int64_t tokens,
               std::int64_t width) {
  CISTRON_CHECK(t && t.rank() == 2 && t.dtype() == dtype && t.dim(0) == tokens && t.dim(1) == width,
                "attention: {} is {}, not {} [{}, {}]", name, Describe(t), Name(dtype), tokens,
                width);
  CISTRON_CHECK(t.numel() == 0 || t.dim(1) == 1 || t.stride(1) == 1,
                "attention: {} has stride {} along the last dimension, not 1", name, t.stride(1));
}

void CheckLse(const Tensor& lse, DType dtype, std::int64_t heads, std::int64_t tokens) {
  CISTRON_CHECK(lse && lse.rank() == 2 && lse.dtype() == ComputeType(dtype) &&
                    lse.dim(0) == heads && lse.dim(1) == tokens && lse.IsContiguous(),
                "attention: lse is {}, not {} [{}, {}]", Describe(lse), Name(ComputeType(dtype)),
                heads, tokens);
}

void CheckSequences(const PackedSequences& sequences, std::int64_t tokens) {
  const Tensor& cu = sequences.cu_seqlens;
  CISTRON_CHECK(
      cu && cu.rank() == 1 && cu.dim(0) >= 1 && cu.dtype() == DType::kI64 && cu.IsContiguous(),
      "attention: cu_seqlens is {}, not i64 [sequences + 1]", Describe(cu));
  if (!OnHost(cu)) return;
  const std::span<const std::int64_t> v = cu.span<std::int64_t>();
  CISTRON_CHECK(v[0] == 0, "attention: cu_seqlens starts at {}, not 0", v[0]);
  for (std::size_t s = 1; s < v.size(); ++s) {
    CISTRON_CHECK(v[s] >= v[s - 1], "attention: cu_seqlens falls from {} to {} at sequence {}",
                  v[s - 1], v[s], s - 1);
  }
  CISTRON_CHECK(v.back() <= tokens, "attention: cu_seqlens ends at {}, beyond the {} tokens",
                v.back(), tokens);
}

bool Aligned(const Tensor& t) {
  const std::int64_t bytes = t.stride(0) * static_cast<std::int64_t>(SizeOf(t.dtype()));
  return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0 && (t.dim(0) <= 1 || bytes % 16 == 0);
}

// `matrices`: those of the call, of which q is the first.
const AttentionRun& Choose(const Context& ctx, const AttentionConfig& config,
                           const PackedSequences& sequences,
                           std::initializer_list<const Tensor*> matrices) {
  const Tensor& q = **matrices.begin();
  const bool aligned =
      std::all_of(matrices.begin(), matrices.end(), [](const Tensor* t) { return Aligned(*t); });
  const AttentionProblem problem{
      q.dtype(),         config, q.dim(0), sequences.num_sequences(), sequences.max_length,
      sequences.uniform, aligned};
  return Select(ctx, "attention", AttentionImplsFor(problem), problem);
}

// Of two products over the pairs that attention sees, where all sequences are as long as the
// longest: an upper bound where they are not.
double ForwardFlops(const AttentionConfig& config, const PackedSequences& sequences,
                    std::int64_t tokens) {
  const auto length =
      static_cast<double>(sequences.longest > 0 ? sequences.longest : sequences.max_length);
  const double window = config.window > 0 ? std::min<double>(length, config.window) : length;
  const double keys = window * (1 - window / (2 * std::max(length, 1.0)));  // of a query, mean
  return 4.0 * static_cast<double>(tokens) * keys *
         static_cast<double>(config.num_heads * config.head_dim);
}

// Whether our own kernels are faster than cuDNN's, which were measured on an H200
// (docs/performance-notes.md). cuDNN lays all sequences out as if they were as long as the longest,
// and its kernels for narrow heads and for offsets take longer to start.
bool FlashIsFaster(const AttentionProblem& p) {
  const std::int64_t dim = p.config.head_dim;
  if (p.uniform) return dim <= 32 && p.max_length <= 2048;
  constexpr std::int64_t kShortSequence = 384;
  return dim <= 64 || p.num_sequences * kShortSequence > p.tokens;
}

// What runs a problem on a GPU; null where nothing does, or not what the context asks for.
const AttentionImpl* OnGpu(const Context& ctx, const AttentionProblem& problem) {
  const std::string preferred = ctx.PreferredImpl("attention");
  for (const AttentionImpl& impl : AttentionImplsFor(problem)) {
    if (impl.device != DeviceType::kCuda) continue;
    if (!preferred.empty() && impl.name != preferred) continue;
    if (impl.supports(problem)) return &impl;
  }
  return nullptr;
}

}  // namespace

std::span<const AttentionImpl> AttentionImpls() {
  static const std::array impls = {kAttentionCudnn,        kAttentionFlash, kAttentionCuda,
                                   kAttentionCudnnAtomics, CpuAttention(),  RefAttention()};
  return impls;
}

std::string DescribeCudnn() {
  if (!cuda::IsBuilt()) return "not in this build";
  const std::string version = internal::CudnnVersion();
  return version.empty() ? internal::CudnnMissing() : "cuDNN " + version;
}

std::span<const AttentionImpl> AttentionImplsFor(const AttentionProblem& problem) {
  static const auto flash_first = [] {
    std::vector<AttentionImpl> impls(AttentionImpls().begin(), AttentionImpls().end());
    std::swap(impls[0], impls[1]);  // cudnn and flash
    return impls;
  }();
  const bool flash = FlashIsFaster(problem) && kAttentionFlash.supports(problem);
  return flash ? flash_first : AttentionImpls();
}

bool BoundsAreCheap(const Context& ctx, const AttentionProblem& bounded,
                    const AttentionProblem& typical) {
  const AttentionImpl* impl = OnGpu(ctx, bounded);
  const AttentionImpl* without = OnGpu(ctx, typical);
  if (without == nullptr) return true;
  if (impl == nullptr || impl->name != without->name) return false;
  if (impl->name != kAttentionCudnn.name && impl->name != kAttentionCudnnAtomics.name) return true;
  const internal::CudnnShape shape = internal::CudnnShapeOf(bounded);
  constexpr std::int64_t kMostPadding = 4;
  return shape.batch * shape.length <= kMostPadding * bounded.tokens;
}

void AttentionForward(const Context& ctx, const AttentionConfig& config,
                      const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& lse, const Output& o) {
  CheckConfig(config);
  CISTRON_CHECK(q && q.rank() == 2, "attention: q is {}, not [T, Hq·D]", Describe(q));
  const std::int64_t tokens = q.dim(0);
  const std::int64_t q_width = config.num_heads * config.head_dim;
  const std::int64_t kv_width = config.num_kv_heads * config.head_dim;
  CheckRows("q", q, q.dtype(), tokens, q_width);
  CheckRows("k", k, q.dtype(), tokens, kv_width);
  CheckRows("v", v, q.dtype(), tokens, kv_width);
  CheckRows("o", o.tensor, q.dtype(), tokens, q_width);
  if (lse) CheckLse(lse, q.dtype(), config.num_heads, tokens);
  CheckSequences(sequences, tokens);
  AnnounceWork(ctx, ForwardFlops(config, sequences, tokens), q, k, v, lse, o);
  Choose(ctx, config, sequences, {&q, &k, &v, &o.tensor})
      .forward(ctx, config, sequences, q, k, v, lse, o);
}

void AttentionBackward(const Context& ctx, const AttentionConfig& config,
                       const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                       const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                       const Output& dq, const Output& dk, const Output& dv) {
  CheckConfig(config);
  CISTRON_CHECK(q && q.rank() == 2, "attention: q is {}, not [T, Hq·D]", Describe(q));
  const std::int64_t tokens = q.dim(0);
  const std::int64_t q_width = config.num_heads * config.head_dim;
  const std::int64_t kv_width = config.num_kv_heads * config.head_dim;
  CheckRows("q", q, q.dtype(), tokens, q_width);
  CheckRows("k", k, q.dtype(), tokens, kv_width);
  CheckRows("v", v, q.dtype(), tokens, kv_width);
  CheckRows("o", o, q.dtype(), tokens, q_width);
  CheckRows("do", d_o, q.dtype(), tokens, q_width);
  CheckRows("dq", dq.tensor, q.dtype(), tokens, q_width);
  CheckRows("dk", dk.tensor, q.dtype(), tokens, kv_width);
  CheckRows("dv", dv.tensor, q.dtype(), tokens, kv_width);
  CheckLse(lse, q.dtype(), config.num_heads, tokens);
  CheckSequences(sequences, tokens);
  AnnounceWork(ctx, 2.5 * ForwardFlops(config, sequences, tokens), d_o, q, k, v, o, lse, dq, dk,
               dv);
  Choose(ctx, config, sequences, {&q, &k, &v, &o, &d_o, &dq.tensor, &dk.tensor, &dv.tensor})
      .backward(ctx, config, sequences, d_o, q, k, v, o, lse, dq, dk, dv);
}

}  // namespace cistron::ops
