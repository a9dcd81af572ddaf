// Storage types narrower than fp32, and their conversions.
//
// bf16, f16: IEEE-style, round to nearest even (RNE), subnormals kept, NaN stays NaN (quiet).
// e4m3 (fn), e5m2: OCP 8-bit floating point. Casts are RNE and saturate, ±Inf included: the result
// is
//   never Inf. NaN becomes 0x7F (sign free). The sign is kept, also of zero and of underflow.
// e8m0: power-of-two scale, code c is 2^(c-127), 0xFF is NaN.
// Nothing here flushes subnormals. Sources: OCP OFP8 1.0, OCP MX 1.0.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace cistron {

struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  explicit constexpr bf16(float value) : bits(FromFloat(value)) {}
  static constexpr bf16 FromBits(std::uint16_t b) {
    bf16 r;
    r.bits = b;
    return r;
  }
  // NOLINTNEXTLINE(google-explicit-constructor): exact
  constexpr operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

 private:
  static constexpr std::uint16_t FromFloat(float value) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x0040u);
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};

namespace internal {

// fp64 to fp32, rounded to odd: the exact values stay, all others take the neighbour with an odd
// last bit. A second rounding, to a type of at most 22 bits, then gives what one rounding of the
// fp64 value would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
constexpr float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  if (!(nearest - nearest == 0.0f)) {  // Inf or NaN
    const bool overflowed = value - value == 0.0;
    if (!overflowed) return nearest;
    return value > 0 ? std::numeric_limits<float>::max() : std::numeric_limits<float>::lowest();
  }
  const double difference = value - static_cast<double>(nearest);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (difference == 0.0 || (bits & 1u) != 0) return nearest;
  // The other neighbour, on the value's side, is odd. Magnitudes of one sign are ordered as
  // integers.
  if (nearest == 0.0f) return value > 0 ? 0x1p-149f : -0x1p-149f;
  const bool away_from_zero = (difference > 0) == (nearest > 0);
  return std::bit_cast<float>(away_from_zero ? bits + 1 : bits - 1);
}

// RNE of a finite magnitude to a small float with `kMantissa` bits, exponent bias `kBias`: returns
// exponent and mantissa bits packed, without saturation (the caller compares with its maximum).
template <int kMantissa, int kBias>
constexpr std::uint32_t RoundMagnitude(std::uint32_t fp32_magnitude) {
  const int exponent = static_cast<int>(fp32_magnitude >> 23) - 127;
  constexpr int kMinExponent = 1 - kBias;
  std::uint32_t mantissa = fp32_magnitude & 0x7fffffu;
  if (exponent == -127 && mantissa == 0) return 0;
  // Significand with the hidden bit at position 23; fp32 subnormals have none.
  const std::uint32_t significand = exponent == -127 ? mantissa : (mantissa | 0x800000u);
  const int unbiased = exponent == -127 ? -126 : exponent;
  int shift = 23 - kMantissa;
  std::uint32_t base = 0;
  if (unbiased < kMinExponent) {
    shift += kMinExponent - unbiased;
    if (shift > 24 + 1) return 0;  // below half of the smallest subnormal
  } else {
    // The hidden bit adds one to the exponent field, so the field starts one lower.
    base = static_cast<std::uint32_t>(unbiased + kBias - 1) << kMantissa;
  }
  const std::uint64_t wide = significand;
  const std::uint64_t half = std::uint64_t{1} << (shift - 1);
  const std::uint64_t odd = (wide >> shift) & 1u;
  return base + static_cast<std::uint32_t>((wide + half - 1 + odd) >> shift);
}

template <int kMantissa, int kBias>
constexpr float SmallToFloat(std::uint32_t magnitude, bool negative) {
  const std::uint32_t exponent = magnitude >> kMantissa;
  const std::uint32_t mantissa = magnitude & ((1u << kMantissa) - 1);
  float value = 0;
  if (exponent == 0) {
    // Subnormal: mantissa · 2^(1 - bias - mantissa bits), exact in fp32.
    value = static_cast<float>(mantissa) *
            std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissa) << 23);
  } else {
    value = std::bit_cast<float>(((exponent - kBias + 127) << 23) | (mantissa << (23 - kMantissa)));
  }
  return negative ? -value : value;
}

}  // namespace internal

struct f16 {
  std::uint16_t bits = 0;

