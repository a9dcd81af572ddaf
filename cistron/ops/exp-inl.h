// e^x and 2^x of vectors, compiled once for each instruction set (included after foreach_target.h;
// see vector-inl.h). The one exponential of the tuned kernels.
//
// Both functions take kCount vectors at a time and advance them in step: one exponential is a chain
// of a dozen dependent operations, and a processor that meets whole chains one after another runs
// out of room to reorder before its units are busy.
#include "cistron/ops/vector-inl.h"

#if defined(CISTRON_OPS_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_EXP_INL_H_
#undef CISTRON_OPS_EXP_INL_H_
#else
#define CISTRON_OPS_EXP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {

// Adding this to |x| < 2^21 rounds x to an integer n and leaves n + 127, the exponent field of 2^n,
// in the low bits of the sum.
inline constexpr float kRoundToExponent = 12582912.0f + 127.0f;  // 1.5·2^23 + 127

// x becomes 2^n·e^r, for |r| ≤ ln 2 / 2 and shifted = n + kRoundToExponent, −127 ≤ n ≤ 128.
// e^r = 1 + r + r²·q(r), q the minimax polynomial in relative error (4e-9). n = −127 gives 0 and
// n = 128 Inf: their exponent fields say so.
template <int kCount>
HWY_INLINE void ScaledExp(const FloatVec (&shifted)[kCount], const FloatVec (&r)[kCount],
                          FloatVec (&x)[kCount]) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  FloatVec r2[kCount], low[kCount], high[kCount];
  ForEach<kCount>([&](int i) { r2[i] = hn::Mul(r[i], r[i]); });
  ForEach<kCount>([&](int i) {
    low[i] = hn::MulAdd(hn::Set(d, 0.1666652113199234f), r[i], hn::Set(d, 0.4999999403953552f));
  });
  ForEach<kCount>([&](int i) {
    high[i] = hn::MulAdd(hn::Set(d, 0.008368724025785923f), r[i], hn::Set(d, 0.04166838899254799f));
  });
  ForEach<kCount>(
      [&](int i) { high[i] = hn::MulAdd(hn::Set(d, 0.0013814580161124468f), r2[i], high[i]); });
  ForEach<kCount>([&](int i) { low[i] = hn::MulAdd(high[i], r2[i], low[i]); });
  ForEach<kCount>([&](int i) { low[i] = hn::MulAdd(low[i], r2[i], r[i]); });
  ForEach<kCount>([&](int i) { low[i] = hn::Add(low[i], hn::Set(d, 1.0f)); });
  ForEach<kCount>([&](int i) {
    const auto power = hn::ShiftLeft<23>(hn::BitCast(di, shifted[i]));
    x[i] = hn::Mul(low[i], hn::BitCast(d, power));
  });
}

// min(high, max(low, x)) that keeps NaN: where one operand is NaN, Max and Min of x86 return the
// second, so x comes second.
HWY_INLINE FloatVec ClampKeepingNaN(FloatVec x, float low, float high) {
  const FloatTag d;
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Min(hn::Set(d, high), hn::Max(hn::Set(d, low), x)));
#else
  return hn::Min(hn::Set(d, high), hn::Max(hn::Set(d, low), x));
#endif
}

// x becomes e^x, within 1.25 ulp (exp_test.cc) for −87 ≤ x ≤ 88. Below −87.7, where e^x is
// subnormal, it is 0, between the two within 1 ulp of the smallest normal number; above 88.4 it is
// Inf; NaN stays NaN. e^0 is exactly 1.
template <int kCount>
HWY_INLINE void Exp(FloatVec (&x)[kCount]) {
  const FloatTag d;
  FloatVec shifted[kCount], n[kCount], r[kCount];
  // −127·ln 2 and a little more than 128·ln 2.
  ForEach<kCount>([&](int i) { x[i] = ClampKeepingNaN(x[i], -88.03f, 88.8f); });
  const FloatVec shift = hn::Set(d, kRoundToExponent);
  ForEach<kCount>([&](int i) { shifted[i] = hn::MulAdd(x[i], hn::Set(d, 1.44269504f), shift); });
  ForEach<kCount>([&](int i) { n[i] = hn::Sub(shifted[i], shift); });
  // r = x − n·ln 2 with ln 2 in two parts; the product of n and the first is exact.
  ForEach<kCount>([&](int i) { r[i] = hn::NegMulAdd(n[i], hn::Set(d, 0.693145751953125f), x[i]); });
  ForEach<kCount>([&](int i) { r[i] = hn::NegMulAdd(n[i], hn::Set(d, 1.42860677e-6f), r[i]); });
  ScaledExp(shifted, r, x);
}

// x becomes 2^x, within 1.25 ulp (exp_test.cc) for −126 ≤ x ≤ 127. Below −126.5 it is 0, from 127.5
// on Inf; NaN stays NaN. Powers of two are exact.
template <int kCount>
HWY_INLINE void Exp2(FloatVec (&x)[kCount]) {
  const FloatTag d;
  FloatVec shifted[kCount], r[kCount];
  ForEach<kCount>([&](int i) { x[i] = ClampKeepingNaN(x[i], -127.0f, 128.0f); });
  const FloatVec shift = hn::Set(d, kRoundToExponent);
  ForEach<kCount>([&](int i) { shifted[i] = hn::Add(x[i], shift); });
  ForEach<kCount>([&](int i) { r[i] = hn::Sub(x[i], hn::Sub(shifted[i], shift)); });
  ForEach<kCount>([&](int i) { r[i] = hn::Mul(r[i], hn::Set(d, 0.693147181f)); });
  ScaledExp(shifted, r, x);
}

// σ(x) = 1 / (1 + e^−x), accurate on both sides; e^−x overflows to Inf below −88.4, where σ(x) is 0
// but for 2^-127. σ(NaN) is NaN.
template <int kCount>
HWY_INLINE void Sigmoid(const FloatVec (&x)[kCount], FloatVec (&sigma)[kCount]) {
  const FloatVec one = hn::Set(FloatTag(), 1.0f);
  ForEach<kCount>([&](int i) { sigma[i] = hn::Neg(x[i]); });
  Exp(sigma);
  ForEach<kCount>([&](int i) { sigma[i] = hn::Div(one, hn::Add(one, sigma[i])); });
}

HWY_INLINE FloatVec Exp(FloatVec x) {
  FloatVec v[1] = {x};
  Exp(v);
  return v[0];
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
