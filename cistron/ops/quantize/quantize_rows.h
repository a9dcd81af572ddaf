// Vector kernels of quantize over one row of values, for quantize_cpu.cc.
//
// A magnitude is the bits of |x| as f32: as integers they are ordered as the values are; those
// above kInfMagnitude are NaN.
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

inline constexpr std::uint32_t kInfMagnitude = 0x7f800000u;

// Largest magnitude of n values, 0 of none.
std::uint32_t MaxMagnitude(const float* x, std::int64_t n);
std::uint32_t MaxMagnitude(const bf16* x, std::int64_t n);

// largest[j] = the larger magnitude of largest[j] and x[j], NaN above all.
void MaxMagnitudes(const float* x, std::int64_t n, float* largest);
void MaxMagnitudes(const bf16* x, std::int64_t n, bf16* largest);

// Multipliers of single columns lie in the order of lanes of x's type: whole groups of
// kMultiplierPad columns, to which their number is rounded up, hold the same columns in another
// order.
inline constexpr std::int64_t kMultiplierPad = 32;

// MXFP8's codes of blocks whose largest magnitudes are these, none of them NaN; 2^(127 − code); and
// `moves`, which EncodeRow may use instead if all blocks are of common size: true if they are.
bool Mxfp8Scales(const float* largest, std::int64_t n, DType format, std::uint8_t* codes,
                 float* multipliers, std::int16_t* moves);
bool Mxfp8Scales(const bf16* largest, std::int64_t n, DType format, std::uint8_t* codes,
                 float* multipliers, std::int16_t* moves);

// The same for f32 scales: multipliers as ScaleFromAmax, NaN among the magnitudes included, and
// scales[j] = 1 / multiplier of j.
void F32Scales(const float* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers);
void F32Scales(const bf16* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers);

// codes[j] = fp8(x[j] · multiplier of j). `finite`: no element is NaN or Inf, and no product
// exceeds the format's maximum by more than an ulp of f32, as in MXFP8 blocks; only then may there
// be `moves`, of every column (null where not all blocks are of common size; bf16 is faster with
// them). What lies `ahead`
// elements after x is asked for, to be read next.
void EncodeRow(const float* x, std::int64_t n, DType format, const float* multipliers,
               const std::int16_t* moves, bool finite, std::int64_t ahead, std::uint8_t* codes);
void EncodeRow(const bf16* x, std::int64_t n, DType format, const float* multipliers,
               const std::int16_t* moves, bool finite, std::int64_t ahead, std::uint8_t* codes);
// With one multiplier, any values.
void EncodeRow(const float* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes);
void EncodeRow(const bf16* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes);

// MXFP8 along a row: blocks of 32, the last of which may be shorter. Any values.
void QuantizeRowMxfp8(const float* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales);
void QuantizeRowMxfp8(const bf16* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales);

}  // namespace cistron::ops::internal
