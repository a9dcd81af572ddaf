// How a warp of the Hopper grouped product stores its rows of a tile.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "cistron/ops/cuda/hopper_ptx.cuh"
#include "cistron/ops/cuda/hopper_wgmma.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_walk.cuh"

namespace cistron::ops::internal::sm90 {

__device__ inline std::uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ inline float2 UnpackBf16(std::uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

// Rounds a warp's 16 × 16 sums to columns 16·j … of a swizzled buffer of 16 lines.
__device__ inline void StoreFragment(std::uint32_t buffer, int lane, int j, const float* s) {
  const int row = lane % 16;
  hopper::StoreMatrix(
      buffer + row * hopper::kSwizzleLine + (((2 * j + lane / 16) ^ (row % 8)) << 4),
      PackBf16(s[0], s[1]), PackBf16(s[2], s[3]), PackBf16(s[4], s[5]), PackBf16(s[6], s[7]));
}

// Up to 16 lines of a swizzled buffer to rows of c from column n on, 16 bytes a lane; f32 may be
// added to what is there. Columns from `cols` on are left out. stored(v) for the 16 bytes of each
// store.
template <bool kMayAdd = false, class Out, class Stored>
__device__ inline void StoreLines(std::uint32_t buffer, Out* c, std::int64_t ldc, int n, int cols,
                                  int rows, int lane, bool add, Stored&& stored) {
  constexpr int kVectors = hopper::kSwizzleLine / 16;
  constexpr int kVectorCols = 16 / static_cast<int>(sizeof(Out));
  constexpr int kPassRows = 32 / kVectors;
  const int vector = lane % kVectors;
  const int first = lane / kVectors;
  uint4 v[kWarpM / kPassRows];
#pragma unroll
  for (int pass = 0; pass < kWarpM / kPassRows; ++pass) {
    const int row = first + pass * kPassRows;
    v[pass] = hopper::LoadShared(buffer + row * hopper::kSwizzleLine + ((vector ^ (row % 8)) << 4));
  }
  if (n + vector * kVectorCols >= cols) return;
  c += first * ldc + n + vector * kVectorCols;
#pragma unroll
  for (int pass = 0; pass < kWarpM / kPassRows; ++pass, c += kPassRows * ldc) {
    if (first + pass * kPassRows >= rows) break;
    if (kMayAdd && add) {
      const float4 old = *reinterpret_cast<const float4*>(c);
      v[pass].x = __float_as_uint(__uint_as_float(v[pass].x) + old.x);
      v[pass].y = __float_as_uint(__uint_as_float(v[pass].y) + old.y);
      v[pass].z = __float_as_uint(__uint_as_float(v[pass].z) + old.z);
      v[pass].w = __float_as_uint(__uint_as_float(v[pass].w) + old.w);
    }
    // Results are not read again here: they leave L2 before the operands do.
    __stcs(reinterpret_cast<uint4*>(c), v[pass]);
    stored(v[pass]);
  }
}

// Stores the rows of one warp, 128 bytes of columns at a time: registers to a swizzled buffer, from
// there to memory in whole lines. Warps never wait for each other here. Ordinary stores are not
// waited for; the copy engine is (its reads of the buffer), so it stores only where it also adds.
template <class T>
class TileStore {
 public:
  __device__ TileStore(const SharedLayout<T>& shared, const CUtensorMap* map,
                       const KernelArgs& args, int)
      : map_(map), args_(args), buffers_(shared.Store(threadIdx.x / 32)) {}

  __device__ void Begin(const Tile&, int) {}

  // sums: of the tile's columns; m: first of the warp's rows in the group's result.
  __device__ void Run(float (&sums)[T::kSums], const Tile& tile, int m) {
    const int rows = (T::kWgrad ? args_.rows : tile.group_rows) - m;
    if (rows <= 0) return;
    const std::int64_t row = T::kWgrad ? m : tile.row_begin + m;
    Out* const c = static_cast<Out*>(args_.c) + tile.group * args_.group_stride + row * args_.ldc;
    if (!kF32 && args_.accumulate) AddOld(sums, reinterpret_cast<__nv_bfloat16*>(c), tile.n, rows);
    // The copy engine clips at the ends of c, not at the end of a group's rows.
    const bool squares_wanted = T::kWgrad && args_.square_sums != nullptr;
    double squares = 0;  // of this lane's
    const bool engine_adds = kF32 && args_.accumulate && (T::kWgrad || rows >= kWarpM);
#pragma unroll
    for (int part = 0; part < T::kBlockN / T::kStoreCols; ++part) {
      const int n = tile.n + part * T::kStoreCols;
      if (n >= args_.cols) break;
      const std::uint32_t buffer = buffers_ + (odd_ ? kStoreBytes : 0);
      odd_ = !odd_;
      if (kF32 && args_.accumulate) {
        if (lane_ == 0) hopper::TmaWaitRead<1>();
        __syncwarp();
      }
      Fill(sums, part, buffer);
      if (engine_adds) hopper::FenceProxyAsync();
      __syncwarp();
      if (!engine_adds) {
        StoreLines<kF32>(buffer, c, args_.ldc, n, args_.cols, rows, lane_, args_.accumulate,
                         [&](const uint4& v) {
                           if (squares_wanted) squares += static_cast<double>(Squares(v));
                         });
      }
      if (kF32 && args_.accumulate && lane_ == 0) {
        if (engine_adds) {
          hopper::TmaReduceAdd(buffer, map_, n, static_cast<int>(row), T::kWgrad ? tile.group : 0);
        }
        hopper::TmaCommit();  // an empty group where rows were stored: waits count buffers
      }
    }
    if (squares_wanted) StoreSquares(squares, tile, m);
  }

  __device__ void Finish() {
    if (lane_ == 0) hopper::TmaWaitAll();
  }

 private:
  using Out = typename T::Out;
  static constexpr bool kF32 = std::is_same_v<Out, float>;

  __device__ void AddOld(float (&sums)[T::kSums], const __nv_bfloat16* c, int n, int rows) {
#pragma unroll
    for (int i = 0; i < T::kSums; i += 2) {
      const int row = i % 4 / 2 * 8 + lane_ / 4;
      const int col = n + i / 4 * 8 + lane_ % 4 * 2;
      if (row < rows && col < args_.cols) {
        const float2 old =
            __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(c + row * args_.ldc + col));
        sums[i] += old.x;
        sums[i + 1] += old.y;
      }
    }
  }

  // Of the elements in 16 bytes, each square in f32.
  static __device__ float Squares(const uint4& v) {
    float sum = 0;
    for (const std::uint32_t word : {v.x, v.y, v.z, v.w}) {
      if constexpr (kF32) {
        sum = __fmaf_rn(__uint_as_float(word), __uint_as_float(word), sum);
      } else {
        const float2 pair = UnpackBf16(word);
        sum = __fmaf_rn(pair.x, pair.x, sum);
        sum = __fmaf_rn(pair.y, pair.y, sum);
      }
    }
    return sum;
  }

  // One sum of this warp and tile.
  __device__ void StoreSquares(double sum, const Tile& tile, int m) {
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const int down = (args_.rows + kWarpM - 1) / kWarpM;
    const int across = (args_.cols + T::kBlockN - 1) / T::kBlockN;
    if (lane_ != 0) return;
    args_.square_sums[(static_cast<std::int64_t>(tile.group) * down + m / kWarpM) * across +
                      tile.n / T::kBlockN] = sum;
  }

  // Rounds and writes columns [part · kStoreCols, …) of the sums to a buffer.
  __device__ void Fill(const float (&sums)[T::kSums], int part, std::uint32_t buffer) {
    constexpr int kPartSums = T::kStoreCols / 2;
    if constexpr (std::is_same_v<Out, float>) {
      const int row = lane_ / 4;
      const std::uint32_t line = buffer + row * hopper::kSwizzleLine + lane_ % 2 * 8;
#pragma unroll
      for (int j = 0; j < T::kStoreCols / 8; ++j) {
        const float* const s = sums + part * kPartSums + 4 * j;
        const std::uint32_t at = line + (((2 * j + lane_ % 4 / 2) ^ row) << 4);
        hopper::StoreShared(at, make_float2(s[0], s[1]));
        hopper::StoreShared(at + 8 * hopper::kSwizzleLine, make_float2(s[2], s[3]));
      }
    } else {
#pragma unroll
      for (int j = 0; j < T::kStoreCols / 16; ++j) {
        const float* const s = sums + part * kPartSums + 8 * j;
        StoreFragment(buffer, lane_, j, s);
      }
    }
  }

  const CUtensorMap* map_;
  const KernelArgs& args_;
  std::uint32_t buffers_;
  int lane_ = threadIdx.x % 32;
  bool odd_ = false;
};

// Rounds a consumer's sums and leaves them to the finisher, which gives the buffer back.
template <class T>
class TileHandOver {
 public:
  __device__ TileHandOver(const SharedLayout<T>& shared, const CUtensorMap*, const KernelArgs&,
                          int consumer)
      : full_(shared.HandedFull(consumer)),
        empty_(shared.HandedEmpty(consumer)),
        lines_(shared.Handed(consumer) +
               threadIdx.x % kConsumerThreads / 32 * kWarpM * hopper::kSwizzleLine) {}

  __device__ void Begin(const Tile&, int) {}

  __device__ void Run(float (&sums)[T::kSums], const Tile&, int) {
    const int lane = threadIdx.x % 32;
    hopper::BarrierWait(empty_, phase_ ^ 1);
    phase_ ^= 1;
#pragma unroll
    for (int part = 0; part < T::kBlockN / kChunk; ++part) {
#pragma unroll
      for (int j = 0; j < kChunk / 16; ++j) {
        StoreFragment(lines_ + part * kChunkBytes, lane, j, sums + part * (kChunk / 2) + 8 * j);
      }
    }
    __syncwarp();
    if (lane == 0) hopper::BarrierArrive(full_);
  }

  __device__ void Finish() {}

 private:
  std::uint32_t full_, empty_, lines_;
  std::uint32_t phase_ = 0;
};

}  // namespace cistron::ops::internal::sm90
