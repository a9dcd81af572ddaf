// What the CUDA kernels of attention share: which tile of which sequence a block owns, tiles of a
// head in shared memory, and the two kinds of products between them.
//
// A block of 256 threads is a square of 16 by 16. Tiles have kRows rows, and as many columns as a
// head has values, kDim at most; shared memory holds them in the compute type. Every sum runs in
// one thread in a fixed order: a dot product along the head in the order of its values.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cistron/ops/attention/attention_sequences.cuh"
#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/gemm/gemm_tile.cuh"

namespace cistron::ops::internal {

// Sizes of tiles for heads of up to kDim values: four of them and a square one fit into shared
// memory.
template <class T, int kHeadDim>
struct AttentionTile {
  using C = Compute<T>;
  static constexpr int kDim = kHeadDim;
  static constexpr int kBytes = kDim * static_cast<int>(sizeof(C));
  static constexpr int kRows = kBytes <= 512 ? 64 : (kBytes <= 1024 ? 32 : 16);
  static constexpr int kPer = kRows / 16;            // rows (and keys) of a thread
  static constexpr int kVec = kDim >= 64 ? 4 : 2;    // neighbouring columns of a thread
  static constexpr int kParts = kDim / (16 * kVec);  // times it has such columns
  static constexpr int kPitch = kDim + 4;            // of a tile, free of bank conflicts
  static constexpr int kSquarePitch = kRows + 4;     // of a tile of probabilities
  static constexpr std::size_t kTileBytes = sizeof(C) * kRows * kPitch;
  static constexpr std::size_t kSquareBytes = sizeof(C) * kRows * kSquarePitch;
};

// --- which tile of which sequence

namespace {

// first_tile[s] = tiles of the sequences before s, for s = 0…S. One block.
__global__ void count_tiles_kernel(SequenceRows sequences, int rows, std::int64_t* first_tile) {
  __shared__ std::int64_t warp_sums[kThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t before = 0;
  for (std::int64_t base = 0; base < sequences.number; base += kThreads) {
    const std::int64_t s = base + threadIdx.x;
    const bool inside = s < sequences.number;
    const std::int64_t tiles =
        inside ? (sequences.End(s) - sequences.Begin(s) + rows - 1) / rows : 0;
    std::int64_t sum = tiles;  // up to this thread
    for (int offset = 1; offset < 32; offset *= 2) {
      const std::int64_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    std::int64_t total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) sum += warp_sums[w];
      total += warp_sums[w];
    }
    if (inside) first_tile[s] = before + sum - tiles;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) first_tile[sequences.number] = before;
}

}  // namespace

// A tile's sequence and its first row; begin = end where the block has no work.
struct SequenceTile {
  std::int64_t begin, end;  // of the sequence
  std::int64_t row;         // first row of the tile
};

// Late tiles of a sequence come first, because most keys are before them.
__device__ inline SequenceTile FindTile(const SequenceRows& sequences,
                                        const std::int64_t* first_tile, int rows) {
  const std::int64_t tile =
      first_tile[sequences.number] - 1 - static_cast<std::int64_t>(blockIdx.x);
  if (tile < 0) return {0, 0, 0};
  // The last sequence whose first tile is at or before it.
  std::int64_t low = 0, high = sequences.number;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (first_tile[middle] <= tile) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const std::int64_t s = low - 1, begin = sequences.Begin(s);
  return {begin, sequences.End(s), begin + (tile - first_tile[s]) * rows};
}

// Table of tiles for a launch: a workspace, and blocks enough for any lengths.
struct TileTable {
  Tensor first_tile;
  std::int64_t blocks;
};
inline TileTable MakeTileTable(const Context& ctx, const SequenceRows& sequences, int rows) {
  TileTable table{
      ctx.Empty({sequences.number + 1}, DType::kI64),
      (sequences.tokens + rows - 1) / rows + std::min(sequences.number, sequences.tokens)};
  count_tiles_kernel<<<1, kThreads, 0, StreamOf(ctx)>>>(sequences, rows,
                                                        table.first_tile.data<std::int64_t>());
  CheckLaunch("attention");
  return table;
}

// First key that query i of a sequence that starts at `begin` sees.
__device__ inline std::int64_t FirstKey(std::int64_t window, std::int64_t begin, std::int64_t i) {
  return window == 0 ? begin : max(begin, i - window + 1);
}

// --- tiles

template <class T, int kN>
struct alignas(16) LoadedValues {
  T v[kN];
};

// `rows` rows of a head of `dim` values into a tile, zeros beyond them.
template <class Tile, class T>
__device__ void LoadHeadTile(const HeadRows<const T>& from, std::int64_t row, std::int64_t column,
                             std::int64_t rows, int dim, Compute<T>* tile) {
  using C = Compute<T>;
  const T* start = from.At(row, column);
  if (from.aligned) {
    constexpr int kN = 16 / sizeof(T), kAcross = Tile::kDim / kN;
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kAcross; i += kThreads) {
      const int r = i / kAcross, d = i % kAcross * kN;
      C* to = tile + r * Tile::kPitch + d;
      if (r < rows && d < dim) {
        const auto in = *reinterpret_cast<const LoadedValues<T, kN>*>(start + r * from.stride + d);
#pragma unroll
        for (int n = 0; n < kN; ++n) to[n] = Value(in.v[n]);
      } else {
#pragma unroll
        for (int n = 0; n < kN; ++n) to[n] = C(0);
      }
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * Tile::kDim; i += kThreads) {
      const int r = i / Tile::kDim, d = i % Tile::kDim;
      tile[r * Tile::kPitch + d] = r < rows && d < dim ? Value(start[r * from.stride + d]) : C(0);
    }
  }
}

