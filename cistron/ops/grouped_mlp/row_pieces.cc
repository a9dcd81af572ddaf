#include "cistron/ops/grouped_mlp/row_pieces.h"

#include <algorithm>

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kStep = 8;    // whole register tiles of the products
constexpr std::int64_t kLeast = 64;  // rows: below, products pack more than they compute
constexpr std::int64_t kPiecesPerThread = 4;

}  // namespace

void CutRows(std::int64_t group, std::int64_t begin, std::int64_t end, std::int64_t most,
             std::vector<RowPiece>& pieces) {
  const std::int64_t rows = end - begin;
  if (rows == 0) return;
  const std::int64_t count =
      std::max<std::int64_t>(1, std::min((rows + most - 1) / most, rows / kLeast));
  const auto cut = [&](std::int64_t i) {
    return i == count ? end : begin + rows * i / count / kStep * kStep;
  };
  for (std::int64_t i = 0; i < count; ++i) pieces.push_back({group, cut(i), cut(i + 1)});
}

std::vector<RowPiece> PlanRowPieces(std::span<const std::int64_t> offsets, int threads,
                                    std::int64_t most) {
  const std::int64_t share = offsets.back() / (threads * kPiecesPerThread);
  const std::int64_t size = threads <= 1 ? most : std::clamp(share, 2 * kLeast, most);
  std::vector<RowPiece> pieces;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    CutRows(static_cast<std::int64_t>(e), offsets[e], offsets[e + 1], size, pieces);
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const RowPiece& a, const RowPiece& b) { return a.rows() > b.rows(); });
  return pieces;
}

namespace {
constexpr std::int64_t kWaveBytes = 8 << 20;
std::int64_t wave_bytes = kWaveBytes;
}  // namespace

std::int64_t WaveRows(std::int64_t bytes_per_row) {
  return std::max<std::int64_t>(1, wave_bytes / std::max<std::int64_t>(1, bytes_per_row));
}

ScopedWaveBytes::ScopedWaveBytes(std::int64_t bytes) {
  wave_bytes = bytes;
}
ScopedWaveBytes::~ScopedWaveBytes() {
  wave_bytes = kWaveBytes;
}

}  // namespace cistron::ops::internal
