#include "cistron/nn/moe_layer.h"

#include <array>

#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/quant/autocast.h"
#include "cistron/tensor/trace.h"

namespace cistron::nn {

// A captured step may not copy from the host: the counts that passes had stay on the device.
Tensor MoeLayer::SharedSplit::Of(const ops::Context& ctx, std::int64_t rows) {
  const std::lock_guard lock(mutex_);
  Tensor& split = splits_[rows];
  if (!split || split.device() != ctx.allocator().device()) {
    split = ctx.Place(Tensor::FromSpan<std::int64_t>({1}, std::array{rows}));
  }
  return split;
}

Tensor MoeLayer::EvenLogits::Of(const ops::Context& ctx, std::int64_t tokens, std::int64_t experts,
                                DType dtype) {
  const std::lock_guard lock(mutex_);
  Tensor& ones = ones_[tokens];
  if (!ones || ones.device() != ctx.allocator().device()) {
    ones = ctx.Empty({tokens, experts}, dtype);
    const auto n = static_cast<std::size_t>(ones.numel());
    Convert(Tensor::FromSpan<float>(ones.shape(), std::vector<float>(n, 1.0f)), ones);
  }
  return ones;
}

namespace {

// A SwiGLU MLP a group. One op after another: parameters register in canonical order.
std::unique_ptr<Sequential> MakeExperts(ParameterStore& store, const std::string& prefix,
                                        std::int64_t groups, std::int64_t hidden, std::int64_t ffn,
                                        bool is_expert) {
  auto experts = std::make_unique<Sequential>();
  experts->Append(
      std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = groups,
                                                           .in_features = hidden,
                                                           .out_features = 2 * ffn,
                                                           .out_parts = 2,
                                                           .is_expert = is_expert,
                                                           .name = prefix + "gate_up_proj",
                                                           .store = &store}));
  experts->Append(std::make_unique<ScaledSwiGLU>(prefix + "act_fn"));
  experts->Append(std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = groups,
                                                                       .in_features = ffn,
                                                                       .out_features = hidden,
                                                                       .is_expert = is_expert,
                                                                       .name = prefix + "down_proj",
                                                                       .store = &store}));
  return experts;
}

// How many rows the shared expert computes: up to the last one that is not masked. Of a device the
// host cannot read the mask: all of them, since nothing reads the padding's.
std::int64_t RowsInUse(const ops::Context& ctx, const Tensor& token_mask, std::int64_t rows) {
  if (!token_mask || ctx.device().type != DeviceType::kCpu) return rows;
  const auto mask = token_mask.span<std::uint8_t>();
  while (rows > 0 && mask[static_cast<std::size_t>(rows - 1)] == 0) --rows;
  return rows;
}

// y += x in the rows in use.
void AddRows(const ops::Context& ctx, std::int64_t rows, const Tensor& x, const Tensor& y) {
  if (rows > 0) ops::AddTo(ctx, x.Slice(0, 0, rows), y.Slice(0, 0, rows));
}

}  // namespace

MoeLayer::MoeLayer(ParameterStore& store, TokenDispatcher& dispatcher, const std::string& prefix,
                   const Config& config)
    : config_(config),
      dispatcher_(&dispatcher),
      gate_(store, prefix + "gate.weight", config.router.num_experts, config.hidden,
            Linear::Precision::kModel),
      experts_(MakeExperts(store, prefix + "experts.", config.router.num_experts, config.hidden,
                           config.ffn, /*is_expert=*/true)),
      name_(prefix + "moe"),
      input_weight_(prefix + "experts.gate_up_proj") {
  if (config.shared_ffn > 0) {
    shared_split_ = std::make_unique<SharedSplit>();
    shared_ = MakeExperts(store, prefix + "shared_experts.", 1, config.hidden, config.shared_ffn,
                          /*is_expert=*/false);
  }
  if (config.force_balance) even_logits_ = std::make_unique<EvenLogits>();
  if (config.expert_bias) {
    bias_ = store.RegisterBuffer(
        {prefix + "gate.e_score_correction_bias", {config.router.num_experts}});
  }
}

