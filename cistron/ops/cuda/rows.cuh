// What kernels over matrices with contiguous rows share: packs of elements that one access moves,
// warps or blocks that take a row each, and the rows in use of a grouped tensor.
#pragma once

#include <type_traits>

#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"

namespace cistron::ops::internal {

// N neighbouring elements, moved by accesses of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};
// Elements of 16 bytes.
template <class T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
__device__ inline Pack<T, N> LoadPack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <class T, int N>
__device__ inline void StorePack(const Pack<T, N>& pack, T* p) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

// to[0…N) (= or +=) values, each rounded once.
template <int N, class T>
__device__ inline void StoreValues(const Compute<T> (&values)[N], bool accumulate, T* to) {
  Pack<T, N> out;
  if (accumulate) out = LoadPack<N>(to);
#pragma unroll
  for (int i = 0; i < N; ++i) StoreElement(out.at[i], values[i], accumulate);
  StorePack(out, to);
}

// Whether packs of 16 bytes that start at multiples of their size in every row are aligned.
inline bool TakesPacks(const Tensor& t) {
  if (!t) return true;
  const auto size = static_cast<std::int64_t>(SizeOf(t.dtype()));
  const bool rows = t.rank() < 2 || t.dim(0) <= 1 || t.stride(0) * size % 16 == 0;
  return rows && reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0;
}

template <int N>
using PackWidth = std::integral_constant<int, N>;

// Calls f(PackWidth<N>) with 16 bytes of T where `packs`, else with one element.
template <class T, class F>
void DispatchPack(bool packs, F&& f) {
  if (packs) {
    f(PackWidth<kPack<T>>{});
  } else {
    f(PackWidth<1>{});
  }
}

// Blocks of kThreads: a warp a row (threads along x, rows along y) where a row is short, else the
// whole block.
struct RowGrid {
  dim3 block;
  unsigned blocks;  // never 0; RowOfThread may be beyond the last row

  // `steps`: packs of a row.
  RowGrid(std::int64_t rows, std::int64_t steps) {
    constexpr unsigned kWarp = 32;
    constexpr std::int64_t kStepsOfWarp = 4 * kWarp;
    block = steps <= kStepsOfWarp ? dim3(kWarp, kThreads / kWarp) : dim3(kThreads);
    blocks = static_cast<unsigned>(std::max<std::int64_t>(1, (rows + block.y - 1) / block.y));
  }
};
__device__ inline std::int64_t RowOfThread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

// Sum over the threads of a row of a RowGrid, in each of them, in a fixed order. All of them call
// it; `scratch` as in BlockSum. Calls may follow each other.
template <class T>
__device__ inline T RowSum(T x, T* scratch) {
  return blockDim.x == 32 ? WarpSum(x) : BlockSum(x, scratch);
}

// Rows [begin, end) of group `group`: counts below 0 are 0, and what is beyond `rows` is cut off.
struct GroupRows {
  std::int64_t begin, end;
};
__device__ inline std::int64_t CountOf(std::int64_t count, std::int64_t rows) {
  return count < 0 ? 0 : count < rows ? count : rows;
}
__device__ inline GroupRows RowsOfGroup(const std::int64_t* split_sizes, std::int64_t group,
                                        std::int64_t rows) {
  std::int64_t begin = 0;
  for (std::int64_t e = 0; e < group && begin < rows; ++e) begin += CountOf(split_sizes[e], rows);
  begin = begin < rows ? begin : rows;
  return {begin, begin + CountOf(split_sizes[group], rows - begin)};
}

// The group of a row, or `groups` where the row is beyond all of them.
__device__ inline std::int64_t GroupOfRow(const std::int64_t* split_sizes, std::int64_t groups,
                                          std::int64_t rows, std::int64_t row) {
  std::int64_t end = 0;
  for (std::int64_t e = 0; e < groups; ++e) {
    end += CountOf(split_sizes[e], rows);
    if (row < end) return e;
  }
  return groups;
}

// Σ split_sizes, at most `rows`; `rows` where it is null. Called by whole warps.
__device__ inline std::int64_t RowsUsed(const std::int64_t* split_sizes, std::int64_t groups,
                                        std::int64_t rows) {
  if (split_sizes == nullptr) return rows;
  std::int64_t sum = 0;
  for (std::int64_t e = threadIdx.x % 32; e < groups; e += 32) {
    sum += CountOf(split_sizes[e], rows);
  }
  sum = WarpSum(sum);
  return sum < rows ? sum : rows;
}

}  // namespace cistron::ops::internal
