// AdamW on the CPU: one pass over memory. Vectors make the scalar reference's operations in its
// order, each correctly rounded, so that the bits are those of the reference on every machine.
#include <cmath>

#include "cistron/base/threads.h"
#include "cistron/ops/optimizer/adamw_impls.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/optimizer/adamw_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

// Updates kLanes elements in place and returns the parameters.
template <class G>
HWY_INLINE FloatVec UpdateVector(const AdamWFactors<float>& f, const G* g, float* p, float* m,
                                 float* v) {
  const FloatTag d;
  const FloatVec grad = hn::Mul(LoadFloat(g), hn::Set(d, f.clip));
  const FloatVec m0 = hn::LoadU(d, m);
  const FloatVec m1 = hn::Add(m0, hn::Mul(hn::Set(d, f.one_minus_beta1), hn::Sub(grad, m0)));
  const FloatVec square = hn::Mul(hn::Mul(hn::Set(d, f.one_minus_beta2), grad), grad);
  const FloatVec v1 = hn::Add(hn::Mul(hn::LoadU(d, v), hn::Set(d, f.beta2)), square);
  const FloatVec denominator =
      hn::Add(hn::Div(hn::Sqrt(v1), hn::Set(d, f.root_correction2)), hn::Set(d, f.eps));
  const FloatVec step = hn::Div(hn::Mul(hn::Set(d, f.step_size), m1), denominator);
  const FloatVec p1 = hn::Sub(hn::Mul(hn::LoadU(d, p), hn::Set(d, f.decay)), step);
  hn::StoreU(m1, d, m);
  hn::StoreU(v1, d, v);
  hn::StoreU(p1, d, p);
  return p1;
}

template <class G>
void UpdateRange(const AdamWFactors<float>& f, const G* g, float* p, float* m, float* v, bf16* low,
                 std::int64_t n) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const FloatVec updated = UpdateVector(f, g + i, p + i, m + i, v + i);
    if (low) StoreFloat(updated, low + i);
  }
  if (i == n) return;
  // The rest in a whole vector of its own.
  G gradient[kLanes] = {};
  float rest[3][kLanes] = {};
  const auto count = static_cast<std::size_t>(n - i);
  std::copy_n(g + i, count, gradient);
  std::copy_n(p + i, count, rest[0]);
  std::copy_n(m + i, count, rest[1]);
  std::copy_n(v + i, count, rest[2]);
  const FloatVec updated = UpdateVector(f, gradient, rest[0], rest[1], rest[2]);
  std::copy_n(rest[0], count, p + i);
  std::copy_n(rest[1], count, m + i);
  std::copy_n(rest[2], count, v + i);
  if (low) {
    bf16 rounded[kLanes];
    StoreFloat(updated, rounded);
    std::copy_n(rounded, count, low + i);
  }
}

void UpdateByFloats(const AdamWFactors<float>& f, const float* g, float* p, float* m, float* v,
                    bf16* low, std::int64_t n) {
  UpdateRange(f, g, p, m, v, low, n);
}
void UpdateByHalves(const AdamWFactors<float>& f, const bf16* g, float* p, float* m, float* v,
                    bf16* low, std::int64_t n) {
  UpdateRange(f, g, p, m, v, low, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(UpdateByFloats);
HWY_EXPORT(UpdateByHalves);

Support SupportsAdamW(const AdamWProblem& problem) {
  if (problem.dtype == DType::kF64) return Support::No("fp64 runs in the reference");
  if (problem.dtype == DType::kBF16) return Support::No("bf16 states run in the reference");
  if (problem.dtype != DType::kF32) return Support::No("masters are f32");
  return Support::Yes();
}

void AdamWCpu(const Context&, const AdamWConfig& config, const AdamWScalars& scalars,
              std::span<const AdamWTensors> parameters) {
  if (std::isnan(*scalars.clip.data<double>())) return;
  for (const AdamWTensors& t : parameters) {
    AdamWConfig own = config;
    own.weight_decay = t.weight_decay;
    const AdamWFactors<float> factors = MakeAdamWFactors<float>(own, scalars);
    const auto* const floats = t.g.dtype() == DType::kF32 ? t.g.data<float>() : nullptr;
    const auto* const halves = floats == nullptr ? t.g.data<bf16>() : nullptr;
    float* parameter = t.p.data<float>();
    float* first = t.m.data<float>();
    float* second = t.v.data<float>();
    bf16* rounded = t.low ? t.low.data<bf16>() : nullptr;
    ParallelChunks(
        t.p.numel(), std::int64_t{1} << 14, [&](std::int64_t begin, std::int64_t end, int) {
          float *const p = parameter + begin, *const m = first + begin, *const v = second + begin;
          bf16* const low = rounded ? rounded + begin : nullptr;
          if (halves != nullptr) {
            HWY_DYNAMIC_DISPATCH(UpdateByHalves)
            (factors, halves + begin, p, m, v, low, end - begin);
          } else {
            HWY_DYNAMIC_DISPATCH(UpdateByFloats)
            (factors, floats + begin, p, m, v, low, end - begin);
          }
        });
  }
}

}  // namespace

constinit const AdamWImpl kAdamWCpu = {"cpu", SupportsAdamW, {AdamWCpu}};

}  // namespace cistron::ops
#endif  // HWY_ONCE
