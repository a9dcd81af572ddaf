#include "cistron/nn/moe_layer.h"

#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"

namespace cistron::nn {

MoeLayer::MoeLayer(ParameterStore& store, TokenDispatcher& dispatcher, const std::string& prefix,
                   const Config& config)
    : config_(config),
      dispatcher_(&dispatcher),
      gate_(store, prefix + "gate.weight", config.router.num_experts, config.hidden,
            Linear::Precision::kModel),
      name_(prefix + "moe") {
  const std::int64_t experts = config.router.num_experts;
  // One after another: parameters register in canonical order.
  experts_ = std::make_unique<Sequential>();
  experts_->Append(
      std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = experts,
                                                           .in_features = config.hidden,
                                                           .out_features = 2 * config.ffn,
                                                           .out_parts = 2,
                                                           .name = prefix + "experts.gate_up_proj",
                                                           .store = &store}));
  experts_->Append(std::make_unique<ScaledSwiGLU>(prefix + "experts.act_fn"));
  experts_->Append(
      std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = experts,
                                                           .in_features = config.ffn,
                                                           .out_features = config.hidden,
                                                           .name = prefix + "experts.down_proj",
                                                           .store = &store}));
}

Tensor MoeLayer::Forward(const ops::Context& ctx, const Tensor& x, const Tensor& token_mask,
                         const ops::PackedSequences& scopes, bool statistics, Routing& routing,
                         Saved* saved) const {
  const std::int64_t tokens = x.dim(0);
  const std::int64_t experts = config_.router.num_experts;
  const DType compute = ComputeType(x.dtype());

  routing.logits = ctx.Empty({tokens, experts}, x.dtype());
  Operand input = gate_.Input(x);
  gate_.Forward(ctx, input, nullptr, ops::Write(routing.logits));
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
  const Tensor expert_out = experts_->Forward(
      ctx, d.rows.data, {.split_sizes = d.rows.split_sizes, .scale = d.probs}, saved);
  Tensor y = dispatcher_->Combine(ctx, *d.state, expert_out);
  if (saved != nullptr) {
    saved->Push<Record>(this, name_) = {x, routing.logits, out.experts, d.state, d.rows.max_rows()};
  }
  return y;
}

Tensor MoeLayer::Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& token_mask,
                          const ops::PackedSequences& scopes, const Tensor& aux_grad,
                          Saved& saved) const {
  const Record r = saved.Pop<Record>(this, name_);
  const DType dtype = dy.dtype();
  const DType compute = ComputeType(dtype);

  const Tensor dout = dispatcher_->CombineBackward(ctx, *r.dispatch, dy);
  const Tensor drow_probs = ctx.Empty({r.rows}, compute);
  const Tensor drows = experts_->Backward(ctx, dout, {.scale = ops::Write(drow_probs)}, saved);
  const Tensor dx = ctx.Empty(r.x.shape(), dtype);
  const Tensor dprobs = ctx.Empty({r.x.dim(0), config_.router.top_k}, compute);
  dispatcher_->DispatchBackward(ctx, *r.dispatch, drows, drow_probs, ops::Write(dx),
                                ops::Write(dprobs));
  const Tensor dlogits = ctx.Empty(r.logits.shape(), dtype);
  ops::RouterBackward(ctx, config_.router, dprobs, r.logits, r.experts, token_mask, scopes,
                      aux_grad, Tensor(), ops::Write(dlogits));
  gate_.Backward(ctx, dlogits, {quant::BF16{}, r.x, {}}, ops::Accumulate(dx));
  return dx;
}

}  // namespace cistron::nn
