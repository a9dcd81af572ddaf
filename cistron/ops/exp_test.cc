// The vector exponentials against the C library's in f64, for every instruction set of this
// machine.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/exp_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

// The size of `values` is a whole number of blocks.
template <int kCount, bool kBase2>
void Apply(float* values, std::size_t size) {
  const auto end = static_cast<std::int64_t>(size);
  for (std::int64_t i = 0; i < end; i += kCount * kLanes) {
    FloatVec v[kCount];
    LoadFloats(values + i, v);
    if constexpr (kBase2) {
      Exp2(v);
    } else {
      Exp(v);
    }
    StoreFloats(v, values + i);
  }
}

void ExpOfFour(float* values, std::size_t size) {
  Apply<4, false>(values, size);
}
void ExpOfOne(float* values, std::size_t size) {
  Apply<1, false>(values, size);
}
void Exp2OfTwo(float* values, std::size_t size) {
  Apply<2, true>(values, size);
}

// bf16 and back by pairs, and by single vectors.
void RoundTwo(const float* from, bf16* by_pairs, bf16* singly) {
  StoreFloat(LoadFloat(from), singly);
  StoreFloat(LoadFloat(from + kLanes), singly + kLanes);
  // In the lanes in which a load from bf16 leaves them: even elements, odd elements.
  float even[kLanes], odd[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) {
    even[i] = from[2 * i];
    odd[i] = from[2 * i + 1];
  }
  const FloatVec v[2] = {LoadFloat(even), LoadFloat(odd)};
  StoreFloats(v, by_pairs);
}

