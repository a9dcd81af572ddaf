// The layout in which Blackwell's tensor cores read e8m0 scales: tiles of 128 rows × 4 blocks.
#pragma once

#include "cistron/ops/context.h"

namespace cistron::ops {

// Bytes of the tiles of scales [rows, blocks]: 512 · ceil(rows / 128) · ceil(blocks / 4).
std::int64_t ScaleTileBytes(std::int64_t rows, std::int64_t blocks);

// Scale (i, j) of tile (i / 128, j / 4) is byte (i % 32)·16 + ((i % 128) / 32)·4 + j % 4 of it;
// tiles lie in row-major order over [ceil(rows / 128), ceil(blocks / 4)].
//   scales e8m0 [rows, blocks];  tiles u8 [ScaleTileBytes], padding 0.
// Source: the block scaling layout of NVIDIA's cuBLASLt documentation.
void PackScaleTiles(const Context& ctx, const Tensor& scales, const Tensor& tiles);
void UnpackScaleTiles(const Context& ctx, const Tensor& tiles, const Tensor& scales);

}  // namespace cistron::ops