Tensor MoeLayer::Forward(const ops::Context& ctx, const Tensor& input, const Tensor& token_mask,
                         const ops::PackedSequences& scopes, Statistics statistics,
                         const Noise& noise, Routing& routing, Saved* saved) const {
  const TraceRange range("mlp");
  const std::int64_t tokens = input.dim(0);
  const std::int64_t experts = config_.router.num_experts;
  const DType compute = ComputeType(input.dtype());
  Tensor x = input;
  if (config_.jitter > 0 && noise.step) {
    x = ctx.Empty(input.shape(), input.dtype());
    ops::Jitter(ctx, JitterOf(noise), noise.step, input, ops::Write(x));
  }

  routing.logits = ctx.Empty({tokens, experts}, x.dtype());
  Operand operand = gate_.Input(x);
  SavedOperand gate_input;
  gate_.Forward(ctx, operand, saved == nullptr ? nullptr : &gate_input, ops::Write(routing.logits));
  if (even_logits_ && noise.step) {
    // Numbers of U(1 − a, 1 + a), a near 1: any spread chooses experts evenly.
    constexpr double kAmplitude = 0.99;
    ops::Jitter(ctx, {kAmplitude, noise.seed, config_.layer, noise.first_token}, noise.step,
                even_logits_->Of(ctx, tokens, experts, x.dtype()), ops::Write(routing.logits));
  }
  ops::RouterOutputs& out = routing.router;
  ops::RouterConfig router = config_.router;
  router.given_experts = static_cast<bool>(out.experts);
  if (!out.experts) out.experts = ctx.Empty({tokens, router.top_k}, DType::kI32);
  out.probs = ctx.Empty({tokens, config_.router.top_k}, compute);
  if (statistics != Statistics::kNone) {
    const std::int64_t rows = scopes.cu_seqlens ? scopes.num_sequences() : 1;
    out.counts = ctx.Empty({rows, experts}, DType::kI64);
    out.score_sums = ctx.Empty({rows, experts}, DType::kF64);
    out.nonfinite_tokens = ctx.Empty({}, DType::kI64);
    if (statistics == Statistics::kLoadAndZ) out.z_sums = ctx.Empty({rows}, DType::kF64);
  }
  ops::RouterForward(ctx, router, routing.logits, bias_, token_mask, scopes, out);

  // Weight gradients need column-wise codes, whose blocks hold rows of several ranks: exact rows.
  const bool for_backward = saved != nullptr && !saved->is_dropped();
  const TokenDispatcher::Dispatched d = dispatcher_->Dispatch(
      ctx, x, out.experts, out.probs,
      for_backward ? std::nullopt : quant::RowCodesOf(quant::RecipeFor(input_weight_)));
  const Tensor expert_out = experts_->Forward(
      ctx, d.rows.data, {.split_sizes = d.rows.split_sizes, .scale = d.probs}, saved);
  Tensor y = dispatcher_->Combine(ctx, *d.state, expert_out);
  std::int64_t shared_rows = 0;
  if (shared_) {
    shared_rows = RowsInUse(ctx, token_mask, tokens);
    const Tensor split = shared_split_->Of(ctx, shared_rows);
    AddRows(ctx, shared_rows, shared_->Forward(ctx, x, {.split_sizes = split}, saved), y);
  }
  if (saved != nullptr) {
    saved->Push<Record>(this, name_) = {std::move(gate_input), routing.logits, out.experts, d.state,
                                        d.rows.max_rows(),     noise,          shared_rows};
  }
  return y;
}

Tensor MoeLayer::Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& token_mask,
                          const ops::PackedSequences& scopes, const StatisticsGradients& gradients,
                          Saved& saved) const {
  const TraceRange range("mlp.backward");
  const Record r = saved.Pop<Record>(this, name_);
  const DType dtype = dy.dtype();
  const DType compute = ComputeType(dtype);

  // What forward pushed last comes first.
  const Tensor dshared = shared_ ? shared_->Backward(ctx, dy, {}, saved) : Tensor();
  const Tensor drow_probs = ctx.Empty({r.rows}, compute);
  TokenDispatcher::Rest finish;
  const auto send = [&](const Tensor& drows) {
    finish = dispatcher_->BeginDispatchBackward(ctx, r.dispatch, drows, drow_probs);
  };
  BackwardOutputs wanted{.scale = ops::Write(drow_probs)};
  if (dispatcher_->SendsBeside(*r.dispatch)) wanted.input_ready = send;
  const Tensor drows =
      experts_->Backward(ctx, dispatcher_->CombineBackward(ctx, *r.dispatch, dy), wanted, saved);
  if (!finish) send(drows);
  const Tensor dx = ctx.Empty(r.x.tensor.shape(), dtype);
  const Tensor dprobs = ctx.Empty({r.x.tensor.dim(0), config_.router.top_k}, compute);
  finish(ops::Write(dx), ops::Write(dprobs));
  if (shared_) AddRows(ctx, r.shared_rows, dshared, dx);
  const Tensor dlogits = ctx.Empty(r.logits.shape(), dtype);
  ops::RouterBackward(ctx, config_.router, dprobs, r.logits, r.experts, token_mask, scopes,
                      gradients.score_sums, gradients.z_sums, ops::Write(dlogits));
  gate_.Backward(ctx, dlogits, r.x, ops::Accumulate(dx));
  if (config_.jitter > 0 && r.noise.step) {
    ops::Jitter(ctx, JitterOf(r.noise), r.noise.step, dx, ops::Write(dx));
  }
  return dx;
}

}  // namespace cistron::nn
