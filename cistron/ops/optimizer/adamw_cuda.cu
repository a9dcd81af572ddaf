// AdamW on a GPU: one pass over memory, many parameters a launch. A first kernel makes the factors
// from the scalars that lie on the device; the operations are the reference's in its order.
#include <limits>
#include <type_traits>

#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/optimizer/adamw_impls.h"

namespace cistron::ops {
namespace {

using internal::kThreads;
using internal::LoadPack;
using internal::Pack;
using internal::Value;

struct Scalars {
  const double *lr, *step, *clip;
};

// Parameters of one launch: their addresses travel with it.
constexpr int kParameters = 48;
template <class P, class G>
struct ParameterList {
  int count = 0;
  const G* g[kParameters];
  P *p[kParameters], *m[kParameters], *v[kParameters];
  bf16* low[kParameters];  // null where there is none
  std::int64_t numel[kParameters];
  std::int64_t first_part[kParameters + 1];  // part i belongs to t where first_part[t] ≤ i
  double weight_decay[kParameters];
  bool packs[kParameters];  // everything begins on 16 bytes
};

// The factors without a decay. A step below 1 makes them NaN. One warp a power, at once.
template <class C>
__global__ void MakeFactors(AdamWConfig config, Scalars scalars, AdamWFactors<C>* out) {
  __shared__ double powers[2];
  const double step = *scalars.step;
  const unsigned i = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    powers[i] = step >= 1 ? PowerOf(i == 0 ? config.beta1 : config.beta2, step)
                          : std::numeric_limits<double>::quiet_NaN();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *out = AdamWFactorsOf<C>(config, *scalars.lr, *scalars.clip, powers[0], powers[1]);
  }
}

template <class C>
__device__ inline void Update(const AdamWFactors<C>& f, C g, C& p, C& m, C& v) {
  const C grad = g * f.clip;
  m = m + f.one_minus_beta1 * (grad - m);
  v = v * f.beta2 + f.one_minus_beta2 * grad * grad;
  const C denominator = sqrt(v) / f.root_correction2 + f.eps;
  p = p * f.decay - f.step_size * m / denominator;
}

// Elements that a thread takes at once: 16 bytes of the narrower of parameter and gradient would
// spill where they differ.
template <class P, class G>
constexpr int kWidth = 16 / static_cast<int>(sizeof(P) > sizeof(G) ? sizeof(P) : sizeof(G));
// Packs that a thread updates; all are asked for before the first is used. More of the wide ones
// leave too few warps to a multiprocessor.
template <class P, class G>
constexpr int kSteps = kWidth<P, G> > 4 ? 2 : 4;
// Elements of a block.
template <class P, class G>
constexpr std::int64_t kPart = std::int64_t{kSteps<P, G>} * kThreads* kWidth<P, G>;

template <class P, class G>
__global__ void __launch_bounds__(kThreads)
    UpdateParts(ParameterList<P, G> list, const AdamWFactors<Compute<P>>* shared_factors,
                const double* lr) {
  using C = Compute<P>;
  constexpr int kN = kWidth<P, G>;
  AdamWFactors<C> factors = *shared_factors;
  if (isnan(factors.clip)) return;  // the update is stopped
  const std::int64_t part = blockIdx.x;
  int low = 0, high = list.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (list.first_part[middle] <= part ? low : high) = middle;
  }
  factors.decay = static_cast<C>(1 - *lr * list.weight_decay[low]);
  const G* g = list.g[low];
  P *p = list.p[low], *m = list.m[low], *v = list.v[low];
  bf16* rounded = list.low[low];
  const std::int64_t begin = (part - list.first_part[low]) * kPart<P, G>;
  const std::int64_t end = min(list.numel[low], begin + kPart<P, G>);
  if (end - begin == kPart<P, G> && list.packs[low]) {
    constexpr int kPacks = kSteps<P, G>;
    Pack<G, kN> gradient[kPacks];
    Pack<P, kN> parameter[kPacks], first[kPacks], second[kPacks];
#pragma unroll
    for (int s = 0; s < kPacks; ++s) {
      const std::int64_t i = begin + (s * kThreads + threadIdx.x) * kN;
      gradient[s] = LoadPack<kN>(g + i);
      parameter[s] = LoadPack<kN>(p + i);
      first[s] = LoadPack<kN>(m + i);
      second[s] = LoadPack<kN>(v + i);
    }
#pragma unroll
    for (int s = 0; s < kPacks; ++s) {
      const std::int64_t i = begin + (s * kThreads + threadIdx.x) * kN;
      Pack<bf16, kN> half;  // of a parameter in bf16 that is what it is rounded to itself
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        C a = Value(parameter[s].at[k]), b = Value(first[s].at[k]), c = Value(second[s].at[k]);
        Update(factors, static_cast<C>(Value(gradient[s].at[k])), a, b, c);
        parameter[s].at[k] = internal::Rounded<P>(a);
        first[s].at[k] = internal::Rounded<P>(b);
        second[s].at[k] = internal::Rounded<P>(c);
        if constexpr (std::is_same_v<P, bf16>) {
          half.at[k] = parameter[s].at[k];
        } else {
          half.at[k] = internal::Rounded<bf16>(static_cast<float>(a));
        }
      }
      StorePack(parameter[s], p + i);
      StorePack(first[s], m + i);
      StorePack(second[s], v + i);
      if (rounded != nullptr) StorePack(half, rounded + i);
    }
    return;
  }
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    C a = Value(p[i]), b = Value(m[i]), c = Value(v[i]);
    Update(factors, static_cast<C>(Value(g[i])), a, b, c);
    p[i] = internal::Rounded<P>(a);
    m[i] = internal::Rounded<P>(b);
    v[i] = internal::Rounded<P>(c);
    if (rounded != nullptr) rounded[i] = internal::Rounded<bf16>(static_cast<float>(a));
  }
}

