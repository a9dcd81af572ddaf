// RMSNorm on a GPU. Rows of whole packs that fit into registers take the kernels of norm_tile.cuh;
// for others a warp, or a block, takes a row and keeps the beginning of it in registers between the
// sum and what needs it. For dg every block sums the rows of a fixed range, column by column; a
// second kernel adds the ranges in a fixed order.
#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/norm/norm_impls.h"
#include "cistron/ops/norm/norm_tile.cuh"

namespace cistron::ops {
namespace {

using internal::CheckLaunch;
using internal::DataOrNull;
using internal::DispatchPack;
using internal::kPack;
using internal::kThreads;
using internal::LoadPack;
using internal::Pack;
using internal::PackWidth;
using internal::RowGrid;
using internal::RowSum;
using internal::StoreValues;
using internal::StreamOf;
using internal::TakesPacks;
using internal::Value;
using norm_kernels::BackwardArgs;
using norm_kernels::ForwardArgs;
using norm_kernels::kMultiprocessors;

// Packs of a row that a thread keeps; what is beyond is read again.
constexpr int kKept = 4;

// Calls first(k, j) for the kept packs of this thread, and rest(j) for those beyond; j is the
// column of a pack.
template <int N, class First, class Rest>
__device__ inline void ForPacks(std::int64_t width, First&& first, Rest&& rest) {
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * N;
  std::int64_t j = static_cast<std::int64_t>(threadIdx.x) * N;
#pragma unroll
  for (int k = 0; k < kKept; ++k, j += step) {
    if (j < width) first(k, j);
  }
  for (; j < width; j += step) rest(j);
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) Forward(ForwardArgs<T> a) {
  using C = Compute<T>;
  __shared__ C scratch[33];
  const std::int64_t row = internal::RowOfThread();
  if (row >= a.rows) return;
  const T* x = a.x + row * a.x_stride;
  const T* residual = a.residual == nullptr ? nullptr : a.residual + row * a.residual_stride;
  T* h = a.h == nullptr ? nullptr : a.h + row * a.h_stride;
  T* y = a.y + row * a.y_stride;

  // Reads, and writes h; returns it as rounded.
  C squares = 0;
  const auto read = [&](std::int64_t j) {
    Pack<T, N> v = LoadPack<N>(x + j);
    if (residual != nullptr) {
      const Pack<T, N> r = LoadPack<N>(residual + j);
#pragma unroll
      for (int i = 0; i < N; ++i) v.at[i] = internal::Rounded<T>(Value(v.at[i]) + Value(r.at[i]));
    }
    if (h != nullptr && (residual != nullptr || h != x)) StorePack(v, h + j);
#pragma unroll
    for (int i = 0; i < N; ++i) squares += Value(v.at[i]) * Value(v.at[i]);
    return v;
  };
  Pack<T, N> kept[kKept];
  ForPacks<N>(
      a.width, [&](int k, std::int64_t j) { kept[k] = read(j); }, [&](std::int64_t j) { read(j); });
  squares = RowSum(squares, scratch);
  const C r = C(1) / sqrt(squares / static_cast<C>(a.width) + a.eps);

  const auto write = [&](const Pack<T, N>& v, std::int64_t j) {
    const Pack<T, N> g = LoadPack<N>(a.g + j);
    C values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = Value(v.at[i]) * r * Value(g.at[i]);
    StoreValues<N>(values, a.accumulate, y + j);
  };
  // h, where it is given, holds the sum that this very thread wrote.
  const T* again = h != nullptr ? h : x;
  ForPacks<N>(
      a.width, [&](int k, std::int64_t j) { write(kept[k], j); },
      [&](std::int64_t j) { write(LoadPack<N>(again + j), j); });
  if (a.rstd != nullptr && threadIdx.x == 0) a.rstd[row] = r;
}

// Columns whose sums over the warps of a block meet in shared memory.
template <int N>
constexpr int kColumns = 32 * N* kKept;

template <class T, int N>
__global__ void __launch_bounds__(kThreads) Backward(BackwardArgs<T> a) {
  using C = Compute<T>;
  constexpr int kWarps = kThreads / 32;
  __shared__ C scratch[33];
  __shared__ C sums[kWarps][kColumns<N>];
  C dg[kKept][N] = {};
  C* part = a.parts == nullptr ? nullptr : a.parts + blockIdx.x * a.width;
  // A row this long has the block for itself, and a column one thread.
  const auto add_to_part = [&](std::int64_t j, const C(&values)[N], bool first_row) {
    for (int i = 0; i < N; ++i) part[j + i] = first_row ? values[i] : part[j + i] + values[i];
  };

  const std::int64_t begin = blockIdx.x * a.rows_of_block;
  const std::int64_t end = min(a.rows, begin + a.rows_of_block);
  for (std::int64_t row = begin + threadIdx.y; row < end; row += blockDim.y) {
    const T* dy = a.dy + row * a.dy_stride;
    const T* h = a.h + row * a.h_stride;
    const T* dh_in = a.dh_in == nullptr ? nullptr : a.dh_in + row * a.dh_in_stride;
    T* dh = a.dh + row * a.dh_stride;
    const C r = a.rstd[row];
    C dot = 0;
    const auto add = [&](const Pack<T, N>& dy_pack, const Pack<T, N>& h_pack, std::int64_t j) {
      const Pack<T, N> g = LoadPack<N>(a.g + j);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dot += Value(g.at[i]) * Value(dy_pack.at[i]) * Value(h_pack.at[i]);
      }
    };
    Pack<T, N> kept_dy[kKept], kept_h[kKept];
    ForPacks<N>(
        a.width,
        [&](int k, std::int64_t j) {
          kept_dy[k] = LoadPack<N>(dy + j);
          kept_h[k] = LoadPack<N>(h + j);
          add(kept_dy[k], kept_h[k], j);
        },
        [&](std::int64_t j) { add(LoadPack<N>(dy + j), LoadPack<N>(h + j), j); });
    dot = RowSum(dot, scratch);
    const C factor = r * r * dot / static_cast<C>(a.width);

    // dh may be written over dy or dh_in: a thread has read its columns of both before.
    const auto write = [&](const Pack<T, N>& dy_pack, const Pack<T, N>& h_pack, std::int64_t j) {
      const Pack<T, N> g = LoadPack<N>(a.g + j);
      C values[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = r * (Value(g.at[i]) * Value(dy_pack.at[i]) - Value(h_pack.at[i]) * factor);
      }
      if (dh_in != nullptr) {
        const Pack<T, N> other = LoadPack<N>(dh_in + j);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] += Value(other.at[i]);
      }
      StoreValues<N>(values, a.accumulate, dh + j);
    };
    ForPacks<N>(
        a.width,
        [&](int k, std::int64_t j) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            dg[k][i] += Value(kept_dy[k].at[i]) * Value(kept_h[k].at[i]) * r;
          }
          write(kept_dy[k], kept_h[k], j);
        },
        [&](std::int64_t j) {
          const Pack<T, N> dy_pack = LoadPack<N>(dy + j), h_pack = LoadPack<N>(h + j);
          if (part != nullptr) {
            C values[N];
            for (int i = 0; i < N; ++i) {
              values[i] = Value(dy_pack.at[i]) * Value(h_pack.at[i]) * r;
            }
            add_to_part(j, values, row == begin);
          }
          write(dy_pack, h_pack, j);
        });
  }
  if (part == nullptr) return;  // the same in all threads

  if (blockDim.y == 1) {
    ForPacks<N>(
        a.width, [&](int k, std::int64_t j) { add_to_part(j, dg[k], true); }, [](std::int64_t) {});
    return;
  }
  // RowGrid gives warps of their own to rows of at most kColumns columns.
  ForPacks<N>(
      a.width,
      [&](int k, std::int64_t j) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[threadIdx.y][j + i] = dg[k][i];
      },
      [](std::int64_t) {});
  __syncthreads();
  for (std::int64_t j = threadIdx.y * 32 + threadIdx.x; j < a.width; j += kThreads) {
    C sum = sums[0][j];
    for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp][j];
    part[j] = sum;
  }
}

