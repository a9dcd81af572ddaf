// Groups of rows in kernels: counts are read on the device, and cut to the rows that there are, so
// that no count leads outside the buffer.
#pragma once

#include <cstdint>

#include "cistron/ops/cuda/launch.cuh"

namespace cistron::ops::internal {

struct GroupSpan {
  std::int64_t group;  // −1: none
  std::int64_t begin, rows;
  std::int64_t tile;  // which tile of the group's rows
};

// Sum over the lanes up to this one.
__device__ inline std::int64_t WarpInclusiveSum(std::int64_t x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::int64_t other = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

__device__ inline std::int64_t CutCount(std::int64_t count, std::int64_t max_rows) {
  return count < 0 ? 0 : (count < max_rows ? count : max_rows);
}

// The group that owns tile number `tile`, where each group has ⌈rows / tile_rows⌉ of them. Called
// by all threads; `found` lies in shared memory and may be read by all when this returns.
__device__ inline void FindRowTile(const std::int64_t* counts, std::int64_t groups,
                                   std::int64_t max_rows, std::int64_t tile, int tile_rows,
                                   GroupSpan* found) {
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    std::int64_t rows_before = 0, tiles_before = 0;
    for (std::int64_t base = 0; base < groups && tiles_before <= tile; base += 32) {
      const std::int64_t group = base + lane;
      const std::int64_t count = group < groups ? CutCount(counts[group], max_rows) : 0;
      const std::int64_t count_sum = WarpInclusiveSum(count);
      const std::int64_t begin = min(rows_before + count_sum - count, max_rows);
      const std::int64_t rows = min(count, max_rows - begin);
      const std::int64_t tiles = (rows + tile_rows - 1) / tile_rows;
      const std::int64_t tile_sum = WarpInclusiveSum(tiles);
      const std::int64_t first = tiles_before + tile_sum - tiles;
      if (tile >= first && tile < first + tiles) *found = {group, begin, rows, tile - first};
      rows_before += __shfl_sync(0xffffffffu, count_sum, 31);
      tiles_before += __shfl_sync(0xffffffffu, tile_sum, 31);
    }
    if (lane == 0 && tiles_before <= tile) found->group = -1;
  }
  __syncthreads();
}

// The rows of one group, likewise.
__device__ inline void FindGroup(const std::int64_t* counts, std::int64_t max_rows,
                                 std::int64_t group, GroupSpan* found) {
  if (threadIdx.x < 32) {
    std::int64_t before = 0;
    for (std::int64_t g = threadIdx.x; g < group; g += 32) before += CutCount(counts[g], max_rows);
    before = min(WarpSum(before), max_rows);
    if (threadIdx.x == 0) {
      *found = {group, before, min(CutCount(counts[group], max_rows), max_rows - before), 0};
    }
  }
  __syncthreads();
}

}  // namespace cistron::ops::internal
