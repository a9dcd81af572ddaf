#include "cistron/ops/quantize/scale_tiles.h"

#include <cstring>

#include "cistron/ops/check_tensor.h"

namespace cistron::ops {
namespace {

std::int64_t TileIndex(std::int64_t i, std::int64_t j, std::int64_t tiles_in_row) {
  const std::int64_t tile = i / 128 * tiles_in_row + j / 4;
  return tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
}

void Check(const Tensor& scales, const Tensor& tiles) {
  CISTRON_CHECK(scales && scales.rank() == 2, "scale tiles: scales are {}, not [rows, blocks]",
                Describe(scales));
  CheckTensor("scale tiles", "scales", scales, scales.shape(), DType::kE8M0);
  CheckTensor("scale tiles", "tiles", tiles, {ScaleTileBytes(scales.dim(0), scales.dim(1))},
              DType::kU8);
}

}  // namespace

std::int64_t ScaleTileBytes(std::int64_t rows, std::int64_t blocks) {
  return (rows + 127) / 128 * ((blocks + 3) / 4) * 512;
}

void PackScaleTiles(const Context&, const Tensor& scales, const Tensor& tiles) {
  Check(scales, tiles);
  std::memset(tiles.raw(), 0, static_cast<std::size_t>(tiles.bytes()));
  const std::int64_t rows = scales.dim(0), blocks = scales.dim(1);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < blocks; ++j) {
      tiles.data<std::uint8_t>()[TileIndex(i, j, (blocks + 3) / 4)] =
          scales.data<e8m0>()[i * blocks + j].bits;
    }
  }
}

void UnpackScaleTiles(const Context&, const Tensor& tiles, const Tensor& scales) {
  Check(scales, tiles);
  const std::int64_t rows = scales.dim(0), blocks = scales.dim(1);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < blocks; ++j) {
      scales.data<e8m0>()[i * blocks + j] =
          e8m0::FromBits(tiles.data<std::uint8_t>()[TileIndex(i, j, (blocks + 3) / 4)]);
    }
  }
}

}  // namespace cistron::ops
