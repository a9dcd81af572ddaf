// Rows of a permutation in pieces of 16 bytes. L neighbouring threads take P packs each of a row, L
// packs apart; a row longer than that is shared by several such groups. All that a thread reads is
// on its way before any of it is used.
#pragma once

#include "cistron/ops/cuda/rows.cuh"

namespace cistron::ops::permute_kernels {

using internal::kPack;
using internal::kThreads;
using internal::LoadPack;
using internal::Pack;
using internal::StorePack;
using internal::StoreValues;
using internal::Value;

// Rows of a matrix whose last stride is 1.
template <class T>
struct RowsOf {
  T* data;
  std::int64_t stride, rows;
  __device__ T* operator[](std::int64_t r) const { return data + r * stride; }
};

template <int L, int P>
struct Tile {
  static constexpr int kLanes = L, kPacks = P;
};

// The row and the first column of a thread's group, N elements a pack.
template <int L, int P, int N>
struct Piece {
  std::int64_t row;
  int column;

  __device__ explicit Piece(unsigned pieces_of_row) {
    const std::int64_t group =
        static_cast<std::int64_t>(blockIdx.x) * (kThreads / L) + static_cast<int>(threadIdx.x) / L;
    row = group / pieces_of_row;
    const int piece = static_cast<int>(group - row * pieces_of_row);
    column = (piece * L * P + static_cast<int>(threadIdx.x) % L) * N;
  }
  __device__ int at(int p) const { return column + p * L * N; }
};
template <int L, int P>
unsigned PiecesOfRow(std::int64_t packs) {
  return static_cast<unsigned>((packs + L * P - 1) / (L * P));
}
template <int L>
unsigned BlocksOf(std::int64_t rows, unsigned pieces_of_row) {
  constexpr std::int64_t kGroups = kThreads / L;
  return static_cast<unsigned>((rows * pieces_of_row + kGroups - 1) / kGroups);
}

// By tokens: x is read once, and the rows of an expert are written in order as tokens advance.
template <class T, int N, int L, int P>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const std::int32_t* row_of_slot, int top_k, RowsOf<const T> x, RowsOf<T> rows,
                   int width, unsigned pieces_of_row, bool accumulate) {
  const Piece<L, P, N> piece(pieces_of_row);
  if (piece.row >= x.rows) return;
  const std::int32_t* row_of = row_of_slot + piece.row * top_k;
  const T* from = x[piece.row];
  Pack<T, N> in[P];
#pragma unroll
  for (int p = 0; p < P; ++p) {
    in[p] = piece.at(p) < width ? LoadPack<N>(from + piece.at(p)) : Pack<T, N>{};
  }
  constexpr int kSlots = 4;  // looked up at once
  for (int first = 0; first < top_k; first += kSlots) {
    std::int32_t r[kSlots];
#pragma unroll
    for (int k = 0; k < kSlots; ++k) r[k] = first + k < top_k ? row_of[first + k] : -1;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (r[k] < 0 || r[k] >= rows.rows) continue;
#pragma unroll
      for (int p = 0; p < P; ++p) {
        if (piece.at(p) >= width) continue;
        T* to = rows[r[k]] + piece.at(p);
        if (accumulate) {
          Compute<T> values[N];
#pragma unroll
          for (int i = 0; i < N; ++i) values[i] = Value(in[p].at[i]);
          StoreValues<N>(values, true, to);
        } else {
          StorePack(in[p], to);
        }
      }
    }
  }
}

