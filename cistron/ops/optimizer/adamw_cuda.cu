// AdamW on a GPU: one pass over memory. Every block makes the factors from the scalars that lie on
// the device; the operations are the reference's in its order.
#include <limits>

#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/optimizer/adamw_impls.h"

namespace cistron::ops {
namespace {

using internal::kThreads;
using internal::LoadPack;
using internal::Pack;

struct Scalars {
  const double *lr, *step, *clip;
};

// The factors, in every thread. A step below 1 makes them NaN.
template <class T>
__device__ inline AdamWFactors<T> Factors(const AdamWConfig& config, const Scalars& scalars) {
  __shared__ double powers[2];
  constexpr unsigned kWarp = 32;
  const double step = *scalars.step;
  // The powers in warps of their own, so that they are made at once.
  if (threadIdx.x % kWarp == 0 && threadIdx.x / kWarp < 2) {
    const unsigned i = threadIdx.x / kWarp;
    powers[i] = step >= 1 ? PowerOf(i == 0 ? config.beta1 : config.beta2, step)
                          : std::numeric_limits<double>::quiet_NaN();
  }
  __syncthreads();
  return AdamWFactorsOf<T>(config, *scalars.lr, *scalars.clip, powers[0], powers[1]);
}

template <class T>
__device__ inline void Update(const AdamWFactors<T>& f, T g, T& p, T& m, T& v) {
  const T grad = g * f.clip;
  m = m + f.one_minus_beta1 * (grad - m);
  v = v * f.beta2 + f.one_minus_beta2 * grad * grad;
  const T denominator = sqrt(v) / f.root_correction2 + f.eps;
  p = p * f.decay - f.step_size * m / denominator;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    UpdateAll(AdamWConfig config, Scalars scalars, std::int64_t n, const T* g, T* p, T* m, T* v,
              bf16* low) {
  const AdamWFactors<T> factors = Factors<T>(config, scalars);
  const std::int64_t packs = n / N;
  for (std::int64_t i = internal::GridStart(); i < packs; i += internal::GridStep()) {
    const Pack<T, N> gradient = LoadPack<N>(g + i * N);
    Pack<T, N> parameter = LoadPack<N>(p + i * N);
    Pack<T, N> first = LoadPack<N>(m + i * N), second = LoadPack<N>(v + i * N);
    Pack<bf16, N> rounded;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      Update(factors, gradient.at[k], parameter.at[k], first.at[k], second.at[k]);
      rounded.at[k] = internal::Rounded<bf16>(static_cast<float>(parameter.at[k]));
    }
    StorePack(parameter, p + i * N);
    StorePack(first, m + i * N);
    StorePack(second, v + i * N);
    if (low != nullptr) StorePack(rounded, low + i * N);
  }
  // What is left of a whole pack.
  const std::int64_t i = packs * N + internal::GridStart();
  if (i >= n) return;
  Update(factors, g[i], p[i], m[i], v[i]);
  if (low != nullptr) low[i] = internal::Rounded<bf16>(static_cast<float>(p[i]));
}

void AdamWCuda(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
               const Tensor& g, const Tensor& p, const Tensor& m, const Tensor& v,
               const Tensor& low) {
  const std::int64_t n = p.numel();
  if (n == 0) return;
  const Scalars values{scalars.lr.data<double>(), scalars.step.data<double>(),
                       scalars.clip.data<double>()};
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    // Views of one dimension: only where they begin matters.
    const auto starts = [](const Tensor& t) {
      return !t || reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0;
    };
    internal::DispatchPack<T>(
        starts(g) && starts(p) && starts(m) && starts(v) && starts(low), [&](auto pack) {
          constexpr int kN = decltype(pack)::value;
          UpdateAll<T, kN>
              <<<internal::BlocksFor((n + kN - 1) / kN), kThreads, 0, internal::StreamOf(ctx)>>>(
                  config, values, n, g.data<T>(), p.data<T>(), m.data<T>(), v.data<T>(),
                  internal::DataOrNull<bf16>(low));
        });
  };
  if (p.dtype() == DType::kF64) {
    run(TypeTag<double>{});
  } else {
    run(TypeTag<float>{});
  }
  internal::CheckLaunch("AdamW");
}

}  // namespace

extern constinit const AdamWImpl kAdamWCuda = {
    "cuda", SupportsAdamWOnCuda, {AdamWCuda}, DeviceType::kCuda};

}  // namespace cistron::ops
