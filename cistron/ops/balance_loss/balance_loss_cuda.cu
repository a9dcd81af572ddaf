// balance_loss on a GPU: a few numbers a layer, so that what counts is that nothing leaves the
// device. A block takes a scope; a second kernel adds the scopes in order.
#include "cistron/ops/balance_loss/balance_loss_impls.h"
#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/cuda/supports.h"

namespace cistron::ops {
namespace {

using internal::BlockSum;
using internal::CheckLaunch;
using internal::kThreads;
using internal::StreamOf;

// Layers of one launch: their addresses travel with it.
constexpr int kLayers = 64;
struct Statistics {
  int layers;
  const std::int64_t* counts[kLayers];
  const double* score_sums[kLayers];
};

// grad[r, e] (= or +=) Σ_layers counts and scores[r, e] (= or +=) Σ_layers score sums.
__global__ void SumLayers(Statistics statistics, std::int64_t n, double* grad, double* scores,
                          bool accumulate) {
  for (std::int64_t i = internal::GridStart(); i < n; i += internal::GridStep()) {
    double count = accumulate ? grad[i] : 0, score = accumulate ? scores[i] : 0;
    for (int layer = 0; layer < statistics.layers; ++layer) {
      count += static_cast<double>(statistics.counts[layer][i]);
      score += statistics.score_sums[layer][i];
    }
    grad[i] = count;
    scores[i] = score;
  }
}

// Of scope blockIdx.x: values[r] = (n_r / N) · aux_r, and grad from Σ counts to the gradient.
__global__ void Scope(std::int64_t experts, double top_k, double layers, double coefficient,
                      const double* inv_tokens, const double* scores, double* grad,
                      double* values) {
  __shared__ double scratch[33];
  const std::int64_t r = blockIdx.x;
  grad += r * experts;
  scores += r * experts;
  double assignments = 0, products = 0;
  for (std::int64_t e = threadIdx.x; e < experts; e += kThreads) {
    assignments += grad[e];
    products += grad[e] * scores[e];
  }
  assignments = BlockSum(assignments, scratch);
  products = BlockSum(products, scratch);
  const double layer_tokens = assignments / top_k;  // T_r
  if (layer_tokens == 0) {                          // every count is 0, and so is grad
    if (threadIdx.x == 0) values[r] = 0;
    return;
  }
  const double weight = layer_tokens / layers * *inv_tokens;  // n_r / N
  const double scale = weight * static_cast<double>(experts) / (layer_tokens * layer_tokens);
  for (std::int64_t e = threadIdx.x; e < experts; e += kThreads) grad[e] *= coefficient * scale;
  if (threadIdx.x == 0) values[r] = scale * products;
}

// out = factor · Σ x, by one block; x[i] times *weight where that is given, and grad, where it is
// given, becomes gradient · *weight.
__global__ void SumScopes(std::int64_t n, const double* x, double factor, const double* weight,
                          double gradient, double* out, double* grad) {
  __shared__ double scratch[33];
  const double w = weight == nullptr ? 1 : *weight;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    sum += x[i] * w;
    if (grad != nullptr) grad[i] = gradient * w;
  }
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) *out = sum * factor;
}