  f16() = default;
  explicit constexpr f16(float value) : bits(FromFloat(value)) {}
  static constexpr f16 FromBits(std::uint16_t b) {
    f16 r;
    r.bits = b;
    return r;
  }
  // NOLINTNEXTLINE(google-explicit-constructor): exact
  constexpr operator float() const {
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
    if (magnitude >= 0x7c00u) {
      return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    return internal::SmallToFloat<10, 15>(magnitude, sign != 0);
  }

 private:
  static constexpr std::uint16_t FromFloat(float value) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
    const std::uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (magnitude == 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
    const std::uint32_t rounded = internal::RoundMagnitude<10, 15>(magnitude);
    return static_cast<std::uint16_t>(sign | (rounded >= 0x7c00u ? 0x7c00u : rounded));
  }
};

struct e4m3 {
  static constexpr float kMax = 448.0f;
  std::uint8_t bits = 0;

  e4m3() = default;
  explicit constexpr e4m3(float value) : bits(FromFloat(value)) {}
  static constexpr e4m3 FromBits(std::uint8_t b) {
    e4m3 r;
    r.bits = b;
    return r;
  }
  // NOLINTNEXTLINE(google-explicit-constructor): exact
  constexpr operator float() const {
    const std::uint32_t magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
    return internal::SmallToFloat<3, 7>(magnitude, (bits & 0x80u) != 0);
  }

 private:
  static constexpr std::uint8_t FromFloat(float value) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 24) & 0x80u;
    const std::uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    const std::uint32_t rounded =
        magnitude == 0x7f800000u ? 0x7eu : internal::RoundMagnitude<3, 7>(magnitude);
    return static_cast<std::uint8_t>(sign | (rounded > 0x7eu ? 0x7eu : rounded));
  }
};

struct e5m2 {
  static constexpr float kMax = 57344.0f;
  std::uint8_t bits = 0;

  e5m2() = default;
  explicit constexpr e5m2(float value) : bits(FromFloat(value)) {}
  static constexpr e5m2 FromBits(std::uint8_t b) {
    e5m2 r;
    r.bits = b;
    return r;
  }
  // NOLINTNEXTLINE(google-explicit-constructor): exact
  constexpr operator float() const {
    const std::uint32_t magnitude = bits & 0x7fu;
    if (magnitude > 0x7cu) return std::numeric_limits<float>::quiet_NaN();
    if (magnitude == 0x7cu) {
      return (bits & 0x80u) ? -std::numeric_limits<float>::infinity()
                            : std::numeric_limits<float>::infinity();
    }
    return internal::SmallToFloat<2, 15>(magnitude, (bits & 0x80u) != 0);
  }

 private:
  static constexpr std::uint8_t FromFloat(float value) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 24) & 0x80u;
    const std::uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    const std::uint32_t rounded =
        magnitude == 0x7f800000u ? 0x7bu : internal::RoundMagnitude<2, 15>(magnitude);
    return static_cast<std::uint8_t>(sign | (rounded > 0x7bu ? 0x7bu : rounded));
  }
};

struct e8m0 {
  std::uint8_t bits = 0;

  e8m0() = default;
  static constexpr e8m0 FromBits(std::uint8_t b) {
    e8m0 r;
    r.bits = b;
    return r;
  }
  // Smallest power of two that is not below a magnitude (rounding up), as Transformer Engine's
  // MXFP8 scales do: 0 -> code 0, Inf -> 254, NaN -> 255.
  static constexpr e8m0 RoundUp(float value) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
    if (u > 0x7f800000u) return FromBits(0xff);
    if (u == 0x7f800000u) return FromBits(0xfe);
    const std::uint32_t exponent = u >> 23;
    const std::uint32_t mantissa = u & 0x7fffffu;
    const bool up = mantissa != 0 && exponent != 0xfe && !(exponent == 0 && mantissa <= 0x400000u);
    return FromBits(static_cast<std::uint8_t>(exponent + (up ? 1u : 0u)));
  }
  // NOLINTNEXTLINE(google-explicit-constructor): exact
  constexpr operator float() const {
    if (bits == 0xff) return std::numeric_limits<float>::quiet_NaN();
    if (bits == 0) return std::bit_cast<float>(0x00400000u);  // 2^-127, an fp32 subnormal
    return std::bit_cast<float>(std::uint32_t{bits} << 23);
  }
};

static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2);
static_assert(sizeof(e4m3) == 1 && sizeof(e5m2) == 1 && sizeof(e8m0) == 1);

}  // namespace cistron
