// RMSNorm of rows that stay in registers. L neighbouring threads of a block take a row, each P
// packs of it that are L packs apart; a thread has R rows in flight, and asks for all that it reads
// of them before it uses any, so that it waits for memory once. All of these kernels are launched
// by LaunchDependent.
#pragma once

#include <cstring>

#include "cistron/ops/cuda/dependent_launch.cuh"
#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/norm/norm_kernels.h"

namespace cistron::ops::norm_kernels {

using internal::kPack;
using internal::kThreads;

template <int L, int P>
struct Tile {
  static constexpr int kLanes = L, kPacks = P;
  static constexpr int kGroups = kThreads / L;  // rows of a block at once, but for those in flight
};

// The column of a thread's pack p.
template <class T, int L>
__device__ inline int Column(int p) {
  return (p * L + static_cast<int>(threadIdx.x) % L) * kPack<T>;
}

// 16 bytes of T, as registers hold them: unpacked where they are used, and again where they are
// used later, since the values of a bf16 pack take twice its registers.
template <class T>
struct Bits {
  uint4 words{};

  __device__ void Values(Compute<T> (&to)[kPack<T>]) const {
    if constexpr (std::is_same_v<T, bf16>) {
      const unsigned w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[2 * i] = __uint_as_float(w[i] << 16);
        to[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
      }
    } else {
      memcpy(to, &words, sizeof(words));
    }
  }
  // Rounds to nearest even.
  static __device__ Bits Of(const Compute<T> (&from)[kPack<T>]) {
    Bits bits;
    if constexpr (std::is_same_v<T, bf16>) {
      unsigned w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        memcpy(&w[i], &pair, sizeof(pair));
      }
      bits.words = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      memcpy(&bits.words, from, sizeof(bits.words));
    }
    return bits;
  }
  static __device__ Bits Load(const T* from) {
    return {*reinterpret_cast<const uint4*>(from)};
  }
  __device__ void Store(T* to) const {
    *reinterpret_cast<uint4*>(to) = words;
  }
  // Makes the compiler forget values that it unpacked before.
  __device__ void Forget() {
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  }
};

// to (= or +=) values, rounded once.
template <class T>
__device__ inline void StoreRounded(Compute<T> (&values)[kPack<T>], bool accumulate, T* to) {
  if (accumulate) {
    Compute<T> before[kPack<T>];
    Bits<T>::Load(to).Values(before);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) values[i] += before[i];
  }
  Bits<T>::Of(values).Store(to);
}

// Packs of R rows, as a thread holds them.
template <class T, int L, int P, int R>
struct Held {
  Bits<T> at[R][P];

  // Of rows `first`, `first` + 1, …; zeros where there are none.
  __device__ void Load(const T* data, std::int64_t stride, std::int64_t first, std::int64_t end,
                       int width) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const T* row = data + (first + r) * stride;
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const int j = Column<T, L>(p);
        at[r][p] = first + r < end && j < width ? Bits<T>::Load(row + j) : Bits<T>{};
      }
    }
  }
  __device__ void Forget() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int p = 0; p < P; ++p) at[r][p].Forget();
    }
  }
};

// Sums of R values over the L threads of a row, in each of them, in a fixed order. All threads of a
// block call it. `scratch` must not be that of the call before.
template <class C, int R>
using Scratch = C[R][kThreads / 32];
template <int L, int R, class C>
__device__ inline void SumOverRow(C (&x)[R], Scratch<C, R>& scratch) {
#pragma unroll
  for (int offset = (L < 32 ? L : 32) / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] += __shfl_xor_sync(0xffffffffu, x[r], offset);
  }
  if constexpr (L > 32) {
    constexpr int kWarps = L / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int r = 0; r < R; ++r) scratch[r][warp] = x[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      x[r] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x[r] += scratch[r][warp / kWarps * kWarps + w];
    }
  }
}

