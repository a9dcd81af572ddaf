// Argument checks and choice of implementation of router.
#include "cistron/ops/router/router.h"

#include <algorithm>

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/router/router_impls.h"

namespace cistron::ops {
namespace {

constexpr std::string_view kOp = "router";
constexpr std::int64_t kMaxExperts = 512;
constexpr std::int64_t kMaxTopK = 32;

void CheckConfig(const RouterConfig& c) {
  CISTRON_CHECK(c.num_experts >= 1 && c.num_experts <= kMaxExperts,
                "router: {} experts are outside 1…{}", c.num_experts, kMaxExperts);
  CISTRON_CHECK(c.top_k >= 1 && c.top_k <= std::min(c.num_experts, kMaxTopK),
                "router: top-k {} is outside 1…{} for {} experts", c.top_k,
                std::min(c.num_experts, kMaxTopK), c.num_experts);
  if (c.num_groups == 1) {
    CISTRON_CHECK(c.groups_kept == 1, "router: {} groups kept of one group", c.groups_kept);
    return;
  }
  CISTRON_CHECK(c.score == ScoreFunction::kSigmoid, "router: groups ({}) need sigmoid scores",
                c.num_groups);
  CISTRON_CHECK(c.num_groups > 1 && c.num_experts % c.num_groups == 0,
                "router: {} groups do not divide {} experts", c.num_groups, c.num_experts);
  CISTRON_CHECK(c.groups_kept >= 1 && c.groups_kept <= c.num_groups, "router: {} groups kept of {}",
                c.groups_kept, c.num_groups);
  CISTRON_CHECK(c.top_k % c.groups_kept == 0, "router: {} groups kept do not divide top-k {}",
                c.groups_kept, c.top_k);
  CISTRON_CHECK(c.top_k / c.groups_kept <= c.num_experts / c.num_groups,
                "router: groups of {} experts do not hold top-k {} / {} groups kept",
                c.num_experts / c.num_groups, c.top_k, c.groups_kept);
}

// Checks what forward and backward have in common; returns T.
std::int64_t CheckInputs(const RouterConfig& config, const Tensor& logits, const Tensor& token_mask,
                         const PackedSequences& scopes) {
  CheckConfig(config);
  CISTRON_CHECK(logits && logits.rank() == 2, "router: logits are {}, expected [T, E]",
                Describe(logits));
  const std::int64_t tokens = logits.dim(0);
  CheckTensor(kOp, "logits", logits, {tokens, config.num_experts}, logits.dtype());
  if (token_mask) CheckTensor(kOp, "token_mask", token_mask, {tokens}, DType::kU8);
  if (scopes.cu_seqlens) {
    CISTRON_CHECK(scopes.cu_seqlens.rank() == 1 && scopes.cu_seqlens.dim(0) >= 1,
                  "router: cu_seqlens is {}, expected i64 [S + 1]", Describe(scopes.cu_seqlens));
    CheckTensor(kOp, "cu_seqlens", scopes.cu_seqlens, scopes.cu_seqlens.shape(), DType::kI64);
    if (!OnHost(scopes.cu_seqlens)) return tokens;
    const std::span<const std::int64_t> cu = scopes.cu_seqlens.span<std::int64_t>();
    CISTRON_CHECK(cu.front() == 0 && std::is_sorted(cu.begin(), cu.end()) && cu.back() <= tokens,
                  "router: cu_seqlens must rise from 0 to at most {} tokens; it goes from {} to {}",
                  tokens, cu.front(), cu.back());
  }
  return tokens;
}

void CheckExperts(const RouterConfig& config, const Tensor& experts, const Tensor& token_mask) {
  const std::int32_t* chosen = experts.data<std::int32_t>();
  for (std::int64_t i = 0; i < experts.numel(); ++i) {
    const std::int64_t t = i / config.top_k;
    if (token_mask && token_mask.data<std::uint8_t>()[t] == 0) continue;
    CISTRON_CHECK(chosen[i] >= 0 && chosen[i] < config.num_experts,
                  "router: expert {} of token {} is outside [0, {})", chosen[i], t,
                  config.num_experts);
  }
}

}  // namespace

std::span<const RouterImpl> RouterImpls() {
  static const RouterImpl list[] = {kRouterCuda, kRouterCpu, kRouterRef};
  return list;
}

void RouterForward(const Context& ctx, const RouterConfig& config, const Tensor& logits,
                   const Tensor& bias, const Tensor& token_mask, const PackedSequences& scopes,
                   const RouterOutputs& out) {
  const std::int64_t tokens = CheckInputs(config, logits, token_mask, scopes);
  const std::int64_t experts = config.num_experts, rows = NumScopes(scopes);
  const DType compute = ComputeType(logits.dtype());
  if (bias) {
    CISTRON_CHECK(config.score == ScoreFunction::kSigmoid,
                  "router: an expert bias needs sigmoid scores");
    CheckTensor(kOp, "bias", bias, {experts}, compute);
  }
  CheckTensor(kOp, "experts", out.experts, {tokens, config.top_k}, DType::kI32);
  CheckTensor(kOp, "probs", out.probs, {tokens, config.top_k}, compute);
  if (config.given_experts) CheckExperts(config, out.experts, token_mask);
  if (out.counts) CheckTensor(kOp, "counts", out.counts, {rows, experts}, DType::kI64);
  if (out.score_sums) CheckTensor(kOp, "score_sums", out.score_sums, {rows, experts}, DType::kF64);
  if (out.z_sums) CheckTensor(kOp, "z_sums", out.z_sums, {rows}, DType::kF64);
  if (out.nonfinite_tokens) {
    CheckTensor(kOp, "nonfinite_tokens", out.nonfinite_tokens, {}, DType::kI64);
  }
  Select(ctx, kOp, RouterImpls(), RouterProblem{logits.dtype(), config, tokens})
      .forward(ctx, config, logits, bias, token_mask, scopes, out);
}

void RouterBackward(const Context& ctx, const RouterConfig& config, const Tensor& dprobs,
                    const Tensor& logits, const Tensor& experts, const Tensor& token_mask,
                    const PackedSequences& scopes, const Tensor& aux_grad, const Tensor& z_grad,
                    const Output& dlogits) {
  const std::int64_t tokens = CheckInputs(config, logits, token_mask, scopes);
  const std::int64_t rows = NumScopes(scopes);
  if (dprobs) {
    CheckTensor(kOp, "dprobs", dprobs, {tokens, config.top_k}, ComputeType(logits.dtype()));
    CheckTensor(kOp, "experts", experts, {tokens, config.top_k}, DType::kI32);
    if (OnHost(experts)) CheckExperts(config, experts, token_mask);
  }
  if (aux_grad) CheckTensor(kOp, "aux_grad", aux_grad, {rows, config.num_experts}, DType::kF64);
  if (z_grad) CheckTensor(kOp, "z_grad", z_grad, {rows}, DType::kF64);
  CheckTensor(kOp, "dlogits", dlogits.tensor, logits.shape(), logits.dtype());
  Select(ctx, kOp, RouterImpls(), RouterProblem{logits.dtype(), config, tokens})
      .backward(ctx, config, dprobs, logits, experts, token_mask, scopes, aux_grad, z_grad,
                dlogits);
}

}  // namespace cistron::ops
