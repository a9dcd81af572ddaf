// Codecs, exhaustively: every code of every narrow type, and fp32 values around every rounding
// boundary, against a search for the nearest value that shares nothing with the codecs' arithmetic.
#include "cistron/base/float_types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cistron/base/philox.h"

namespace cistron {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// What a format is, written down from its definition: IEEE-style fields and the special codes.
template <class T>
struct Format;
template <>
struct Format<bf16> {
  static constexpr int kMantissa = 7, kBias = 127, kCodes = 1 << 16;
  static constexpr unsigned kLargest = 0x7f7f;
  static constexpr bool kSaturates = false;
};
template <>
struct Format<f16> {
  static constexpr int kMantissa = 10, kBias = 15, kCodes = 1 << 16;
  static constexpr unsigned kLargest = 0x7bff;
  static constexpr bool kSaturates = false;
};
template <>
struct Format<e4m3> {
  static constexpr int kMantissa = 3, kBias = 7, kCodes = 1 << 8;
  static constexpr unsigned kLargest = 0x7e;
  static constexpr bool kSaturates = true;
};
template <>
struct Format<e5m2> {
  static constexpr int kMantissa = 2, kBias = 15, kCodes = 1 << 8;
  static constexpr unsigned kLargest = 0x7b;
  static constexpr bool kSaturates = true;
};

template <class T>
T FromCode(unsigned code) {
  return T::FromBits(static_cast<decltype(T::bits)>(code));
}

// Value of a positive finite code by the definition of the format, in fp64.
template <class T>
double ValueOf(unsigned code) {
  using F = Format<T>;
  const int exponent = static_cast<int>(code >> F::kMantissa);
  const int mantissa = static_cast<int>(code & ((1u << F::kMantissa) - 1));
  if (exponent == 0) return std::ldexp(mantissa, 1 - F::kBias - F::kMantissa);
  return std::ldexp(mantissa + (1 << F::kMantissa), exponent - F::kBias - F::kMantissa);
}

// Code of the nearest value, ties to the even code, by search in the table of all values.
template <class T>
unsigned NearestCode(float x) {
  using F = Format<T>;
  static const std::vector<double> table = [] {
    std::vector<double> values;
    for (unsigned code = 0; code <= F::kLargest; ++code) values.push_back(ValueOf<T>(code));
    return values;
  }();
  const unsigned sign = std::signbit(x) ? F::kCodes / 2 : 0;
  const double magnitude = std::abs(static_cast<double>(x));
  const double last_step = table[F::kLargest] - table[F::kLargest - 1];
  if (magnitude >= table.back() + last_step / 2) {
    return sign | (F::kSaturates ? F::kLargest : F::kLargest + 1);  // +1 is Inf in bf16 and f16
  }
  if (magnitude > table.back()) return sign | F::kLargest;
  const auto above = std::lower_bound(table.begin(), table.end(), magnitude);
  const auto high = static_cast<unsigned>(above - table.begin());
  if (high == 0 || *above == magnitude) return sign | high;
  const double up = *above - magnitude;
  const double down = magnitude - table[high - 1];
  if (up == down) return sign | (high % 2 == 0 ? high : high - 1);
  return sign | (up < down ? high : high - 1);
}

template <class T>
class Codec : public ::testing::Test {};
using NarrowTypes = ::testing::Types<bf16, f16, e4m3, e5m2>;
TYPED_TEST_SUITE(Codec, NarrowTypes);

TYPED_TEST(Codec, EveryFiniteCodeDecodesToItsDefinition) {
  using F = Format<TypeParam>;
  for (unsigned code = 0; code <= F::kLargest; ++code) {
    ASSERT_EQ(double{float(FromCode<TypeParam>(code))}, ValueOf<TypeParam>(code)) << code;
    const float negative = FromCode<TypeParam>(code | F::kCodes / 2);
    ASSERT_EQ(double{negative}, -ValueOf<TypeParam>(code)) << code;
    ASSERT_TRUE(std::signbit(negative)) << code;
  }
}

TYPED_TEST(Codec, EveryCodeSurvivesARoundTrip) {
  using F = Format<TypeParam>;
  for (unsigned code = 0; code < F::kCodes; ++code) {
    const float value = FromCode<TypeParam>(code);
    const unsigned back = TypeParam(value).bits;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(float(FromCode<TypeParam>(back)))) << code;
    } else if (F::kSaturates && std::isinf(value)) {
      ASSERT_EQ(back, (code & F::kCodes / 2) | F::kLargest) << code;
    } else {
      ASSERT_EQ(back, code);
    }
  }
}

