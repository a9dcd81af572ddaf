// QuantizedTensor: 8-bit codes and the scales that give them back their size.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cistron/tensor/tensor.h"

namespace cistron {

// What shares a scale. Blocks are those of the logical tensor (Hugging Face order of rows and
// columns), whatever order a kernel stores it in.
enum class Scaling : std::uint8_t {
  kTensor,           // one f32 a group (expert), or one in all
  kBlock1x128,       // f32, 128 consecutive values of the summed dimension
  kBlock128x128,     // f32, a square of 128 × 128
  kMxfp8,            // e8m0, 32 consecutive values of the summed dimension
  kMxfp8Block32x32,  // e8m0, a square of 32 × 32
};
// "tensor", "block 1x128", …
std::string_view Name(Scaling scaling);
// Values along one side of a block; 0 for kTensor.
std::int64_t BlockSize(Scaling scaling);
// True when one copy serves products along both dimensions: the scale does not depend on which.
bool IsDirectionless(Scaling scaling);

// The dimension that a product sums over: row-wise copies serve products along the last dimension,
// column-wise ones along the first (of each group). Both are made from the high-precision tensor,
// never one from the other; neither is transposed.
enum class Direction : std::uint8_t { kRowwise, kColumnwise };

// decoded = value(code) · scale. e8m0 scales are powers of two; f32 ones are the inverse of the
// factor that was applied ("scale_inv").
struct QuantizedCopy {
  Tensor codes;   // e4m3 or e5m2, the logical shape
  Tensor scales;  // see ScaleShape
  explicit operator bool() const { return static_cast<bool>(codes); }
};

// How a tensor is quantised: what its copies have in common.
struct QuantizedLayout {
  Scaling scaling = Scaling::kMxfp8;
  DType format = DType::kE4M3;
  // Equal parts of the rows (of each group) or columns whose blocks restart: gate and up lie apart
  // in [2F, H] weights (row_parts = 2) and [M, 2F] activations (col_parts = 2). kTensor: no effect.
  std::int64_t row_parts = 1;
  std::int64_t col_parts = 1;
};

struct QuantizedTensor {
  QuantizedLayout layout;
  // [M, K], or [G, M, K] with one group a matrix. With split_sizes (i64 [G], on the device) the M
  // rows belong to G groups, one after another, and may be more than their sum: rows beyond it are
  // never read or written. Blocks restart at every group.
  Shape shape;
  Tensor split_sizes;
  QuantizedCopy rowwise, columnwise;  // undefined where not made; the same where directionless

  const QuantizedCopy& copy(Direction d) const {
    return d == Direction::kRowwise ? rowwise : columnwise;
  }
  std::int64_t num_groups() const;
  // Of codes and scales, each storage once.
  std::int64_t bytes() const;
};

// Groups [begin, end) of a tensor with groups, sharing its storage. `offsets` [G + 1] are the first
// rows of ragged groups, on the host; not used for [G, M, K].
QuantizedTensor SliceGroups(const QuantizedTensor& q, std::span<const std::int64_t> offsets,
                            std::int64_t begin, std::int64_t end);

// "mxfp8 e4m3 [8, 64]", for messages.
std::string Describe(const QuantizedTensor& q);

// Shape of the scales of one copy.
//   kTensor                 [G]
//   1-D blocks, row-wise    [M, Σ over parts of ceil(K_part / B)], leading [G] where the tensor has
//   1-D blocks, column-wise [ceil(M_part / B) over parts, K]; ragged groups: Σ_e ceil(n_e / B) rows
//                           are used of floor((M + G·(B − 1)) / B) allocated: the host knows M only
//   squares                 both rules at once
Shape ScaleShape(const QuantizedLayout& layout, const Shape& shape, const Tensor& split_sizes,
                 Direction direction);

}  // namespace cistron