__device__ inline int TileX() {
  return static_cast<int>(threadIdx.x) % 16;
}
__device__ inline int TileY() {
  return static_cast<int>(threadIdx.x) / 16;
}
// Rows of a thread are neighbours; the columns of its part of a square tile are 16 apart.
template <class Tile>
__device__ int OwnRow(int i) {
  return TileY() * Tile::kPer + i;
}
__device__ inline int OwnColumn(int j) {
  return TileX() + 16 * j;
}
// Column of a thread's value n of a row of a head.
template <class Tile>
__device__ int OwnValue(int n) {
  return n / Tile::kVec * 16 * Tile::kVec + TileX() * Tile::kVec + n % Tile::kVec;
}

template <class C, int kN>
struct alignas(kN * sizeof(C) < 16 ? kN * sizeof(C) : 16) TileValues {
  C v[kN];
};
template <int kN, class C>
__device__ TileValues<C, kN> ReadTile(const C* from) {
  return *reinterpret_cast<const TileValues<C, kN>*>(from);
}

// dots[i][j] = ⟨row OwnRow(i) of a, row OwnColumn(j) of b⟩, over the values of a head in order.
template <class Tile, class C>
__device__ void TileDots(const C* a, const C* b, int dim, C (&dots)[Tile::kPer][Tile::kPer]) {
  constexpr int kPer = Tile::kPer;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) dots[i][j] = C(0);
  }
#pragma unroll 2
  for (int d = 0; d < dim; d += 4) {
    TileValues<C, 4> x[kPer], y[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      x[i] = ReadTile<4>(a + OwnRow<Tile>(i) * Tile::kPitch + d);
      y[i] = ReadTile<4>(b + OwnColumn(i) * Tile::kPitch + d);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) dots[i][j] = Fma(x[i].v[n], y[j].v[n], dots[i][j]);
      }
    }
  }
}