std::int64_t Lanes() {
  return kLanes;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(ExpOfFour);
HWY_EXPORT(ExpOfOne);
HWY_EXPORT(Exp2OfTwo);
HWY_EXPORT(RoundTwo);
HWY_EXPORT(Lanes);

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::size_t kLargestBlock = 64;  // elements of four vectors of AVX-512

void ForEachTarget(const std::function<void()>& f) {
  const std::int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  for (std::int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    f();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

void Exp(std::span<float> values) {
  HWY_DYNAMIC_DISPATCH(ExpOfFour)(values.data(), values.size());
}
void Exp2(std::span<float> values) {
  HWY_DYNAMIC_DISPATCH(Exp2OfTwo)(values.data(), values.size());
}
float One(const std::function<void(std::span<float>)>& function, float x) {
  std::vector<float> values(kLargestBlock, x);
  function(values);
  return values[0];
}

// Distance of the neighbouring floats about a normal value.
double Ulp(double value) {
  return std::ldexp(1.0, std::ilogb(value) - 23);
}

// The largest error in ulp over every `stride`-th float of magnitude [low, high].
double WorstUlp(const std::function<void(std::span<float>)>& function, double (*exact)(double),
                float low, float high, bool negative, std::uint32_t stride) {
  constexpr std::size_t kChunk = 1 << 14;
  double worst = 0;
  std::vector<float> x, got;
  const auto last = std::bit_cast<std::uint32_t>(high);
  for (auto bits = std::bit_cast<std::uint32_t>(low); bits <= last;) {
    x.assign(kChunk, 0.0f);
    for (std::size_t i = 0; i < kChunk && bits <= last; ++i, bits += stride) {
      const auto magnitude = std::bit_cast<float>(bits);
      x[i] = negative ? -magnitude : magnitude;
    }
    got = x;
    function(got);
    for (std::size_t i = 0; i < kChunk; ++i) {
      const double expected = exact(static_cast<double>(x[i]));
      const double error = std::abs(static_cast<double>(got[i]) - expected) / Ulp(expected);
      if (!(error <= worst)) worst = std::isnan(error) ? kInf : error;
    }
  }
  return worst;
}

double ExactExp(double x) {
  return std::exp(x);
}
double ExactExp2(double x) {
  return std::exp2(x);
}

constexpr double kBound = 1.25;  // ulp, as exp-inl.h says

// Dense in the octaves of the reduced argument, where e^r is at its worst, and a grid of the
// others. (Every float from 0.25 on, run once: 1.03 ulp at worst.)
TEST(VectorExp, WithinItsBound) {
  ForEachTarget([] {
    for (const bool negative : {false, true}) {
      EXPECT_LE(WorstUlp(Exp, ExactExp, 0.25f, 0.75f, negative, 3), kBound);
      EXPECT_LE(WorstUlp(Exp, ExactExp, 1e-30f, 0.25f, negative, 1009), kBound);
      EXPECT_LE(WorstUlp(Exp, ExactExp, 0.75f, negative ? 87.0f : 88.0f, negative, 11), kBound);
      EXPECT_LE(WorstUlp(Exp2, ExactExp2, 0.25f, 1.0f, negative, 3), kBound);
      EXPECT_LE(WorstUlp(Exp2, ExactExp2, 1e-30f, 0.25f, negative, 1009), kBound);
      EXPECT_LE(WorstUlp(Exp2, ExactExp2, 1.0f, negative ? 126.0f : 127.0f, negative, 11), kBound);
    }
  });
}

TEST(VectorExp, Edges) {
  ForEachTarget([] {
    for (const auto& function : {Exp, Exp2}) {
      EXPECT_EQ(One(function, 0.0f), 1.0f);
      EXPECT_EQ(One(function, -0.0f), 1.0f);
      EXPECT_EQ(One(function, -kInf), 0.0f);
      EXPECT_EQ(One(function, std::numeric_limits<float>::lowest()), 0.0f);
      EXPECT_EQ(One(function, kInf), kInf);
      EXPECT_EQ(One(function, std::numeric_limits<float>::max()), kInf);
      // All payloads, and signalling ones.
      for (const std::uint32_t nan : {0x7fc00000u, 0x7fc00001u, 0x7fffffffu, 0x7f800001u}) {
        EXPECT_TRUE(std::isnan(One(function, std::bit_cast<float>(nan)))) << std::hex << nan;
        EXPECT_TRUE(std::isnan(One(function, std::bit_cast<float>(nan | 0x80000000u))));
      }
    }
    EXPECT_EQ(One(Exp, -87.7f), 0.0f);
    EXPECT_NEAR(One(Exp, -87.5f), 0.0f, std::numeric_limits<float>::min());
    EXPECT_EQ(One(Exp, 88.4f), kInf);
    EXPECT_EQ(One(Exp2, -126.6f), 0.0f);
    EXPECT_EQ(One(Exp2, 127.6f), kInf);
    for (int n = -126; n <= 127; ++n) {
      EXPECT_EQ(One(Exp2, static_cast<float>(n)), std::ldexp(1.0f, n));
    }
  });
}

// The number of vectors at a time changes nothing.
TEST(VectorExp, OneVectorAndFourGiveTheSameBits) {
  ForEachTarget([] {
    std::vector<float> four(1 << 12);
    for (std::size_t i = 0; i < four.size(); ++i) four[i] = 0.05f * static_cast<float>(i) - 90.0f;
    std::vector<float> one = four;
    HWY_DYNAMIC_DISPATCH(ExpOfFour)(four.data(), four.size());
    HWY_DYNAMIC_DISPATCH(ExpOfOne)(one.data(), one.size());
    EXPECT_EQ(four, one);
  });
}

// Every upper half with lower halves around the ties, NaN of every kind, infinities, subnormals.
TEST(VectorRounding, Bf16AsTheConstructor) {
  ForEachTarget([] {
    const auto step = static_cast<std::size_t>(2 * HWY_DYNAMIC_DISPATCH(Lanes)());
    std::vector<float> x;
    for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
      for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
        x.push_back(std::bit_cast<float>(upper << 16 | lower));
      }
    }
    std::vector<bf16> by_pairs(x.size()), singly(x.size());
    for (std::size_t i = 0; i < x.size(); i += step) {
      HWY_DYNAMIC_DISPATCH(RoundTwo)(x.data() + i, by_pairs.data() + i, singly.data() + i);
    }
    std::size_t wrong = 0, wrong_pairs = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      wrong += singly[i].bits != bf16(x[i]).bits;
      wrong_pairs += by_pairs[i].bits != singly[i].bits;
    }
    EXPECT_EQ(wrong, 0u);
    EXPECT_EQ(wrong_pairs, 0u);
  });
}

}  // namespace
}  // namespace cistron::ops
#endif  // HWY_ONCE
