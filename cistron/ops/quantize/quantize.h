// quantize: high-precision values to 8-bit codes with scales, and back.
//
//   MXFP8   t = amax(block) · fl32(1 / fmax)  (NaN elements ignored);  code = e8m0 of t rounded up;
//           q = fp8(x · 2^(127 − code)), RNE, saturating; an element that is NaN becomes NaN alone
//   others  s = fmax / amax, 1 where amax is 0, Inf or NaN, at most the largest finite f32; with
//           power_of_two its exponent alone;  q = fp8(clamp(x · s, ±fmax));  the scale kept is 1 /
//           s
//   decode  value(q) · scale
//
// Shapes:  x [M, K] or [G, M, K]; see QuantizedTensor for groups, parts and the shapes of scales.
// Dtypes:  x f32 or bf16; codes e4m3 or e5m2; decoded values f32 or bf16 (rounded once; exact for
//          MXFP8 codes 3…246 of e4m3 and where the scale is a power of two in bf16's range).
// Layout:  rows of x contiguous, any row stride; codes and scales contiguous.
// Bits:    equal on every machine. Subnormals are honoured everywhere.
// Errors:  kInvalidArgument naming op, argument and values.
// Source:  OCP MX 1.0 for the formats; Transformer Engine 2 for the rounding of scales.
#pragma once

#include <span>

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

// Which copies are made. Directionless scalings make one copy, which serves both.
struct QuantizeCopies {
  bool rowwise = true;
  bool columnwise = true;
};

// Codes and scales left undefined in the tensors' storage, to be filled by Quantize. Throws when
// parts do not divide the dimension that they part.
QuantizedTensor EmptyQuantized(const Context& ctx, const Shape& shape, const Tensor& split_sizes,
                               const QuantizedLayout& layout, const QuantizeCopies& copies);

// Only for Scaling::kTensor: a factor known beforehand (delayed scaling) and where amax goes.
struct TensorScale {
  Tensor scale;  // f32 [G], s; undefined: computed from the amax of x
  Tensor amax;   // f32 [G], written when defined: amax of each group (0 when empty), NaN if any is
};

// Fills every copy that `out` has. power_of_two: for the f32 scales (MXFP8's always are).
void Quantize(const Context& ctx, const Tensor& x, bool power_of_two, const TensorScale& scale,
              const QuantizedTensor& out);

// f32 [G] of each group of x, as Quantize into `out` of Scaling::kTensor finds it: 0 when empty,
// NaN if any is.
void TensorAmax(const Context& ctx, const Tensor& x, const QuantizedTensor& out,
                const Tensor& amax);

// The decoded values of one copy, in the logical shape.
void Dequantize(const Context& ctx, const QuantizedTensor& q, Direction direction, const Output& y);

// s for an amax, as above.
float ScaleFromAmax(float amax, DType format, bool power_of_two);
// Largest finite value of an 8-bit format: 448 or 57344.
float MaxOf(DType format);

struct QuantizeProblem {
  Scaling scaling;
  DType format;
  DType dtype;  // of the high-precision side
};
struct BlockGrid;       // block_grid.h
struct QuantizeTarget;  // block_grid.h
struct QuantizeRun {
  // amax of each group, [G].
  void (*amax)(const Context&, const BlockGrid&, const Tensor& x, const Tensor& amax);
  // Fills every copy, one or both directions, reading x once if it can. `factor` f32 [G] is s of
  // kTensor; undefined for blocks.
  void (*quantize)(const Context&, const QuantizeProblem&, std::span<const QuantizeTarget> copies,
                   bool power_of_two, const Tensor& x, const Tensor& factor);
  void (*dequantize)(const Context&, const QuantizeProblem&, const BlockGrid&,
                     const QuantizedCopy& q, const Output& y);
};
using QuantizeImpl = Implementation<QuantizeProblem, QuantizeRun>;
std::span<const QuantizeImpl> QuantizeImpls();

}  // namespace cistron::ops