TYPED_TEST(Codec, CodesAboveTheLargestAreInfOrNan) {
  using F = Format<TypeParam>;
  for (unsigned code = F::kLargest + 1; code < F::kCodes / 2; ++code) {
    const float value = FromCode<TypeParam>(code);
    ASSERT_FALSE(std::isfinite(value)) << code;
    const bool infinity = !std::is_same_v<TypeParam, e4m3> && code == F::kLargest + 1;
    ASSERT_EQ(std::isinf(value), infinity) << code;
  }
}

TYPED_TEST(Codec, RoundsToNearestEvenAroundEveryBoundary) {
  using F = Format<TypeParam>;
  for (unsigned code = 0; code <= F::kLargest; ++code) {
    const double here = ValueOf<TypeParam>(code);
    const double next = code < F::kLargest
                            ? ValueOf<TypeParam>(code + 1)
                            : 2 * here - ValueOf<TypeParam>(code - 1);  // one step further
    const float value = static_cast<float>(here);
    const float middle = static_cast<float>((here + next) / 2);
    ASSERT_EQ(double{middle}, (here + next) / 2);  // the midpoint is an fp32 value
    for (const float x : {value, std::nextafter(value, kInf), std::nextafter(middle, 0.0f), middle,
                          std::nextafter(middle, kInf)}) {
      ASSERT_EQ(unsigned{TypeParam(x).bits}, NearestCode<TypeParam>(x)) << x;
      ASSERT_EQ(unsigned{TypeParam(-x).bits}, NearestCode<TypeParam>(-x)) << -x;
    }
  }
}

TYPED_TEST(Codec, RoundsAnyFp32PatternToTheNearest) {
  const RandomStream stream(7, "fp32 patterns");
  for (std::uint64_t i = 0; i < 400000; ++i) {
    const float x = std::bit_cast<float>(stream.Bits(i));
    if (std::isnan(x)) continue;
    ASSERT_EQ(unsigned{TypeParam(x).bits}, NearestCode<TypeParam>(x)) << x;
  }
}

TYPED_TEST(Codec, Specials) {
  using F = Format<TypeParam>;
  constexpr unsigned kSign = F::kCodes / 2;
  constexpr unsigned kEnd = F::kSaturates ? F::kLargest : F::kLargest + 1;
  EXPECT_EQ(unsigned{TypeParam(kInf).bits}, kEnd);
  EXPECT_EQ(unsigned{TypeParam(-kInf).bits}, kEnd | kSign);
  EXPECT_EQ(unsigned{TypeParam(std::numeric_limits<float>::max()).bits}, kEnd);
  EXPECT_EQ(unsigned{TypeParam(0.0f).bits}, 0u);
  EXPECT_EQ(unsigned{TypeParam(-0.0f).bits}, kSign);
  for (const float nan :
       {kNan, -kNan, std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu)}) {
    const TypeParam stored(nan);
    EXPECT_TRUE(std::isnan(float(stored)));
    if (F::kSaturates) {
      EXPECT_EQ(unsigned{stored.bits}, 0x7fu);
    }
  }
}

TEST(Fp8, NegativeUnderflowKeepsItsSign) {
  const float tiny = -std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(e4m3(tiny).bits, 0x80);
  EXPECT_EQ(e5m2(tiny).bits, 0x80);
  EXPECT_EQ(e4m3(-0x1p-10f).bits, 0x80);                         // the tie goes to zero
  EXPECT_EQ(e4m3(std::nextafter(-0x1p-10f, -1.0f)).bits, 0x81);  // just beyond it
}

