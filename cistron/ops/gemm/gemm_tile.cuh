// One tile of a matrix product by one block of threads, through shared memory: what the plain CUDA
// products share. Sums run in the order of k in one thread.
#pragma once

#include <cstdint>

#include "cistron/ops/cuda/element.cuh"

namespace cistron::ops::internal {

// Element (i, k) of an operand lies at data[i·step_i + k·step_k]; one of the steps is 1. For c =
// a·b the index i is a row of a and a column of b.
template <class T>
struct TileOperand {
  const T* data;
  std::int64_t step_i, step_k;
};

inline constexpr int kTileThreads = 256;
// Each thread owns kPer x kPer results, so that a tile has 16·kPer rows and columns.
template <int kPer>
inline constexpr int kTileSize = 16 * kPer;

// Tiles of 128 need half the shared memory traffic of those of 64; with fewer blocks than a GPU has
// multiprocessors the smaller ones win.
constexpr bool LargeTiles(std::int64_t blocks_of_large_tiles) {
  constexpr std::int64_t kMultiprocessors = 132;
  return blocks_of_large_tiles >= kMultiprocessors;
}

__device__ inline float Fma(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ inline double Fma(double a, double b, double c) {
  return __fma_rn(a, b, c);
}

// A slice of kDepth along k of both operands. The pitch keeps stores of transposed slices apart.
template <class C, int kSize, int kDepth>
struct alignas(16) TileSlice {
  static constexpr int kPitch = kSize + 4;
  C a[kDepth][kPitch];
  C b[kDepth][kPitch];
};

template <class C>
struct alignas(16) FourValues {
  C v[4];
};

// A thread's share of the slices of an operand, one after another, between global and shared
// memory. Neighbouring threads read neighbouring elements, whichever way the operand lies.
template <class T, int kSize, int kDepth>
class SliceLoader {
  using C = Compute<T>;
  static constexpr int kValues = kSize * kDepth / kTileThreads;
  // From one element of a thread to its next, along i or along k.
  static constexpr int kStepI = kTileThreads / kDepth, kStepK = kTileThreads / kSize;

 public:
  __device__ SliceLoader(const TileOperand<T>& from, std::int64_t i0, std::int64_t size,
                         std::int64_t depth)
      : along_k_(from.step_k == 1) {
    const int thread = static_cast<int>(threadIdx.x);
    i_ = along_k_ ? thread / kDepth : thread % kSize;
    k_ = along_k_ ? thread % kDepth : thread / kSize;
    at_ = from.data + (i0 + i_) * from.step_i + k_ * from.step_k;
    step_ = along_k_ ? kStepI * from.step_i : kStepK * from.step_k;
    next_ = kDepth * from.step_k;
    left_i_ = size - i0 - i_;
    left_k_ = depth - k_;
  }
  // The next slice; elements beyond `size` or `depth` are zeros.
  __device__ void Load() {
    const T* at = at_;
#pragma unroll
    for (int n = 0; n < kValues; ++n, at += step_) {
      const bool inside =
          along_k_ ? n * kStepI < left_i_ && left_k_ > 0 : n * kStepK < left_k_ && left_i_ > 0;
      values_[n] = inside ? Value(*at) : C(0);
    }
    at_ += next_;
    left_k_ -= kDepth;
  }
  template <int kPitch>
  __device__ void Store(C (*to)[kPitch]) const {
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      if (along_k_) {
        to[k_][i_ + n * kStepI] = values_[n];
      } else {
        to[k_ + n * kStepK][i_] = values_[n];
      }
    }
  }

 private:
  bool along_k_;
  int i_, k_;
  const T* at_;
  std::int64_t step_, next_, left_i_, left_k_;
  C values_[kValues];
};

// c[row0…, col0…] (= or +=) Σ_k a(i, k)·b(j, k) of the tile at (row0, col0) of a result [m, n] with
// rows c_stride apart. All kTileThreads threads of the block call it with the same arguments, once.
template <class In, class Out, int kPer>
__device__ void MultiplyTile(const TileOperand<In>& a, const TileOperand<In>& b, std::int64_t m,
                             std::int64_t n, std::int64_t depth, std::int64_t row0,
                             std::int64_t col0, Out* c, std::int64_t c_stride, bool accumulate) {
  using C = Compute<In>;
  constexpr int kSize = kTileSize<kPer>, kDepth = 16;
  using Slice = TileSlice<C, kSize, kDepth>;
  using Loader = SliceLoader<In, kSize, kDepth>;
  __shared__ Slice slices[2];
  const int tx = static_cast<int>(threadIdx.x) % 16, ty = static_cast<int>(threadIdx.x) / 16;

  C sums[kPer][kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) sums[i][j] = C(0);
  }
  Loader a_part(a, row0, m, depth), b_part(b, col0, n, depth);
  a_part.Load();
  b_part.Load();
  int which = 0;
  for (std::int64_t k0 = 0; k0 < depth; k0 += kDepth, which ^= 1) {
    Slice& slice = slices[which];
    a_part.Store(slice.a);
    b_part.Store(slice.b);
    // Whoever passes has read the other slice in the round before, which the next round overwrites.
    __syncthreads();
    a_part.Load();
    b_part.Load();
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      C a_values[kPer], b_values[kPer];
#pragma unroll
      for (int part = 0; part < kPer / 4; ++part) {
        const auto x = *reinterpret_cast<const FourValues<C>*>(&slice.a[k][part * 64 + ty * 4]);
        const auto y = *reinterpret_cast<const FourValues<C>*>(&slice.b[k][part * 64 + tx * 4]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a_values[part * 4 + i] = x.v[i];
          b_values[part * 4 + i] = y.v[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) sums[i][j] = Fma(a_values[i], b_values[j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const std::int64_t row = row0 + i / 4 * 64 + ty * 4 + i % 4;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const std::int64_t col = col0 + j / 4 * 64 + tx * 4 + j % 4;
      if (row < m && col < n) StoreElement(c[row * c_stride + col], sums[i][j], accumulate);
    }
  }
}

}  // namespace cistron::ops::internal