// A thread's part of a result of kRows heads.
template <class Tile, class C>
struct HeadSums {
  C v[Tile::kPer][Tile::kParts * Tile::kVec];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
      for (int n = 0; n < Tile::kParts * Tile::kVec; ++n) v[i][n] = C(0);
    }
  }
  // += square · tile, over the first `count` rows of the tile in order.
  __device__ void Add(const C* square, const C* tile, int count) {
#pragma unroll 1
    for (int j = 0; j < count; j += 4) {
      TileValues<C, 4> weights[Tile::kPer];
#pragma unroll
      for (int i = 0; i < Tile::kPer; ++i) {
        weights[i] = ReadTile<4>(square + OwnRow<Tile>(i) * Tile::kSquarePitch + j);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int part = 0; part < Tile::kParts; ++part) {
          const auto row = ReadTile<Tile::kVec>(tile + (j + n) * Tile::kPitch +
                                                OwnValue<Tile>(part * Tile::kVec));
#pragma unroll
          for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
            for (int c = 0; c < Tile::kVec; ++c) {
              C& sum = v[i][part * Tile::kVec + c];
              sum = Fma(weights[i].v[n], row.v[c], sum);
            }
          }
        }
      }
    }
  }
  // Rows that belong to the first `rows` of the tile at (row, column) of a matrix.
  template <class T>
  __device__ void Store(const HeadRows<T>& to, std::int64_t row, std::int64_t column,
                        std::int64_t rows, int dim, bool accumulate) const {
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      if (OwnRow<Tile>(i) >= rows) continue;
      T* out = to.At(row + OwnRow<Tile>(i), column);
#pragma unroll
      for (int n = 0; n < Tile::kParts * Tile::kVec; ++n) {
        const int d = OwnValue<Tile>(n);
        if (d < dim) StoreElement(out[d], v[i][n], accumulate);
      }
    }
  }
};

// Writes a thread's part of a square tile.
template <class Tile, class C>
__device__ void StoreSquare(C* square, const C (&values)[Tile::kPer][Tile::kPer]) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) {
      square[OwnRow<Tile>(i) * Tile::kSquarePitch + OwnColumn(j)] = values[i][j];
    }
  }
}

// Sum and maximum over the 16 threads that share rows.
template <class C>
__device__ C RowSum(C x) {
  for (int offset = 8; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
template <class C>
__device__ C RowMax(C x) {
  for (int offset = 8; offset > 0; offset /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// --- launches

namespace {

// Zeros in the rows of a matrix beyond the last sequence.
template <class T>
__global__ void clear_padding_kernel(SequenceRows sequences, T* data, std::int64_t stride,
                                     std::int64_t width) {
  const std::int64_t used =
      max(std::int64_t{0}, min(sequences.cu_seqlens[sequences.number], sequences.tokens));
  const std::int64_t n = (sequences.tokens - used) * width;
  for (std::int64_t i = GridStart(); i < n; i += GridStep()) {
    data[(used + i / width) * stride + i % width] = Rounded<T>(Compute<T>(0));
  }
}

}  // namespace

// Padding is small or none: a few blocks.
template <class T>
void ClearPadding(const Context& ctx, const SequenceRows& sequences, const Output& out) {
  if (Accumulates(out) || out.tensor.numel() == 0) return;
  clear_padding_kernel<<<64, kThreads, 0, StreamOf(ctx)>>>(sequences, out.tensor.data<T>(),
                                                           out.tensor.stride(0), out.tensor.dim(1));
  CheckLaunch("attention");
}

// Calls f(AttentionTile<T, …>) with the smallest tile for heads of `head_dim` values.
template <class T, class F>
void DispatchHeadDim(std::int64_t head_dim, F&& f) {
  if (head_dim <= 32) return f(AttentionTile<T, 32>{});
  if (head_dim <= 64) return f(AttentionTile<T, 64>{});
  if (head_dim <= 128) return f(AttentionTile<T, 128>{});
  f(AttentionTile<T, 256>{});
}

}  // namespace cistron::ops::internal