TEST(Bf16, SubnormalsAreKept) {
  EXPECT_EQ(float(bf16(0x1p-133f)), 0x1p-133f);
  EXPECT_EQ(bf16(0x1p-134f).bits, 0);
  EXPECT_EQ(bf16(std::nextafter(0x1p-134f, 1.0f)).bits, 1);
}

TEST(E8m0, EveryCodeIsItsPowerOfTwo) {
  for (unsigned code = 0; code < 255; ++code) {
    const float value = FromCode<e8m0>(code);
    ASSERT_EQ(double{value}, std::ldexp(1.0, static_cast<int>(code) - 127));
    ASSERT_EQ(e8m0::RoundUp(value).bits, code);
  }
  EXPECT_TRUE(std::isnan(float(FromCode<e8m0>(255))));
}

TEST(E8m0, RoundsUpToTheNextPowerOfTwo) {
  for (unsigned code = 0; code < 254; ++code) {
    const float value = FromCode<e8m0>(code);
    ASSERT_EQ(e8m0::RoundUp(std::nextafter(value, kInf)).bits, code + 1) << code;
    ASSERT_EQ(e8m0::RoundUp(std::nextafter(2 * value, 0.0f)).bits, code + 1) << code;
    ASSERT_EQ(e8m0::RoundUp(-2 * value).bits, code + 1) << code;  // a magnitude
  }
  EXPECT_EQ(e8m0::RoundUp(0.0f).bits, 0);
  EXPECT_EQ(e8m0::RoundUp(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(e8m0::RoundUp(std::bit_cast<float>(0x00400001u)).bits, 1);
  EXPECT_EQ(e8m0::RoundUp(std::numeric_limits<float>::max()).bits, 254);
  EXPECT_EQ(e8m0::RoundUp(kInf).bits, 254);
  EXPECT_EQ(e8m0::RoundUp(kNan).bits, 255);
}

// Rounding fp64 to odd in fp32 and then to nearest equals one rounding of the fp64 value.
TEST(RoundToOdd, MakesTheSecondRoundingTheOnlyOne) {
  for (unsigned code = 0; code < Format<bf16>::kLargest; ++code) {
    const double middle = (ValueOf<bf16>(code) + ValueOf<bf16>(code + 1)) / 2;
    const unsigned even = code % 2 == 0 ? code : code + 1;
    ASSERT_EQ(unsigned{bf16(internal::RoundToOdd(middle)).bits}, even);
    ASSERT_EQ(unsigned{bf16(internal::RoundToOdd(std::nextafter(middle, 1e308))).bits}, code + 1);
    ASSERT_EQ(unsigned{bf16(internal::RoundToOdd(std::nextafter(middle, 0.0))).bits}, code);
  }
}

TEST(RoundToOdd, ExactValuesAndEdges) {
  for (const double x : {0.0, 1.0, -1.5, 0x1p-149, -0x1p-149, 3.4028234663852886e38}) {
    EXPECT_EQ(double{internal::RoundToOdd(x)}, x);
  }
  EXPECT_EQ(internal::RoundToOdd(1e-300), 0x1p-149f);
  EXPECT_EQ(internal::RoundToOdd(-1e-300), -0x1p-149f);
  EXPECT_EQ(internal::RoundToOdd(1e300), std::numeric_limits<float>::max());
  EXPECT_EQ(internal::RoundToOdd(-1e300), std::numeric_limits<float>::lowest());
  EXPECT_EQ(internal::RoundToOdd(double{kInf}), kInf);
  EXPECT_TRUE(std::isnan(internal::RoundToOdd(double{kNan})));
  EXPECT_EQ(internal::RoundToOdd(1 + 0x1p-50), 1 + 0x1p-23f);
  EXPECT_EQ(internal::RoundToOdd(1 - 0x1p-50), 1 - 0x1p-24f);
}

}  // namespace
}  // namespace cistron
