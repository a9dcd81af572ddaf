// grouped_bias on a GPU: a warp, or a block, takes a row and finds its group among the counts. For
// dbias a block takes 32 columns of a group, and its warps rows that lie side by side.
#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/grouped_bias/grouped_bias_impls.h"

namespace cistron::ops {
namespace {

using internal::DataOrNull;
using internal::kPack;
using internal::LoadPack;
using internal::Pack;
using internal::RowGrid;
using internal::StreamOf;
using internal::TakesPacks;
using internal::Value;

struct Groups {
  const std::int64_t* split_sizes;
  std::int64_t count, rows;
};

template <class T, int N>
__global__ void AddBias(Groups groups, std::int64_t width, const T* bias,
                        const Compute<T>* row_scale, T* y) {
  using C = Compute<T>;
  const std::int64_t row = internal::RowOfThread();
  if (row >= groups.rows) return;
  const std::int64_t e = internal::GroupOfRow(groups.split_sizes, groups.count, groups.rows, row);
  if (e == groups.count) return;
  const C s = row_scale == nullptr ? C(1) : row_scale[row];
  const T* b = bias + e * width;
  T* to = y + row * width;
  for (std::int64_t j = threadIdx.x * N; j < width; j += blockDim.x * N) {
    const Pack<T, N> pack = LoadPack<N>(b + j);
    C values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = s * Value(pack.at[i]);
    internal::StoreValues<N>(values, /*accumulate=*/true, to + j);
  }
}

template <class T, int N>
__global__ void DotRows(Groups groups, std::int64_t width, const T* dy, const T* bias,
                        Compute<T>* drow_scale, bool accumulate) {
  using C = Compute<T>;
  __shared__ C scratch[33];
  const std::int64_t row = internal::RowOfThread();
  if (row >= groups.rows) return;
  const std::int64_t e = internal::GroupOfRow(groups.split_sizes, groups.count, groups.rows, row);
  if (e == groups.count) return;
  const T* b = bias + e * width;
  const T* from = dy + row * width;
  C dot = 0;
  for (std::int64_t j = threadIdx.x * N; j < width; j += blockDim.x * N) {
    const Pack<T, N> d = LoadPack<N>(from + j), pack = LoadPack<N>(b + j);
#pragma unroll
    for (int i = 0; i < N; ++i) dot += Value(d.at[i]) * Value(pack.at[i]);
  }
  dot = internal::RowSum(dot, scratch);
  if (threadIdx.x == 0) internal::StoreElement(drow_scale[row], dot, accumulate);
}

constexpr int kColumns = 32, kSlices = 32;  // of a block

template <class T>
__global__ void SumRows(Groups groups, std::int64_t width, const T* dy, const Compute<T>* row_scale,
                        Compute<T>* dbias, bool accumulate) {
  using C = Compute<T>;
  __shared__ C sums[kSlices][kColumns + 1];
  const std::int64_t e = blockIdx.x;
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.y) * kColumns + threadIdx.x;
  const internal::GroupRows rows = internal::RowsOfGroup(groups.split_sizes, e, groups.rows);
  C sum = 0;
  if (j < width) {
    for (std::int64_t row = rows.begin + threadIdx.y; row < rows.end; row += kSlices) {
      const C s = row_scale == nullptr ? C(1) : row_scale[row];
      sum += s * Value(dy[row * width + j]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || j >= width) return;
  for (int i = 1; i < kSlices; ++i) sum += sums[i][threadIdx.x];
  internal::StoreElement(dbias[e * width + j], sum, accumulate);
}

Groups GroupsOf(const Tensor& split_sizes, const Tensor& rows) {
  return {split_sizes.data<std::int64_t>(), split_sizes.dim(0), rows.dim(0)};
}

void ForwardCuda(const Context& ctx, const Tensor& bias, const Tensor& row_scale,
                 const Tensor& split_sizes, const Tensor& y) {
  const std::int64_t width = y.dim(1);
  if (y.numel() == 0) return;
  DispatchFloat("grouped_bias", y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool packs = width % kPack<T> == 0 && TakesPacks(bias) && TakesPacks(y);
    internal::DispatchPack<T>(packs, [&](auto pack) {
      constexpr int kN = decltype(pack)::value;
      const RowGrid grid(y.dim(0), width / kN);
      AddBias<T, kN><<<grid.blocks, grid.block, 0, StreamOf(ctx)>>>(
          GroupsOf(split_sizes, y), width, bias.data<T>(), DataOrNull<Compute<T>>(row_scale),
          y.data<T>());
    });
  });
  internal::CheckLaunch("grouped_bias");
}

void BackwardCuda(const Context& ctx, const Tensor& dy, const Tensor& bias, const Tensor& row_scale,
                  const Tensor& split_sizes, const Output& dbias, const Output& drow_scale) {
  const std::int64_t width = dy.dim(1), count = split_sizes.dim(0);
  const Groups groups = GroupsOf(split_sizes, dy);
  DispatchFloat("grouped_bias", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    if (drow_scale && dy.dim(0) > 0) {
      const bool packs = width % kPack<T> == 0 && TakesPacks(bias) && TakesPacks(dy);
      internal::DispatchPack<T>(packs, [&](auto pack) {
        constexpr int kN = decltype(pack)::value;
        const RowGrid grid(dy.dim(0), width / kN);
        DotRows<T, kN><<<grid.blocks, grid.block, 0, StreamOf(ctx)>>>(
            groups, width, dy.data<T>(), bias.data<T>(), drow_scale.tensor.data<C>(),
            internal::Accumulates(drow_scale));
      });
    }
    if (dbias && count > 0 && width > 0) {
      const dim3 grid(static_cast<unsigned>(count),
                      static_cast<unsigned>((width + kColumns - 1) / kColumns));
      SumRows<T><<<grid, dim3(kColumns, kSlices), 0, StreamOf(ctx)>>>(
          groups, width, dy.data<T>(), DataOrNull<C>(row_scale), dbias.tensor.data<C>(),
          internal::Accumulates(dbias));
    }
  });
  internal::CheckLaunch("grouped_bias");
}

}  // namespace

extern constinit const GroupedBiasImpl kGroupedBiasCuda = {
    "cuda",
    internal::FloatsOnCuda<GroupedBiasProblem>,
    {ForwardCuda, BackwardCuda},
    DeviceType::kCuda};

}  // namespace cistron::ops