void LoadBalancingCuda(const Context& ctx, std::span<const RouterOutputs> layers,
                       std::int64_t top_k, double coefficient, double value_factor,
                       const Tensor& inv_tokens, const Tensor& value, const Tensor& score_grad) {
  const std::int64_t scopes = score_grad.dim(0), experts = score_grad.dim(1);
  const std::int64_t n = score_grad.numel();
  const Tensor scores = ctx.Empty(score_grad.shape(), DType::kF64);
  const Tensor values = ctx.Empty({scopes}, DType::kF64);
  const cudaStream_t stream = StreamOf(ctx);
  for (std::size_t begin = 0; n > 0 && begin < layers.size(); begin += kLayers) {
    Statistics statistics{};
    for (const RouterOutputs& layer : layers.subspan(begin)) {
      if (statistics.layers == kLayers) break;
      statistics.counts[statistics.layers] = layer.counts.data<std::int64_t>();
      statistics.score_sums[statistics.layers++] = layer.score_sums.data<double>();
    }
    SumLayers<<<internal::BlocksFor(n), kThreads, 0, stream>>>(
        statistics, n, score_grad.data<double>(), scores.data<double>(), /*accumulate=*/begin > 0);
  }
  if (scopes > 0) {
    Scope<<<static_cast<unsigned>(scopes), kThreads, 0, stream>>>(
        experts, static_cast<double>(top_k), static_cast<double>(layers.size()), coefficient,
        inv_tokens.data<double>(), scores.data<double>(), score_grad.data<double>(),
        values.data<double>());
  }
  SumScopes<<<1, kThreads, 0, stream>>>(scopes, values.data<double>(), value_factor, nullptr, 0,
                                        value.data<double>(), nullptr);
  CheckLaunch("load_balancing_loss");
}

void ZCuda(const Context& ctx, const Tensor& z_sums, double coefficient, const Tensor& inv_tokens,
           const Tensor& value, const Tensor& grad) {
  SumScopes<<<1, kThreads, 0, StreamOf(ctx)>>>(z_sums.numel(), z_sums.data<double>(), 1.0,
                                               inv_tokens.data<double>(), coefficient,
                                               value.data<double>(), grad.data<double>());
  CheckLaunch("router_z_loss");
}

template <class T>
__global__ void MoveBias(std::int64_t experts, const std::int64_t* counts, double rate, T* bias,
                         const double* gate) {
  if (gate != nullptr && isnan(*gate)) return;
  __shared__ std::int64_t scratch[33];
  std::int64_t total = 0;
  for (std::int64_t e = threadIdx.x; e < experts; e += kThreads) total += counts[e];
  total = BlockSum(total, scratch);
  for (std::int64_t e = threadIdx.x; e < experts; e += kThreads) {
    // mean − count has the sign of total − E·count, which is exact.
    const std::int64_t difference = total - experts * counts[e];
    if (difference == 0) continue;
    internal::StoreElement(bias[e], static_cast<Compute<T>>(difference > 0 ? rate : -rate),
                           /*accumulate=*/true);
  }
}

void UpdateBiasCuda(const Context& ctx, const Tensor& counts, double rate, const Tensor& bias,
                    const Tensor& gate) {
  DispatchFloat("expert bias", bias.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    MoveBias<T><<<1, kThreads, 0, StreamOf(ctx)>>>(counts.numel(), counts.data<std::int64_t>(),
                                                   rate, bias.data<T>(),
                                                   internal::DataOrNull<double>(gate));
  });
  CheckLaunch("expert bias");
}

__global__ void AddRows(std::int64_t rows, std::int64_t n, const std::int64_t* from,
                        std::int64_t* to) {
  for (std::int64_t i = internal::GridStart(); i < n; i += internal::GridStep()) {
    std::int64_t sum = to[i];
    for (std::int64_t row = 0; row < rows; ++row) sum += from[row * n + i];
    to[i] = sum;
  }
}

void AddCountsCuda(const Context& ctx, const Tensor& from, const Tensor& to) {
  const std::int64_t n = to.numel();
  if (n == 0) return;
  AddRows<<<internal::BlocksFor(n), kThreads, 0, StreamOf(ctx)>>>(
      from.numel() / n, n, from.data<std::int64_t>(), to.data<std::int64_t>());
  CheckLaunch("AddCounts");
}

}  // namespace

extern constinit const BalanceLossImpl kBalanceLossCuda = {
    "cuda",
    internal::FloatsOnCuda<BalanceLossProblem>,
    {LoadBalancingCuda, ZCuda, UpdateBiasCuda, AddCountsCuda},
    DeviceType::kCuda};

}  // namespace cistron::ops
