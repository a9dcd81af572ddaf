// Argument checks and choice of implementation of balance_loss.
#include "cistron/ops/balance_loss/balance_loss.h"

#include "cistron/ops/balance_loss/balance_loss_impls.h"
#include "cistron/ops/check_tensor.h"

namespace cistron::ops {
namespace {

const BalanceLossRun& Choose(const Context& ctx, DType dtype, std::int64_t experts) {
  return Select(ctx, "balance_loss", BalanceLossImpls(), BalanceLossProblem{dtype, experts});
}

void RunLoadBalancing(const Context& ctx, std::span<const RouterOutputs> layers, std::int64_t top_k,
                      double coefficient, double value_factor, const Tensor& inv_tokens,
                      const Tensor& value, const Tensor& score_grad) {
  constexpr std::string_view kOp = "load_balancing_loss";
  CISTRON_CHECK(!layers.empty(), "{}: there are no layers", kOp);
  CISTRON_CHECK(top_k >= 1, "{}: top_k is {}", kOp, top_k);
  const Tensor& first = layers.front().counts;
  CISTRON_CHECK(first && first.rank() == 2, "{}: counts are {}, expected i64 [R, E]", kOp,
                Describe(first));
  for (const RouterOutputs& layer : layers) {
    CheckTensor(kOp, "counts", layer.counts, first.shape(), DType::kI64);
    CheckTensor(kOp, "score_sums", layer.score_sums, first.shape(), DType::kF64);
  }
  CheckTensor(kOp, "inv_tokens", inv_tokens, {}, DType::kF64);
  CheckTensor(kOp, "value", value, {}, DType::kF64);
  CheckTensor(kOp, "score_grad", score_grad, first.shape(), DType::kF64);
  Choose(ctx, DType::kF64, first.dim(1))
      .load_balancing(ctx, layers, top_k, coefficient, value_factor, inv_tokens, value, score_grad);
}

}  // namespace

// The scalar code answers to both names, since either may be asked for of every op.
std::span<const BalanceLossImpl> BalanceLossImpls() {
  static const BalanceLossImpl list[] = {
      kBalanceLossCuda, kBalanceLossCpu, {"ref", kBalanceLossCpu.supports, kBalanceLossCpu.run}};
  return list;
}

void LoadBalancingLoss(const Context& ctx, std::span<const RouterOutputs> layers,
                       std::int64_t top_k, double coefficient, const Tensor& inv_tokens,
                       const Tensor& value, const Tensor& score_grad) {
  RunLoadBalancing(ctx, layers, top_k, coefficient, 1.0, inv_tokens, value, score_grad);
}

void LayerLoadBalancingLoss(const Context& ctx, const RouterOutputs& layer, std::int64_t top_k,
                            double coefficient, const Tensor& inv_tokens, const Tensor& value,
                            const Tensor& score_grad) {
  // The definitions are a factor K apart, for one layer.
  const double inv_k = 1.0 / static_cast<double>(top_k);
  RunLoadBalancing(ctx, {&layer, 1}, top_k, coefficient * inv_k, inv_k, inv_tokens, value,
                   score_grad);
}

void RouterZLoss(const Context& ctx, const Tensor& z_sums, double coefficient,
                 const Tensor& inv_tokens, const Tensor& value, const Tensor& grad) {
  constexpr std::string_view kOp = "router_z_loss";
  CISTRON_CHECK(z_sums && z_sums.rank() == 1, "{}: z_sums are {}, expected f64 [R]", kOp,
                Describe(z_sums));
  CheckTensor(kOp, "z_sums", z_sums, z_sums.shape(), DType::kF64);
  CheckTensor(kOp, "inv_tokens", inv_tokens, {}, DType::kF64);
  CheckTensor(kOp, "value", value, {}, DType::kF64);
  CheckTensor(kOp, "grad", grad, z_sums.shape(), DType::kF64);
  Choose(ctx, DType::kF64, 0).z(ctx, z_sums, coefficient, inv_tokens, value, grad);
}

void UpdateExpertBias(const Context& ctx, const Tensor& counts, double rate, const Tensor& bias,
                      const Tensor& gate) {
  CISTRON_CHECK(counts && bias && counts.rank() == 1 && counts.shape() == bias.shape() &&
                    counts.dtype() == DType::kI64 && counts.IsContiguous() && bias.IsContiguous(),
                "expert bias: counts are {}, the bias is {}; expected [E] each", Describe(counts),
                Describe(bias));
  if (gate) CheckTensor("expert bias", "gate", gate, {}, DType::kF64);
  Choose(ctx, bias.dtype(), counts.dim(0)).update_bias(ctx, counts, rate, bias, gate);
}

void AddCounts(const Context& ctx, const Tensor& from, const Tensor& to) {
  CISTRON_CHECK(from && to && from.dtype() == DType::kI64 && to.dtype() == DType::kI64 &&
                    from.IsContiguous() && to.IsContiguous() &&
                    (to.numel() == 0 ? from.numel() == 0 : from.numel() % to.numel() == 0),
                "AddCounts: {} do not add to {}", Describe(from), Describe(to));
  Choose(ctx, DType::kF64, to.numel()).add_counts(ctx, from, to);
}

}  // namespace cistron::ops
