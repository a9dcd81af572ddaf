// What the tensor-core kernels of attention share: which rows of which sequence a block owns,
// swizzled tiles of a head in shared memory, and the two kinds of products of a warp.
//
// A warp owns 16·kM rows of a result. Scores stay in its registers: what a product of rows leaves
// in a lane (mma.cuh) is, rounded to bf16, what the next product takes as its left operand (Dao,
// "FlashAttention-2", 2023, section 3.3).
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>

#include "cistron/ops/attention/attention_sequences.cuh"
#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/mma.cuh"

namespace cistron::ops::internal {

inline constexpr int kFlashWarps = 4;
inline constexpr int kFlashThreads = 32 * kFlashWarps;
inline constexpr float kLog2E = 1.4426950408889634f;

// What every kernel is told. Positions in a sequence are ints; rows of a matrix are 64-bit.
struct FlashProblem {
  SequenceRows sequences;
  int heads;   // query heads
  int group;   // query heads of a key/value head
  int window;  // 0: none
  int dim;
  float scale;       // of scores
  float scale_log2;  // to units of log 2
};

// --- the rows of a block

struct FlashTile {
  std::int64_t begin;  // of the sequence
  int length;          // of the sequence; 0 where the block has no work
  int row;             // first of the tile, counted from `begin`
};

// Tile `index` of all sequences, which are counted from the last one back; `late_first`: and within
// a sequence too. Called once by all threads of a block; the answer stays in shared memory, so that
// it takes no registers while products run. Each block looks for its own, because a table
// would cost small problems a launch: with up to kFlashThreads sequences this is one round of
// loads.
__device__ inline const FlashTile& FindFlashTile(const SequenceRows& sequences, int index, int rows,
                                                 bool late_first) {
  __shared__ int warp_tiles[kFlashWarps];
  __shared__ FlashTile found;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) found = {0, 0, 0};
  int before = 0;
  for (std::int64_t base = 0; base < sequences.number && before <= index; base += kFlashThreads) {
    const std::int64_t s = sequences.number - 1 - base - thread;
    const std::int64_t begin = s < 0 ? 0 : sequences.Begin(s);
    const int length = s < 0 ? 0 : static_cast<int>(sequences.End(s) - begin);
    const int tiles = static_cast<int>((std::int64_t{length} + rows - 1) / rows);
    int sum = tiles;  // up to this thread
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    __syncthreads();  // warp_tiles of the round before have been read
    if (lane == 31) warp_tiles[warp] = sum;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < kFlashWarps; ++w) {
      if (w < warp) sum += warp_tiles[w];
      total += warp_tiles[w];
    }
    const int own = index - before - (sum - tiles);
    if (own >= 0 && own < tiles) {
      found = {begin, length, (late_first ? tiles - 1 - own : own) * rows};
    }
    before += total;
  }
  __syncthreads();
  return found;
}

// Blocks along x: heads are next to each other, so that the short tiles of all heads come last.
inline unsigned FlashBlocks(const SequenceRows& sequences, std::int64_t heads, int rows) {
  const std::int64_t tiles =
      (sequences.tokens + rows - 1) / rows + std::min(sequences.number, sequences.tokens);
  CISTRON_CHECK(tiles * heads <= INT_MAX, "attention: {} tiles of {} heads do not fit into a grid",
                tiles, heads);
  return static_cast<unsigned>(tiles * heads);
}

// Zeros in the columns of a head, in the share of the rows beyond the last sequence that block
// `index` of `blocks` has.
__device__ inline void ClearFlashPadding(const FlashProblem& p, const HeadRows<bf16>& out,
                                         int column, int index, int blocks) {
  for (std::int64_t row = p.sequences.Used() + index; row < p.sequences.tokens; row += blocks) {
    for (int d = static_cast<int>(threadIdx.x); d < p.dim; d += kFlashThreads) {
      *out.At(row, column + d) = bf16::FromBits(0);
    }
  }
}

// --- tiles in shared memory

// Rows of kDim bf16. Chunks of 16 bytes are exchanged so that the eight rows of an ldmatrix lie in
// different banks.
template <int kDim>
struct FlashRows {
  static constexpr int kBytes = kDim * 2;
  static constexpr int kChunks = kDim / 8;
  // A sub-tile of 16 rows begins where a sub-tile of 16 columns can be chosen by an exclusive or.
  static constexpr int kSubTile = 16 * kBytes;

  static __device__ std::uint32_t Offset(int row, int chunk) {
    const int exchange = kDim == 32 ? row / 2 % 4 : row % 8;
    return static_cast<std::uint32_t>(row * kBytes + (chunk ^ exchange) * 16);
  }
  // What a lane adds to the address of a tile: its row of a sub-tile of 16 × 16.
  static __device__ std::uint32_t LaneOffset() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return Offset(lane % 16, lane / 16);
  }
};