// Blocks of the backward pass: a function of the number of rows alone. Four a multiprocessor, so
// that each has its share of rows at once.
constexpr std::int64_t kMaxParts = 4 * kMultiprocessors;
std::int64_t RowsOfBlock(std::int64_t rows) {
  constexpr std::int64_t kFewest = kThreads / 32;
  return std::max(kFewest, (rows + kMaxParts - 1) / kMaxParts);
}

// DispatchTile for a row of `width` elements in packs. Not for f64, which nothing trains in.
template <class T, class F>
bool OnTile(std::int64_t width, F&& f) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    return norm_kernels::DispatchTile(width / kPack<T>, std::forward<F>(f));
  }
}

void ForwardCuda(const Context& ctx, const Tensor& x, const Tensor& residual, const Tensor& g,
                 double eps, const Tensor& h, const Tensor& rstd, const Output& y) {
  const std::int64_t rows = x.dim(0), width = x.dim(1);
  if (rows == 0) return;
  DispatchFloat("norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const ForwardArgs<T> args{.x = x.data<T>(),
                              .residual = DataOrNull<T>(residual),
                              .g = g.data<T>(),
                              .x_stride = x.stride(0),
                              .residual_stride = residual ? residual.stride(0) : 0,
                              .h = DataOrNull<T>(h),
                              .y = y.tensor.data<T>(),
                              .h_stride = h ? h.stride(0) : 0,
                              .y_stride = y.tensor.stride(0),
                              .rstd = DataOrNull<C>(rstd),
                              .rows = rows,
                              .width = width,
                              .eps = static_cast<C>(eps),
                              .accumulate = internal::Accumulates(y)};
    const bool packs = width % kPack<T> == 0 && TakesPacks(x) && TakesPacks(residual) &&
                       TakesPacks(g) && TakesPacks(h) && TakesPacks(y.tensor);
    const auto on_tile = [&](auto tile) {
      using Tile = decltype(tile);
      constexpr std::int64_t kGroups = Tile::kGroups;
      internal::LaunchDependent("norm",
                                norm_kernels::rms_norm_tile_kernel<T, Tile::kLanes, Tile::kPacks>,
                                dim3(static_cast<unsigned>((rows + kGroups - 1) / kGroups)),
                                dim3(kThreads), StreamOf(ctx), args);
    };
    if (packs && OnTile<T>(width, on_tile)) return;
    DispatchPack<T>(packs, [&](auto pack) {
      constexpr int kN = decltype(pack)::value;
      const RowGrid grid(rows, (width + kN - 1) / kN);
      Forward<T, kN><<<grid.blocks, grid.block, 0, StreamOf(ctx)>>>(args);
    });
  });
  CheckLaunch("norm");
}

