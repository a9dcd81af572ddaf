#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

#include <gtest/gtest.h>

namespace cistron::ops::internal {
namespace {

constexpr int kMultiprocessors = 132;
constexpr std::int64_t kSharedBytes = 227 * 1024;
constexpr GroupedGemmKind kKinds[] = {GroupedGemmKind::kForward, GroupedGemmKind::kDgrad,
                                      GroupedGemmKind::kWgrad};

HopperTiles Choose(GroupedGemmKind kind, std::int64_t groups, std::int64_t rows, std::int64_t n,
                   std::int64_t k) {
  return ChooseHopperTiles(kind, groups, rows, n, k, kMultiprocessors);
}

TEST(GroupedGemmTiles, StagesFitInSharedMemory) {
  for (const int block_n : {256, 192, 128}) {
    const std::int64_t stage = (kHopperBlockM + block_n) * kHopperBlockK * 2;
    EXPECT_GE(HopperStages(block_n), 4) << block_n;
    EXPECT_LE(HopperStages(block_n) * stage + 32 * 1024 + 256, kSharedBytes) << block_n;
    const std::int64_t handed = kHopperBlockM * block_n * 2 + HopperReadAheadBytes(block_n);
    EXPECT_LE(HopperStages(block_n, true) * stage + handed + 256, kSharedBytes) << block_n;
  }
}

TEST(GroupedGemmTiles, AnyProblemHasTilesThatAKernelHas) {
  for (const GroupedGemmKind kind : kKinds) {
    for (const std::int64_t groups : {1, 3, 8, 128, 512}) {
      for (const std::int64_t rows : {1, 100, 4096, 524288}) {
        for (const std::int64_t width : {8, 136, 768, 14336}) {
          for (const int multiprocessors : {1, 78, 132}) {
            const HopperTiles t =
                ChooseHopperTiles(kind, groups, rows, width, 4096, multiprocessors);
            EXPECT_TRUE(t.block_n == 256 || t.block_n == 192 || t.block_n == 128);
            EXPECT_EQ(t.stages, HopperStages(t.block_n));
            EXPECT_EQ(t.blocks % 2, 0);
            EXPECT_GE(t.blocks, 2);
            EXPECT_LE(t.blocks, multiprocessors + 1);
            EXPECT_GE(t.panel_pairs, 1);
          }
        }
      }
    }
  }
}

TEST(GroupedGemmTiles, LongProductsUseTheWidestTileAndDrawTheirOrder) {
  for (const GroupedGemmKind kind : kKinds) {
    for (const auto& [n, k] : {std::pair(28672, 4096), std::pair(4096, 14336)}) {
      const HopperTiles t = Choose(kind, 8, 8 * 2048, n, k);
      EXPECT_EQ(t.block_n, 256);
      EXPECT_EQ(t.blocks, kMultiprocessors);
      EXPECT_TRUE(t.drawn);
    }
  }
}

TEST(GroupedGemmTiles, FewTilesAreCutNarrower) {
  // 2 · 2 pairs of 256 columns would leave most SMs idle for twice as long.
  const HopperTiles t = Choose(GroupedGemmKind::kForward, 2, 512, 512, 1024);
  EXPECT_EQ(t.block_n, 128);
  EXPECT_FALSE(t.drawn);
}

TEST(GroupedGemmTiles, WidthsThatWideTilesWouldPadUseNarrowerOnes) {
  EXPECT_EQ(Choose(GroupedGemmKind::kForward, 64, 64 * 2048, 192, 1024).block_n, 192);
  EXPECT_EQ(Choose(GroupedGemmKind::kForward, 64, 64 * 2048, 128, 1024).block_n, 128);
}

TEST(GroupedGemmTiles, PanelsAreTallerWhereTheSumIsShort) {
  EXPECT_GT(Choose(GroupedGemmKind::kWgrad, 8, 8 * 1024, 28672, 4096).panel_pairs,
            Choose(GroupedGemmKind::kForward, 8, 8 * 2048, 4096, 14336).panel_pairs);
}

TEST(GroupedGemmTiles, SwiGluTilesHoldAsManyGatesAsUps) {
  for (const bool backward : {false, true}) {
    for (const std::int64_t groups : {0, 1, 8, 128}) {
      for (const std::int64_t rows : {0, 100, 131072}) {
        for (const std::int64_t ffn : {8, 768, 2688, 14336}) {
          const HopperTiles t =
              ChooseHopperSwiGluTiles(backward, groups, rows, ffn, 4096, kMultiprocessors);
          EXPECT_TRUE((!backward && t.block_n == 256) || t.block_n == 192 || t.block_n == 128);
          EXPECT_EQ(t.stages, HopperStages(t.block_n, /*hands_over=*/t.block_n < 256));
          EXPECT_GE(t.stages, 4);
        }
      }
    }
  }
  const auto width_of_forward = [](std::int64_t depth) {
    return ChooseHopperSwiGluTiles(false, 8, 131072, 14336, depth, kMultiprocessors).block_n;
  };
  EXPECT_EQ(width_of_forward(768), 192);
  EXPECT_EQ(width_of_forward(8192), 256);
  // 14336 gates take twice as many tiles as 14336 columns of dA.
  EXPECT_TRUE(ChooseHopperSwiGluTiles(false, 8, 16384, 14336, 4096, kMultiprocessors).drawn);
}

TEST(GroupedGemmTiles, NoRowsOrGroupsIsNoError) {
  for (const GroupedGemmKind kind : kKinds) {
    EXPECT_GT(Choose(kind, 0, 0, 8, 8).block_n, 0);
    EXPECT_GT(Choose(kind, 4, 0, 8, 8).block_n, 0);
  }
}

}  // namespace
}  // namespace cistron::ops::internal
