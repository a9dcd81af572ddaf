#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

#include <algorithm>
#include <limits>
#include <span>

namespace cistron::ops::internal {
namespace {

constexpr int kCluster = 2;

struct Shape {
  int block_n;
  // Time of one column of a tile over one stage, relative to the widest tile: a narrower one reads
  // more shared memory and more L2 for each product.
  double column_cost;
  // Stages that pass while a tile begins and ends, of which little is hidden in the last wave.
  double overhead = 1.0;
  bool hands_over = false;
};
constexpr Shape kShapes[] = {{256, 1.0}, {192, 1.03}, {128, 1.12}};
// Four warpgroups leave no registers for sums of 256 columns, so the widest tile's epilogue runs in
// its consumers, which costs them 2.5 stages (measured over 12, 16, 32 and 64 of the sum): made
// good by the width where the sum is long.
constexpr Shape kSwiGluShapes[] = {{256, 1.0, 2.5}, {192, 1.03, 1.0, true}, {128, 1.12, 1.0, true}};
constexpr Shape kSwiGluBackwardShapes[] = {{192, 1.03, 1.0, true}, {128, 1.12, 1.0, true}};

// Rows of a that a panel keeps in L2, at most; a taller panel reads b less often.
constexpr std::int64_t kPanelBytes = 16 << 20;
// Even where a's rows do not stay in L2: a square of tiles in flight reads least.
constexpr std::int64_t kMinPanelPairs = 8;
constexpr std::int64_t kMaxPanelPairs = 32;

// In fewer waves SMs do not drift far apart.
constexpr std::int64_t kMinWavesDrawn = 4;

int PanelPairs(std::int64_t depth) {
  const std::int64_t pair_bytes = 2 * kHopperBlockM * std::max<std::int64_t>(1, depth) * 2;
  return static_cast<int>(std::clamp(kPanelBytes / pair_bytes, kMinPanelPairs, kMaxPanelPairs));
}

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Tiles of one group's result, each a whole `share` of a shape's width apart.
struct Extent {
  std::int64_t groups, rows, cols, depth;
  int share = 1;
};

HopperTiles Choose(const Extent& x, std::span<const Shape> shapes, int multiprocessors) {
  const int clusters = std::max(1, multiprocessors / kCluster);
  HopperTiles best{};
  double best_cost = std::numeric_limits<double>::infinity();
  for (const Shape& shape : shapes) {
    const std::int64_t row_tiles = CeilDiv(x.rows, kHopperBlockM);
    const std::int64_t col_tiles = CeilDiv(x.cols, shape.block_n / x.share);
    const std::int64_t pairs =
        x.groups * (row_tiles / 2 * col_tiles + row_tiles % 2 * CeilDiv(col_tiles, 2));
    const double stages = static_cast<double>(CeilDiv(x.depth, kHopperBlockK)) + shape.overhead;
    const std::int64_t waves = CeilDiv(pairs, clusters);
    const double cost = static_cast<double>(waves) * stages * shape.block_n * shape.column_cost;
    if (cost < best_cost) {
      best_cost = cost;
      best = {shape.block_n, HopperStages(shape.block_n, shape.hands_over), clusters * kCluster,
              PanelPairs(x.depth), waves >= kMinWavesDrawn};
    }
  }
  return best;
}

}  // namespace

HopperTiles ChooseHopperTiles(GroupedGemmKind kind, std::int64_t groups, std::int64_t max_rows,
                              std::int64_t n, std::int64_t k, int multiprocessors) {
  groups = std::max<std::int64_t>(1, groups);
  const std::int64_t group_rows = CeilDiv(max_rows, groups);
  const bool wgrad = kind == GroupedGemmKind::kWgrad;
  return Choose({.groups = groups,
                 .rows = wgrad ? n : group_rows,
                 .cols = kind == GroupedGemmKind::kForward ? n : k,
                 .depth = wgrad                               ? group_rows
                          : kind == GroupedGemmKind::kForward ? k
                                                              : n},
                kShapes, multiprocessors);
}

HopperTiles ChooseHopperSwiGluTiles(bool backward, std::int64_t groups, std::int64_t max_rows,
                                    std::int64_t ffn, std::int64_t depth, int multiprocessors) {
  groups = std::max<std::int64_t>(1, groups);
  return Choose({.groups = groups,
                 .rows = CeilDiv(max_rows, groups),
                 .cols = ffn,
                 .depth = depth,
                 .share = backward ? 1 : 2},
                backward ? std::span<const Shape>(kSwiGluBackwardShapes) : kSwiGluShapes,
                multiprocessors);
}

Support HopperShapeSupports(GroupedGemmKind kind, std::int64_t groups, std::int64_t max_rows,
                            std::int64_t n, std::int64_t k) {
  if (groups < 0 || max_rows < 0 || n < 0 || k < 0) {
    return Support::No(
        fmt::format("a size is negative: groups {}, rows {}, n {}, k {}", groups, max_rows, n, k));
  }
  if (n % 8 != 0 || k % 8 != 0) {
    return Support::No(fmt::format("n {} and k {} must be multiples of 8", n, k));
  }
  // Coordinates and tile numbers are 32-bit; rows × width is not.
  const std::int64_t rows = kind == GroupedGemmKind::kWgrad ? n : max_rows;
  const std::int64_t cols = kind == GroupedGemmKind::kForward ? n : k;
  const std::int64_t results = kind == GroupedGemmKind::kWgrad ? groups : 1;
  constexpr std::int64_t kLimit = std::numeric_limits<int>::max();
  constexpr std::int64_t kTile = kHopperBlockM;
  if (max_rows > kLimit - kTile || n > kLimit / 4 || k > kLimit / 4 || groups > 65536 ||
      results * ((rows + kTile) / kTile + groups) > kLimit / 4 / ((cols + kTile) / kTile)) {
    return Support::No(
        fmt::format("too large: groups {}, rows {}, n {}, k {}", groups, max_rows, n, k));
  }
  return Support::Yes();
}

}  // namespace cistron::ops::internal