void BackwardCuda(const Context& ctx, const Tensor& dy, const Tensor& h, const Tensor& rstd,
                  const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg) {
  const std::int64_t rows = h.dim(0), width = h.dim(1);
  DispatchFloat("norm", h.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    BackwardArgs<T> args{.dy = dy.data<T>(),
                         .h = h.data<T>(),
                         .g = g.data<T>(),
                         .dh_in = DataOrNull<T>(dh_in),
                         .dy_stride = dy.stride(0),
                         .h_stride = h.stride(0),
                         .dh_in_stride = dh_in ? dh_in.stride(0) : 0,
                         .rstd = rstd.data<C>(),
                         .dh = dh.tensor.data<T>(),
                         .dh_stride = dh.tensor.stride(0),
                         .parts = nullptr,
                         .rows = rows,
                         .width = width,
                         .rows_of_block = 1,
                         .accumulate = internal::Accumulates(dh)};
    const bool packs = width % kPack<T> == 0 && TakesPacks(dy) && TakesPacks(h) && TakesPacks(g) &&
                       TakesPacks(dh_in) && TakesPacks(dh.tensor);
    Tensor parts;
    std::int64_t blocks = 0;
    const auto split = [&](std::int64_t rows_of_block) {
      args.rows_of_block = rows_of_block;
      blocks = (rows + rows_of_block - 1) / rows_of_block;
      if (dg) parts = ctx.Empty({blocks, width}, kDTypeOf<C>);
      args.parts = DataOrNull<C>(parts);
      return blocks > 0;
    };
    const auto on_tile = [&](auto tile) {
      constexpr int kL = decltype(tile)::kLanes, kP = decltype(tile)::kPacks;
      if (!split(norm_kernels::RowsOfTileBlock<kL, norm_kernels::PlanOf<kP>>(rows))) return;
      internal::LaunchDependent("norm", norm_kernels::rms_norm_backward_tile_kernel<T, kL, kP>,
                                dim3(static_cast<unsigned>(blocks)), dim3(kThreads), StreamOf(ctx),
                                args);
    };
    const bool in_tile = packs && OnTile<T>(width, on_tile);
    if (!in_tile && split(RowsOfBlock(rows))) {
      DispatchPack<T>(packs, [&](auto pack) {
        constexpr int kN = decltype(pack)::value;
        const RowGrid grid(rows, (width + kN - 1) / kN);
        Backward<T, kN><<<static_cast<unsigned>(blocks), grid.block, 0, StreamOf(ctx)>>>(args);
      });
    }
    CheckLaunch("norm");
    if (!dg) return;
    constexpr int kTile = norm_kernels::kSumColumns;
    internal::LaunchDependent("norm", norm_kernels::sum_parts_kernel<C>,
                              dim3(static_cast<unsigned>((width + kTile - 1) / kTile)),
                              dim3(kTile, kTile), StreamOf(ctx), static_cast<int>(blocks),
                              static_cast<int>(width), parts.data<C>(), dg.tensor.data<C>(),
                              internal::Accumulates(dg));
  });
}

}  // namespace

RmsNormImpl CudaRmsNorm() {
  return {"cuda",
          internal::FloatsOnCuda<RmsNormProblem>,
          {ForwardCuda, BackwardCuda},
          DeviceType::kCuda};
}

}  // namespace cistron::ops
