#include "cistron/nn/attention.h"

#include "cistron/ops/rope/rope.h"
#include "cistron/tensor/trace.h"

namespace cistron::nn {

SelfAttention::SelfAttention(ParameterStore& store, const std::string& prefix, std::int64_t hidden,
                             const ops::AttentionConfig& config,
                             std::shared_ptr<RotaryTable> rotary)
    : config_(config),
      q_(store, prefix + "q_proj.weight", config.num_heads * config.head_dim, hidden),
      k_(store, prefix + "k_proj.weight", config.num_kv_heads * config.head_dim, hidden),
      v_(store, prefix + "v_proj.weight", config.num_kv_heads * config.head_dim, hidden),
      o_(store, prefix + "o_proj.weight", hidden, config.num_heads * config.head_dim),
      rotary_(std::move(rotary)),
      name_(prefix + "attention") {}

Tensor SelfAttention::Forward(const ops::Context& ctx, const Tensor& x,
                              const ops::PackedSequences& sequences, Saved* saved) const {
  const TraceRange range("self_attn");
  const std::int64_t tokens = x.dim(0);
  Record r;
  r.q = ctx.Empty({tokens, q_.out_features()}, x.dtype());
  r.k = ctx.Empty({tokens, k_.out_features()}, x.dtype());
  r.v = ctx.Empty({tokens, v_.out_features()}, x.dtype());
  r.o = ctx.Empty({tokens, q_.out_features()}, x.dtype());
  const bool keep = saved != nullptr;
  Operand input = q_.Input(x);
  q_.Forward(ctx, input, keep ? &r.xq : nullptr, ops::Write(r.q));
  k_.Forward(ctx, input, keep ? &r.xk : nullptr, ops::Write(r.k));
  v_.Forward(ctx, input, keep ? &r.xv : nullptr, ops::Write(r.v));
  const Tensor angles = rotary_->ForPositions(ctx, sequences.max_length);
  ops::RopeForward(ctx, angles, sequences.positions, config_.head_dim, r.q);
  ops::RopeForward(ctx, angles, sequences.positions, config_.head_dim, r.k);
  if (keep) r.lse = ctx.Empty({config_.num_heads, tokens}, ComputeType(x.dtype()));
  ops::AttentionForward(ctx, config_, sequences, r.q, r.k, r.v, r.lse, ops::Write(r.o));
  Tensor y = ctx.Empty(x.shape(), x.dtype());
  Operand heads = o_.Input(r.o);
  o_.Forward(ctx, heads, keep ? &r.xo : nullptr, ops::Write(y));
  if (keep) saved->Push<Record>(this, name_) = std::move(r);
  return y;
}

Tensor SelfAttention::Backward(const ops::Context& ctx, const Tensor& dy,
                               const ops::PackedSequences& sequences, Saved& saved) const {
  const TraceRange range("self_attn.backward");
  const Record r = saved.Pop<Record>(this, name_);
  const Tensor d_o = ctx.Empty(r.o.shape(), dy.dtype());
  o_.Backward(ctx, dy, r.xo, ops::Write(d_o));
  const Tensor dq = ctx.Empty(r.q.shape(), dy.dtype());
  const Tensor dk = ctx.Empty(r.k.shape(), dy.dtype());
  const Tensor dv = ctx.Empty(r.v.shape(), dy.dtype());
  ops::AttentionBackward(ctx, config_, sequences, d_o, r.q, r.k, r.v, r.o, r.lse, ops::Write(dq),
                         ops::Write(dk), ops::Write(dv));
  const Tensor angles = rotary_->ForPositions(ctx, sequences.max_length);
  ops::RopeBackward(ctx, angles, sequences.positions, config_.head_dim, dq);
  ops::RopeBackward(ctx, angles, sequences.positions, config_.head_dim, dk);
  const Tensor dx = ctx.Empty(dy.shape(), dy.dtype());
  q_.Backward(ctx, dq, r.xq, ops::Write(dx));
  k_.Backward(ctx, dk, r.xk, ops::Accumulate(dx));
  v_.Backward(ctx, dv, r.xv, ops::Accumulate(dx));
  return dx;
}

}  // namespace cistron::nn
