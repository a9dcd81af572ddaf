// Which tiles the Hopper grouped product uses: a pure function of the problem and the device.
#pragma once

#include <cstdint>

#include "cistron/ops/grouped_gemm/grouped_gemm.h"

namespace cistron::ops::internal {

// Rows of a block's tile and depth of one stage; every tile of the kernel has these.
inline constexpr int kHopperBlockM = 128;
inline constexpr int kHopperBlockK = 64;

// What 128 threads of an epilogue read ahead: 16 bytes of gates and of ups in each 64 columns, and
// a row's scale.
constexpr int HopperReadAheadBytes(int block_n) {
  return 128 * (block_n / 64 * 2 * 16 + 4);
}
// Stages of bf16 operands that fit in an SM's shared memory beside the store buffers, or beside a
// whole tile of bf16 results that an epilogue takes over, with what it reads ahead.
constexpr int HopperStages(int block_n, bool hands_over = false) {
  constexpr int kSharedBytes = 227 * 1024;
  constexpr int kBarrierBytes = 256;
  const int store_bytes =
      hands_over ? kHopperBlockM * block_n * 2 + HopperReadAheadBytes(block_n) : 4 * 64 * 128;
  return (kSharedBytes - store_bytes - kBarrierBytes) /
         ((kHopperBlockM + block_n) * kHopperBlockK * 2);
}

struct HopperTiles {
  int block_n;  // 256, 192 or 128 columns
  int stages;
  int blocks;  // of the grid, a multiple of the cluster of two
  // Pairs of row tiles that are walked together over all columns of a group.
  int panel_pairs;
  // Whether clusters draw pairs from a counter, which costs a memset; otherwise they are dealt out
  // beforehand.
  bool drawn;
};

// Counts are on the device, so the groups are taken to be even.
HopperTiles ChooseHopperTiles(GroupedGemmKind kind, std::int64_t groups, std::int64_t max_rows,
                              std::int64_t n, std::int64_t k, int multiprocessors);

// Tiles of the products with SwiGLU in their epilogues: forward x · w1ᵀ, whose tiles hold as many
// gate as up columns, or dA = dy · w2. Both results are `ffn` wide; `depth` is summed over.
HopperTiles ChooseHopperSwiGluTiles(bool backward, std::int64_t groups, std::int64_t max_rows,
                                    std::int64_t ffn, std::int64_t depth, int multiprocessors);

// Whether the kernel runs a shape, or why not. Pointers and strides are another question.
Support HopperShapeSupports(GroupedGemmKind kind, std::int64_t groups, std::int64_t max_rows,
                            std::int64_t n, std::int64_t k);

}  // namespace cistron::ops::internal