template <class P, class G>
void UpdateAll(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
               std::span<const AdamWTensors> parameters) {
  using C = Compute<P>;
  const cudaStream_t stream = internal::StreamOf(ctx);
  const Tensor factors =
      ctx.Empty({static_cast<std::int64_t>(sizeof(AdamWFactors<C>))}, DType::kU8);
  auto* const shared = static_cast<AdamWFactors<C>*>(factors.raw());
  MakeFactors<C><<<1, 64, 0, stream>>>(
      config, {scalars.lr.data<double>(), scalars.step.data<double>(), scalars.clip.data<double>()},
      shared);
  internal::CheckLaunch("AdamW");
  for (std::size_t begin = 0; begin < parameters.size();) {
    ParameterList<P, G> list;
    list.first_part[0] = 0;
    for (; begin < parameters.size() && list.count < kParameters; ++begin) {
      const AdamWTensors& t = parameters[begin];
      if (t.p.numel() == 0) continue;
      const int i = list.count;
      list.g[i] = t.g.data<G>();
      list.p[i] = t.p.data<P>();
      list.m[i] = t.m.data<P>();
      list.v[i] = t.v.data<P>();
      list.low[i] = internal::DataOrNull<bf16>(t.low);
      list.numel[i] = t.p.numel();
      list.weight_decay[i] = t.weight_decay;
      // Views of one dimension: only where they begin matters.
      const auto starts = [](const Tensor& x) {
        return !x || reinterpret_cast<std::uintptr_t>(x.raw()) % 16 == 0;
      };
      list.packs[i] = starts(t.g) && starts(t.p) && starts(t.m) && starts(t.v) && starts(t.low);
      list.first_part[i + 1] = list.first_part[i] + (t.p.numel() + kPart<P, G> - 1) / kPart<P, G>;
      ++list.count;
    }
    const std::int64_t parts = list.first_part[list.count];
    if (parts == 0) continue;
    UpdateParts<P, G><<<static_cast<unsigned>(parts), kThreads, 0, stream>>>(
        list, shared, scalars.lr.data<double>());
    internal::CheckLaunch("AdamW");
  }
}

void AdamWCuda(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
               std::span<const AdamWTensors> parameters) {
  const bool low_gradient = parameters.front().g.dtype() == DType::kBF16;
  switch (parameters.front().p.dtype()) {
    case DType::kF64: return UpdateAll<double, double>(ctx, config, scalars, parameters);
    case DType::kF32:
      return low_gradient ? UpdateAll<float, bf16>(ctx, config, scalars, parameters)
                          : UpdateAll<float, float>(ctx, config, scalars, parameters);
    default:
      return low_gradient ? UpdateAll<bf16, bf16>(ctx, config, scalars, parameters)
                          : UpdateAll<bf16, float>(ctx, config, scalars, parameters);
  }
}

}  // namespace

extern constinit const AdamWImpl kAdamWCuda = {
    "cuda", SupportsAdamWOnCuda, {AdamWCuda}, DeviceType::kCuda};

}  // namespace cistron::ops