// Starts to copy kRows rows of a head at (`first`, `column`); rows from `rows` on and values from
// `dim` on become zeros.
template <int kDim, int kRows>
__device__ __forceinline__ void CopyRows(const HeadRows<const bf16>& matrix, std::int64_t first,
                                         int column, int rows, int dim, std::uint32_t to) {
  using Rows = FlashRows<kDim>;
  constexpr int kStep = kFlashThreads / Rows::kChunks;  // rows that the block copies at once
  static_assert(kStep % 8 == 0 && kRows % kStep == 0);
  const int row = static_cast<int>(threadIdx.x) / Rows::kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % Rows::kChunks;
  const bool inside = chunk * 8 < dim;
  to += Rows::Offset(row, chunk);
  const bf16* from = matrix.At(first + row, column + chunk * 8);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    mma::CopyAsync16(to + static_cast<std::uint32_t>(i * kStep * Rows::kBytes), from,
                     inside && row + i * kStep < rows);
    from += kStep * matrix.stride;
  }
}

// --- products of a warp

// sums[m][n] = rows 16m… of a · rows 8n… of b, along the head. Addresses are those of tiles plus
// LaneOffset().
template <int kDim, int kM, int kN>
__device__ __forceinline__ void MultiplyRows(std::uint32_t a, std::uint32_t b,
                                             float (&sums)[kM][2 * kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < 2 * kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (std::uint32_t k = 0; k < kDim / 16; ++k) {
    std::uint32_t left[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      mma::LoadMatrices(left[m], (a ^ (32 * k)) + m * FlashRows<kDim>::kSubTile);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      std::uint32_t right[4];
      mma::LoadMatrices(right, (b ^ (32 * k)) + n * FlashRows<kDim>::kSubTile);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma::Multiply(sums[m][2 * n], left[m], right[0], right[2]);
        mma::Multiply(sums[m][2 * n + 1], left[m], right[1], right[3]);
      }
    }
  }
}

// A warp's values of a square tile, rounded: 16·kM rows, 16·kK columns.
template <int kM, int kK>
struct PackedSquare {
  std::uint32_t v[kM][kK][4];

  __device__ __forceinline__ void Pack(const float (&x)[kM][2 * kK][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        v[m][k][0] = mma::PackBf16(x[m][2 * k][0], x[m][2 * k][1]);
        v[m][k][1] = mma::PackBf16(x[m][2 * k][2], x[m][2 * k][3]);
        v[m][k][2] = mma::PackBf16(x[m][2 * k + 1][0], x[m][2 * k + 1][1]);
        v[m][k][3] = mma::PackBf16(x[m][2 * k + 1][2], x[m][2 * k + 1][3]);
      }
    }
  }
};

// A warp's sums over a tile's rows: 16·kM rows of a head.
template <int kDim, int kM>
struct FlashSums {
  float v[kM][kDim / 8][4];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[m][n][i] = 0.0f;
      }
    }
  }
  // += square · rows of a tile, whose address comes with LaneOffset().
  template <int kK>
  __device__ __forceinline__ void Add(const PackedSquare<kM, kK>& square, std::uint32_t tile) {
#pragma unroll
    for (int k = 0; k < kK; ++k) {
#pragma unroll
      for (std::uint32_t n = 0; n < kDim / 16; ++n) {
        std::uint32_t right[4];
        mma::LoadTransposed(right, (tile ^ (32 * n)) + k * FlashRows<kDim>::kSubTile);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma::Multiply(v[m][2 * n], square.v[m][k], right[0], right[1]);
          mma::Multiply(v[m][2 * n + 1], square.v[m][k], right[2], right[3]);
        }
      }
    }
  }
  // factor · sums to rows `first`… of the sequence and head at (`begin`, `column`); those from
  // `rows` on are left.
  __device__ __forceinline__ void Store(const HeadRows<bf16>& to, std::int64_t begin, int column,
                                        int first, int rows, int dim, const float (&factor)[kM][2],
                                        bool accumulate) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + 16 * m + 8 * half + lane / 4;
        if (row >= rows) continue;
        bf16* out = to.At(begin + row, column + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          if (8 * n >= dim) break;
          float low = v[m][n][2 * half] * factor[m][half];
          float high = v[m][n][2 * half + 1] * factor[m][half];
          auto* pair = reinterpret_cast<std::uint32_t*>(out + 8 * n);
          if (accumulate) {
            low += __uint_as_float(*pair << 16);
            high += __uint_as_float(*pair & 0xffff0000u);
          }
          *pair = mma::PackBf16(low, high);
        }
      }
    }
  }
};

// --- launches

inline FlashProblem MakeFlashProblem(const AttentionConfig& config,
                                     const PackedSequences& sequences, std::int64_t tokens) {
  FlashProblem p{};
  p.sequences = {sequences.cu_seqlens.data<std::int64_t>(), sequences.num_sequences(), tokens};
  p.heads = static_cast<int>(config.num_heads);
  p.group = static_cast<int>(config.num_heads / config.num_kv_heads);
  p.window = config.window >= tokens ? 0 : static_cast<int>(config.window);
  p.dim = static_cast<int>(config.head_dim);
  p.scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  p.scale_log2 = p.scale * kLog2E;
  return p;
}

// Calls f(integral_constant<D>) with the narrowest kernel for heads of `head_dim` values.
template <class F>
void DispatchFlashDim(std::int64_t head_dim, F&& f) {
  if (head_dim <= 32) return f(std::integral_constant<int, 32>{});
  if (head_dim <= 64) return f(std::integral_constant<int, 64>{});
  f(std::integral_constant<int, 128>{});
}

}  // namespace cistron::ops::internal
