#include "cistron/nn/moe_layer.h"

#include "cistron/ops/activation/activation.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"

namespace cistron::nn {

MoeLayer::MoeLayer(ParameterStore& store, TokenDispatcher& dispatcher, const std::string& prefix,
                   const Config& config)
    : config_(config),
      store_(&store),
      dispatcher_(&dispatcher),
      gate_(store, prefix + "gate.weight", config.router.num_experts, config.hidden),
      name_(prefix + "moe") {
  const std::int64_t experts = config.router.num_experts;
  gate_up_ = store.Register({.name = prefix + "experts.gate_up_proj",
                             .shape = {experts, 2 * config.ffn, config.hidden},
                             .is_expert = true});
  down_ = store.Register({.name = prefix + "experts.down_proj",
                          .shape = {experts, config.hidden, config.ffn},
                          .is_expert = true});
}

Tensor MoeLayer::Forward(const ops::Context& ctx, const Tensor& x, const Tensor& token_mask,
                         const ops::PackedSequences& scopes, bool statistics, Routing& routing,
                         Saved* saved) const {
  const std::int64_t tokens = x.dim(0);
  const std::int64_t experts = config_.router.num_experts;
  const DType compute = ComputeType(x.dtype());

  routing.logits = ctx.Empty({tokens, experts}, x.dtype());
  gate_.Forward(ctx, x, ops::Write(routing.logits));
  ops::RouterOutputs& out = routing.router;
  out.experts = ctx.Empty({tokens, config_.router.top_k}, DType::kI32);
  out.probs = ctx.Empty({tokens, config_.router.top_k}, compute);
  if (statistics) {
    const std::int64_t rows = scopes.cu_seqlens ? scopes.num_sequences() : 1;
    out.counts = ctx.Empty({rows, experts}, DType::kI64);
    out.score_sums = ctx.Empty({rows, experts}, DType::kF64);
    out.nonfinite_tokens = ctx.Empty({}, DType::kI64);
  }
  ops::RouterForward(ctx, config_.router, routing.logits, Tensor(), token_mask, scopes, out);

  const TokenDispatcher::Dispatched d = dispatcher_->Dispatch(ctx, x, out.experts, out.probs);
  const std::int64_t rows = d.rows.max_rows();
  const Tensor pre = ctx.Empty({rows, 2 * config_.ffn}, x.dtype());
  {
    const AcquiredWeight w(*store_, gate_up_);
    ops::GroupedGemmForward(ctx, d.rows, w.tensor(), ops::Write(pre));
  }
  const Tensor act = ctx.Empty({rows, config_.ffn}, x.dtype());
  ops::SwiGluForward(ctx, pre, d.probs, d.rows.split_sizes, ops::Write(act));
  const Tensor expert_out = ctx.Empty({rows, config_.hidden}, x.dtype());
  {
    const AcquiredWeight w(*store_, down_);
    ops::GroupedGemmForward(ctx, {act, d.rows.split_sizes}, w.tensor(), ops::Write(expert_out));
  }
  Tensor y = dispatcher_->Combine(ctx, *d.state, expert_out);
  if (saved != nullptr) {
    saved->Push<Record>(this, name_) = {x, routing.logits, out.experts, d, pre};
  }
  return y;
}

Tensor MoeLayer::Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& token_mask,
                          const ops::PackedSequences& scopes, const Tensor& aux_grad,
                          Saved& saved) const {
  const Record r = saved.Pop<Record>(this, name_);
  const Tensor& split_sizes = r.dispatched.rows.split_sizes;
  const std::int64_t rows = r.dispatched.rows.max_rows();
  const DType dtype = dy.dtype();
  const DType compute = ComputeType(dtype);

  const GroupedTensor dout{dispatcher_->CombineBackward(ctx, *r.dispatched.state, dy), split_sizes};
  const Tensor dact = ctx.Empty({rows, config_.ffn}, dtype);
  {
    const AcquiredWeight w(*store_, down_);
    ops::GroupedGemmDgrad(ctx, dout, w.tensor(), ops::Write(dact));
  }
  const Tensor act = ctx.Empty({rows, config_.ffn}, dtype);
  const Tensor dpre = ctx.Empty({rows, 2 * config_.ffn}, dtype);
  const Tensor drow_probs = ctx.Empty({rows}, compute);
  ops::SwiGluBackward(ctx, dact, r.pre_activation, r.dispatched.probs, split_sizes,
                      ops::Write(dpre), ops::Write(drow_probs), ops::Write(act));
  ops::GroupedGemmWgrad(ctx, dout, {act, split_sizes}, store_->GradientOutput(down_));
  ops::GroupedGemmWgrad(ctx, {dpre, split_sizes}, r.dispatched.rows,
                        store_->GradientOutput(gate_up_));
  const Tensor drows = ctx.Empty({rows, config_.hidden}, dtype);
  {
    const AcquiredWeight w(*store_, gate_up_);
    ops::GroupedGemmDgrad(ctx, {dpre, split_sizes}, w.tensor(), ops::Write(drows));
  }
  const Tensor dx = ctx.Empty(r.x.shape(), dtype);
  const Tensor dprobs = ctx.Empty({r.x.dim(0), config_.router.top_k}, compute);
  dispatcher_->DispatchBackward(ctx, *r.dispatched.state, drows, drow_probs, ops::Write(dx),
                                ops::Write(dprobs));
  const Tensor dlogits = ctx.Empty(r.logits.shape(), dtype);
  ops::RouterBackward(ctx, config_.router, dprobs, r.logits, r.experts, token_mask, scopes,
                      aux_grad, Tensor(), ops::Write(dlogits));
  gate_.Backward(ctx, dlogits, r.x, ops::Accumulate(dx));
  return dx;
}

}  // namespace cistron::nn