template <class T, int N, int L, int P>
__global__ void __launch_bounds__(kThreads)
    unpermute_kernel(const std::int32_t* row_of_slot, int top_k, RowsOf<const T> rows,
                     const Compute<T>* probs, RowsOf<T> y, int width, unsigned pieces_of_row,
                     bool accumulate) {
  using C = Compute<T>;
  const Piece<L, P, N> piece(pieces_of_row);
  if (piece.row >= y.rows) return;
  const std::int32_t* row_of = row_of_slot + piece.row * top_k;
  // Slots whose rows are on their way at once. More take registers that blocks in flight need.
  constexpr int S = 2;
  C sums[P][N] = {};
  for (int first = 0; first < top_k; first += S) {
    std::int32_t r[S];
    C prob[S];
#pragma unroll
    for (int k = 0; k < S; ++k) {
      r[k] = first + k < top_k ? row_of[first + k] : -1;
      if (r[k] >= rows.rows) r[k] = -1;
      prob[k] = first + k < top_k && probs != nullptr ? probs[piece.row * top_k + first + k] : C(1);
    }
    Pack<T, N> in[S][P];
#pragma unroll
    for (int k = 0; k < S; ++k) {
#pragma unroll
      for (int p = 0; p < P; ++p) {
        in[k][p] =
            r[k] >= 0 && piece.at(p) < width ? LoadPack<N>(rows[r[k]] + piece.at(p)) : Pack<T, N>{};
      }
    }
#pragma unroll
    for (int k = 0; k < S; ++k) {
      if (r[k] < 0) continue;
#pragma unroll
      for (int p = 0; p < P; ++p) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[p][i] += prob[k] * Value(in[k][p].at[i]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (piece.at(p) < width) StoreValues<N>(sums[p], accumulate, y[piece.row] + piece.at(p));
  }
}

template <class T>
struct BackwardArgs {
  const std::int32_t* row_of_slot;
  std::int64_t slots, top_k;
  RowsOf<const T> dy, rows;  // rows only with dprobs
  const Compute<T>* probs;   // null: 1
  RowsOf<T> drows;
  Compute<T>* dprobs;  // or null
  std::int64_t width;
  bool add_drows, add_dprobs;
};

// A warp a slot.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) unpermute_backward_kernel(BackwardArgs<T> args) {
  using C = Compute<T>;
  constexpr int P = 4;
  const std::int64_t s = internal::GridStart() / 32;
  if (s >= args.slots) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t r = args.row_of_slot[s];
  C dprob = 0;
  if (r >= 0 && r < args.drows.rows && (args.dprobs == nullptr || r < args.rows.rows)) {
    const T* dy = args.dy[s / args.top_k];
    const C prob = args.probs ? args.probs[s] : C(1);
    for (std::int64_t begin = lane * N; begin < args.width; begin += 32 * N * P) {
      Pack<T, N> d[P], row[P];
      const auto column = [&](int p) { return begin + p * 32 * N; };
#pragma unroll
      for (int p = 0; p < P; ++p) {
        d[p] = column(p) < args.width ? LoadPack<N>(dy + column(p)) : Pack<T, N>{};
      }
      if (args.dprobs != nullptr) {
#pragma unroll
        for (int p = 0; p < P; ++p) {
          row[p] = column(p) < args.width ? LoadPack<N>(args.rows[r] + column(p)) : Pack<T, N>{};
        }
#pragma unroll
        for (int p = 0; p < P; ++p) {
          if (column(p) >= args.width) continue;
#pragma unroll
          for (int i = 0; i < N; ++i) dprob += Value(d[p].at[i]) * Value(row[p].at[i]);
        }
      }
#pragma unroll
      for (int p = 0; p < P; ++p) {
        if (column(p) >= args.width) continue;
        C values[N];
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = prob * Value(d[p].at[i]);
        StoreValues<N>(values, args.add_drows, args.drows[r] + column(p));
      }
    }
  }
  if (args.dprobs == nullptr) return;
  dprob = internal::WarpSum(dprob);
  if (lane == 0) internal::StoreElement(args.dprobs[s], dprob, args.add_dprobs);
}

// Calls f(Tile<L, P>) with the tile for rows of so many packs of N elements.
template <int N, class F>
void DispatchTile(std::int64_t packs, F&& f) {
  if constexpr (N > 1) {
    if (packs <= 16) return f(Tile<16, 1>{});
    if (packs <= 32) return f(Tile<32, 1>{});
  }
  f(Tile<32, 2>{});
}

}  // namespace cistron::ops::permute_kernels
