// AdamW on a GPU: one pass over memory, many parameters a launch. A first kernel makes the factors
// from the scalars that lie on the device; the operations are the reference's in its order.
#include <limits>

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

// IEEE's division and square root without their branches, for operands in the middle of the range:
// the same bits. What is out of it is for `Update`. Blocks of straight code are what lets the
// compiler mix the chains of several elements; with a branch an operation the update of bf16 states
// is bound by their latency, not by memory, at the clock of a card that training has warmed up.
//
// With y within an ulp of 1/d, a quotient that is corrected twice by its exact remainder is rounded
// as IEEE asks (Markstein, "Computation of elementary functions on the IBM RISC System/6000
// processor", IBM J. Res. Dev. 34, 1990); the roots likewise by one correction of rsqrt's 22 bits.
// `adamw_test` compares both with the reference over many values.
struct Middle {
  // Of n, d and the root's operand. Quotients of them are normal, and remainders exact.
  static __device__ bool Holds(float n, float d, float x) {
    return Between(fabsf(n), 0x1p-100f, 0x1p20f) & Between(d, 0x1p-40f, 0x1p20f) &
           Between(x, 0x1p-96f, 0x1p40f);
  }
  static __device__ float Reciprocal(float d) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
    return __fmaf_rn(y, __fmaf_rn(-d, y, 1), y);
  }
  // n / d, of which y is the reciprocal.
  static __device__ float Quotient(float n, float d, float y) {
    float q = n * y;
    q = __fmaf_rn(y, __fmaf_rn(-d, q, n), q);
    return __fmaf_rn(y, __fmaf_rn(-d, q, n), q);
  }
  static __device__ float Root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    const float root = x * y;
    return __fmaf_rn(__fmaf_rn(-root, root, x), 0.5f * y, root);
  }

 private:
  // NaN is between nothing.
  static __device__ bool Between(float x, float low, float high) { return x >= low && x <= high; }
};

// As Update; false, and nothing is to be used, where an operand is out of the middle.
__device__ inline bool UpdateInMiddle(const AdamWFactors<float>& f, float g, float& p, float& m,
                                      float& v) {
  const float grad = g * f.clip;
  m = m + f.one_minus_beta1 * (grad - m);
  v = v * f.beta2 + f.one_minus_beta2 * grad * grad;
  const float root = Middle::Root(v);
  const float denominator =
      Middle::Quotient(root, f.root_correction2, f.inverse_correction2) + f.eps;
  const float numerator = f.step_size * m;
  p = p * f.decay - Middle::Quotient(numerator, denominator, Middle::Reciprocal(denominator));
  return Middle::Holds(numerator, denominator, v);
}

// Of the elements of packs.
template <class P, class G, int kN>
__device__ inline void UpdatePack(const AdamWFactors<Compute<P>>& f, const Pack<G, kN>& g,
                                  Pack<P, kN>& p, Pack<P, kN>& m, Pack<P, kN>& v,
                                  Compute<P> (&updated)[kN]) {
  using C = Compute<P>;
  C first[kN], second[kN];
  bool done = false;
  const auto take = [&](int k) {
    updated[k] = Value(p.at[k]);
    first[k] = Value(m.at[k]);
    second[k] = Value(v.at[k]);
    return static_cast<C>(Value(g.at[k]));
  };
  if constexpr (std::is_same_v<P, bf16>) {  // wider states are bound by memory
    done = true;
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      const float gradient = take(k);
      done &= UpdateInMiddle(f, gradient, updated[k], first[k], second[k]);
    }
  }
  if (!done) {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      const C gradient = take(k);
      Update(f, gradient, updated[k], first[k], second[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    p.at[k] = internal::Rounded<P>(updated[k]);
    m.at[k] = internal::Rounded<P>(first[k]);
    v.at[k] = internal::Rounded<P>(second[k]);
  }
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
      C updated[kN];
      UpdatePack(factors, gradient[s], parameter[s], first[s], second[s], updated);
      StorePack(parameter[s], p + i);
      StorePack(first[s], m + i);
      StorePack(second[s], v + i);
      if (rounded != nullptr) {
        Pack<bf16, kN> low;
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          low.at[k] = internal::Rounded<bf16>(static_cast<float>(updated[k]));
        }
        StorePack(low, rounded + i);
      }
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
