// permute on a GPU: rows are copied and summed in pieces of 16 bytes where all of them are so
// aligned. Every sum runs in one thread or one warp, in a fixed order.
#include <type_traits>

#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/permute/permute_impls.h"
#include "cistron/ops/permute/permute_tile.cuh"
#include "cistron/ops/permute/row_map_cuda.h"

namespace cistron::ops {
namespace {

using internal::Accumulates;
using internal::kThreads;
using internal::StoreElement;
using internal::StreamOf;
using internal::Value;
using permute_kernels::RowsOf;

template <class T>
RowsOf<T> MakeRows(const Tensor& t) {
  return t ? RowsOf<T>{t.data<T>(), t.stride(0), t.dim(0)} : RowsOf<T>{};
}

template <class T>
__global__ void permute_slots_kernel(const std::int32_t* slot_of_row, const T* slots,
                                     std::int64_t n, T* rows, bool accumulate) {
  for (std::int64_t r = internal::GridStart(); r < n; r += internal::GridStep()) {
    const std::int32_t slot = slot_of_row[r];
    if (slot >= 0) StoreElement(rows[r], Value(slots[slot]), accumulate);
  }
}

template <class T>
__global__ void unpermute_slots_kernel(const std::int32_t* row_of_slot, const T* rows,
                                       std::int64_t num_rows, std::int64_t n, T* slots,
                                       bool accumulate) {
  for (std::int64_t s = internal::GridStart(); s < n; s += internal::GridStep()) {
    const std::int32_t row = row_of_slot[s];
    const bool has_row = row >= 0 && row < num_rows;
    StoreElement(slots[s], has_row ? Value(rows[row]) : Compute<T>(0), accumulate);
  }
}

// Whether every row of a matrix begins and ends on 16 bytes.
bool IsAligned(const Tensor& t) {
  return !t || (internal::TakesPacks(t) &&
                t.dim(1) * static_cast<std::int64_t>(SizeOf(t.dtype())) % 16 == 0);
}

// Calls f(T, elements that are moved at once).
template <class F>
void DispatchPacks(const char* op, std::initializer_list<Tensor> matrices, F&& f) {
  const bool aligned = std::all_of(matrices.begin(), matrices.end(), IsAligned);
  DispatchFloat(op, matrices.begin()->dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (aligned) {
      f(tag, std::integral_constant<int, 16 / sizeof(T)>{});
    } else {
      f(tag, std::integral_constant<int, 1>{});
    }
    internal::CheckLaunch(op);
  });
}

// Rows in pieces for groups of threads: launches with Tile<L, P>, pieces of a row, blocks.
template <int kN, class F>
void LaunchOverRows(std::int64_t rows, std::int64_t width, F&& launch) {
  const std::int64_t packs = (width + kN - 1) / kN;
  permute_kernels::DispatchTile<kN>(packs, [&](auto tile) {
    constexpr int kL = decltype(tile)::kLanes, kP = decltype(tile)::kPacks;
    const unsigned pieces = permute_kernels::PiecesOfRow<kL, kP>(packs);
    launch(tile, pieces, permute_kernels::BlocksOf<kL>(rows, pieces));
  });
}

void PermuteCuda(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows) {
  const std::int64_t width = x.dim(1);
  if (rows.tensor.dim(0) == 0 || x.dim(0) == 0 || width == 0) return;
  DispatchPacks("permute", {x, rows.tensor}, [&](auto tag, auto pack) {
    using T = typename decltype(tag)::type;
    constexpr int kN = decltype(pack)::value;
    LaunchOverRows<kN>(x.dim(0), width, [&](auto tile, unsigned pieces, unsigned blocks) {
      constexpr int kL = decltype(tile)::kLanes, kP = decltype(tile)::kPacks;
      permute_kernels::permute_kernel<T, kN, kL, kP><<<blocks, kThreads, 0, StreamOf(ctx)>>>(
          map.row_of_slot.data<std::int32_t>(), static_cast<int>(map.top_k),
          RowsOf<const T>{x.data<T>(), x.stride(0), x.dim(0)}, MakeRows<T>(rows.tensor),
          static_cast<int>(width), pieces, Accumulates(rows));
    });
  });
}

void UnpermuteCuda(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
                   const Output& y) {
  const std::int64_t width = rows.dim(1);
  if (y.tensor.dim(0) == 0 || width == 0) return;
  DispatchPacks("unpermute", {rows, y.tensor}, [&](auto tag, auto pack) {
    using T = typename decltype(tag)::type;
    constexpr int kN = decltype(pack)::value;
    LaunchOverRows<kN>(y.tensor.dim(0), width, [&](auto tile, unsigned pieces, unsigned blocks) {
      constexpr int kL = decltype(tile)::kLanes, kP = decltype(tile)::kPacks;
      permute_kernels::unpermute_kernel<T, kN, kL, kP><<<blocks, kThreads, 0, StreamOf(ctx)>>>(
          map.row_of_slot.data<std::int32_t>(), static_cast<int>(map.top_k),
          RowsOf<const T>{rows.data<T>(), rows.stride(0), rows.dim(0)},
          internal::DataOrNull<Compute<T>>(probs), MakeRows<T>(y.tensor), static_cast<int>(width),
          pieces, Accumulates(y));
    });
  });
}

void UnpermuteBackwardCuda(const Context& ctx, const RowMap& map, const Tensor& dy,
                           const Tensor& rows, const Tensor& probs, const Output& drows,
                           const Output& dprobs) {
  const std::int64_t slots = map.row_of_slot.dim(0);
  if (slots == 0) return;
  DispatchPacks(
      "unpermute backward", {dy, dprobs ? rows : Tensor(), drows.tensor}, [&](auto tag, auto pack) {
        using T = typename decltype(tag)::type;
        constexpr int kN = decltype(pack)::value;
        permute_kernels::BackwardArgs<T> args{};
        args.row_of_slot = map.row_of_slot.data<std::int32_t>();
        args.slots = slots;
        args.top_k = map.top_k;
        args.dy = {dy.data<T>(), dy.stride(0), dy.dim(0)};
        if (dprobs) args.rows = {rows.data<T>(), rows.stride(0), rows.dim(0)};
        args.probs = internal::DataOrNull<Compute<T>>(probs);
        args.drows = MakeRows<T>(drows.tensor);
        args.dprobs = internal::DataOrNull<Compute<T>>(dprobs.tensor);
        args.width = dy.dim(1);
        args.add_drows = Accumulates(drows);
        args.add_dprobs = Accumulates(dprobs);
        constexpr std::int64_t kWarps = kThreads / 32;
        permute_kernels::unpermute_backward_kernel<T, kN>
            <<<static_cast<unsigned>((slots + kWarps - 1) / kWarps), kThreads, 0, StreamOf(ctx)>>>(
                args);
      });
}

void PermuteSlotsCuda(const Context& ctx, const RowMap& map, const Tensor& slots,
                      const Output& rows) {
  const std::int64_t n = std::min(rows.tensor.dim(0), map.slot_of_row.dim(0));
  DispatchFloat("permute slots", slots.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    permute_slots_kernel<<<internal::BlocksFor(n), kThreads, 0, StreamOf(ctx)>>>(
        map.slot_of_row.data<std::int32_t>(), slots.data<T>(), n, rows.tensor.data<T>(),
        Accumulates(rows));
    internal::CheckLaunch("permute slots");
  });
}

void UnpermuteSlotsCuda(const Context& ctx, const RowMap& map, const Tensor& rows,
                        const Output& slots) {
  const std::int64_t n = slots.tensor.numel();
  DispatchFloat("unpermute slots", rows.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    unpermute_slots_kernel<<<internal::BlocksFor(n), kThreads, 0, StreamOf(ctx)>>>(
        map.row_of_slot.data<std::int32_t>(), rows.data<T>(), rows.dim(0), n,
        slots.tensor.data<T>(), Accumulates(slots));
    internal::CheckLaunch("unpermute slots");
  });
}

}  // namespace

extern constinit const PermuteImpl kPermuteCuda = {
    "cuda",
    internal::FloatsOnCuda<PermuteProblem>,
    {internal::BuildRowMapCuda, PermuteCuda, UnpermuteCuda, UnpermuteBackwardCuda, PermuteSlotsCuda,
     UnpermuteSlotsCuda},
    DeviceType::kCuda};

}  // namespace cistron::ops