template <class T, int L, int P>
__global__ void __launch_bounds__(kThreads) rms_norm_tile_kernel(ForwardArgs<T> a) {
  using C = Compute<T>;
  constexpr int N = kPack<T>;
  __shared__ Scratch<C, 1> scratch;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * Tile<L, P>::kGroups + threadIdx.x / L;
  const int width = static_cast<int>(a.width);
  internal::WaitForKernelBefore();
  Held<T, L, P, 1> x, other, g;
  x.Load(a.x, a.x_stride, row, a.rows, width);
  if (a.residual != nullptr) other.Load(a.residual, a.residual_stride, row, a.rows, width);
  g.Load(a.g, 0, 0, 1, width);

  C squares[1] = {};
#pragma unroll
  for (int p = 0; p < P; ++p) {
    C values[N], added[N];
    x.at[0][p].Values(values);
    if (a.residual != nullptr) {
      other.at[0][p].Values(added);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += added[i];
      x.at[0][p] = Bits<T>::Of(values);
      x.at[0][p].Values(values);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) squares[0] = fma(values[i], values[i], squares[0]);
    const int j = Column<T, L>(p);
    if (a.h != nullptr && row < a.rows && j < width) x.at[0][p].Store(a.h + row * a.h_stride + j);
  }
  SumOverRow<L>(squares, scratch);
  if (row >= a.rows) return;
  x.Forget();
  const C rstd = C(1) / sqrt(squares[0] / static_cast<C>(a.width) + a.eps);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int j = Column<T, L>(p);
    if (j >= width) continue;
    C values[N], gain[N];
    x.at[0][p].Values(values);
    g.at[0][p].Values(gain);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = values[i] * rstd * gain[i];
    StoreRounded<T>(values, a.accumulate, a.y + row * a.y_stride + j);
  }
  if (a.rstd != nullptr && threadIdx.x % L == 0) a.rstd[row] = rstd;
}

// Of the backward pass: rows in flight, whether those of the next round are asked for before this
// one's are used, and blocks of a multiprocessor, as many as registers allow (dg of a thread's
// columns, three operands of its rows, g). All blocks run at once, each a range of rows, on the
// largest device of today; how many they are depends on the shape alone.
template <int R, bool kAhead, int kBlocks>
struct BackwardPlan {
  static constexpr int kRows = R, kBlocksOfMultiprocessor = kBlocks;
  static constexpr bool kReadsAhead = kAhead;
};
template <int P>
using PlanOf = BackwardPlan<P == 1 ? 2 : 1, P <= 2, 2>;
inline constexpr std::int64_t kMultiprocessors = 132;

template <int L, class Plan>
std::int64_t RowsOfTileBlock(std::int64_t rows) {
  constexpr std::int64_t kMost = kMultiprocessors * Plan::kBlocksOfMultiprocessor;
  constexpr std::int64_t kFewest = kThreads / L * Plan::kRows;
  return std::max(kFewest, (rows + kMost - 1) / kMost);
}

// What a round of the backward pass reads.
template <class T, int L, int P, int R>
struct BackwardRows {
  Held<T, L, P, R> dy, h, other;
  Compute<T> rstd[R];

  __device__ void Load(const BackwardArgs<T>& a, std::int64_t first, std::int64_t end) {
    const int width = static_cast<int>(a.width);
    dy.Load(a.dy, a.dy_stride, first, end, width);
    h.Load(a.h, a.h_stride, first, end, width);
    if (a.dh_in != nullptr) other.Load(a.dh_in, a.dh_in_stride, first, end, width);
#pragma unroll
    for (int r = 0; r < R; ++r) rstd[r] = first + r < end ? a.rstd[first + r] : Compute<T>(0);
  }
};

template <class T, int L, int P, class Plan = PlanOf<P>>
__global__ void __launch_bounds__(kThreads, Plan::kBlocksOfMultiprocessor)
    rms_norm_backward_tile_kernel(BackwardArgs<T> a) {
  using C = Compute<T>;
  constexpr int N = kPack<T>, R = Plan::kRows, kGroups = Tile<L, P>::kGroups;
  __shared__ Scratch<C, R> scratch[2];
  internal::LetNextKernelStart();  // sum_parts_kernel
  internal::WaitForKernelBefore();
  const int width = static_cast<int>(a.width);
  Held<T, L, P, 1> g;
  g.Load(a.g, 0, 0, 1, width);
  C dg[P][N] = {};

  const std::int64_t begin = blockIdx.x * a.rows_of_block;
  const std::int64_t end = min(a.rows, begin + a.rows_of_block);
  const int group = static_cast<int>(threadIdx.x) / L;
  int round = 0;
  BackwardRows<T, L, P, R> next;
  if constexpr (Plan::kReadsAhead) next.Load(a, begin + group * R, end);
  // The same number of rounds in all threads.
  for (std::int64_t first = begin + group * R; first - group * R < end; first += kGroups * R) {
    BackwardRows<T, L, P, R> rows;
    if constexpr (Plan::kReadsAhead) {
      rows = next;
      next.Load(a, first + kGroups * R, end);
    } else {
      rows.Load(a, first, end);
    }
    C dot[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int p = 0; p < P; ++p) {
        C dys[N], hs[N], gain[N];
        rows.dy.at[r][p].Values(dys);
        rows.h.at[r][p].Values(hs);
        g.at[0][p].Values(gain);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const C product = dys[i] * hs[i];
          dot[r] = fma(gain[i], product, dot[r]);
          dg[p][i] = fma(product, rows.rstd[r], dg[p][i]);
        }
      }
    }
    SumOverRow<L>(dot, scratch[round % 2]);
    ++round;
    rows.dy.Forget();
    rows.h.Forget();
    g.Forget();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const C rstd = rows.rstd[r], factor = rstd * rstd * dot[r] / static_cast<C>(a.width);
      T* dh = a.dh + (first + r) * a.dh_stride;
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const int j = Column<T, L>(p);
        if (first + r >= end || j >= width) continue;
        C dys[N], hs[N], gain[N], added[N];
        rows.dy.at[r][p].Values(dys);
        rows.h.at[r][p].Values(hs);
        g.at[0][p].Values(gain);
        rows.other.at[r][p].Values(added);  // zeros where there is none
#pragma unroll
        for (int i = 0; i < N; ++i) {
          dys[i] = fma(rstd, fma(-hs[i], factor, gain[i] * dys[i]), added[i]);
        }
        StoreRounded<T>(dys, a.accumulate, dh + j);
      }
    }
  }
  if (a.parts == nullptr) return;  // the same in all threads

  C* part = a.parts + blockIdx.x * a.width;
  constexpr int kColumns = L * P * N;
  if constexpr (kGroups == 1) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int j = Column<T, L>(p);
      if (j >= a.width) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) part[j + i] = dg[p][i];
    }
  } else {
    __shared__ C sums[kGroups][kColumns];
#pragma unroll
    for (int p = 0; p < P; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[group][Column<T, L>(p) + i] = dg[p][i];
    }
    __syncthreads();
    for (int j = static_cast<int>(threadIdx.x); j < a.width; j += kThreads) {
      C sum = sums[0][j];
#pragma unroll
      for (int k = 1; k < kGroups; ++k) sum += sums[k][j];
      part[j] = sum;
    }
  }
}

// dg (= or +=) the sum of the parts of `count` blocks, in order: a block takes 32 columns, 32
// threads of it a column, each with all its parts on their way at once.
constexpr int kSumColumns = 32;
template <class C>
__global__ void __launch_bounds__(kSumColumns* kSumColumns)
    sum_parts_kernel(int count, int width, const C* parts, C* dg, bool accumulate) {
  constexpr int kInFlight = 16;
  __shared__ C sums[kSumColumns][kSumColumns + 1];
  const int j = static_cast<int>(blockIdx.x * kSumColumns + threadIdx.x);
  const C* from = parts + static_cast<std::int64_t>(threadIdx.y) * width + j;
  internal::LetNextKernelStart();
  internal::WaitForKernelBefore();
  C sum = 0;
  for (int b = static_cast<int>(threadIdx.y); b < count; b += kSumColumns * kInFlight) {
    C in[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int part = b + i * kSumColumns;
      in[i] = part < count && j < width ? *from : C(0);
      from += static_cast<std::int64_t>(kSumColumns) * width;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) sum += in[i];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // A warp a column: its threads have what 32 threads summed.
  sum = internal::WarpSum(sums[threadIdx.x][threadIdx.y]);
  const int column = static_cast<int>(blockIdx.x * kSumColumns + threadIdx.y);
  if (threadIdx.x != 0 || column >= width) return;
  dg[column] = accumulate ? dg[column] + sum : sum;
}

// Calls f(Tile<L, P>) with the smallest tile that holds a row of `packs`; false where none does.
template <class F>
bool DispatchTile(std::int64_t packs, F&& f) {
  if (packs <= 16) return f(Tile<16, 1>{}), true;
  if (packs <= 32) return f(Tile<32, 1>{}), true;
  if (packs <= 64) return f(Tile<32, 2>{}), true;
  if (packs <= 128) return f(Tile<64, 2>{}), true;
  if (packs <= 256) return f(Tile<128, 2>{}), true;
  if (packs <= 512) return f(Tile<256, 2>{}), true;
  if (packs <= 1024) return f(Tile<256, 4>{}), true;
  return false;
}

}  // namespace cistron::ops::norm_kernels
