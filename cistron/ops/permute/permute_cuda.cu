// permute on a GPU: rows are copied and summed in pieces of 16 bytes where all of them are so
// aligned. Every sum runs in one thread or one warp, in a fixed order.
#include <type_traits>

#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/permute/permute_impls.h"
#include "cistron/ops/permute/row_map_cuda.h"

namespace cistron::ops {
namespace {

using internal::Accumulates;
using internal::kThreads;
using internal::Rounded;
using internal::StoreElement;
using internal::StreamOf;
using internal::Value;

template <class T, int kN>
struct alignas(sizeof(T) * kN) Pack {
  T v[kN];
};

template <class T, int kN>
__device__ Pack<T, kN> LoadPack(const T* from) {
  return *reinterpret_cast<const Pack<T, kN>*>(from);
}

// to (= or +=) x, rounded once.
template <class T, int kN>
__device__ void StorePack(T* to, const Compute<T> (&x)[kN], bool accumulate) {
  Pack<T, kN> out;
  if (accumulate) out = LoadPack<T, kN>(to);
#pragma unroll
  for (int i = 0; i < kN; ++i) StoreElement(out.v[i], x[i], accumulate);
  *reinterpret_cast<Pack<T, kN>*>(to) = out;
}

// Rows of a matrix whose last stride is 1.
template <class T>
struct RowsOf {
  T* data;
  std::int64_t stride, rows;
  __device__ T* operator[](std::int64_t r) const { return data + r * stride; }
};
template <class T>
RowsOf<T> MakeRows(const Tensor& t) {
  return t ? RowsOf<T>{t.data<T>(), t.stride(0), t.dim(0)} : RowsOf<T>{};
}

// Blocks hold blockDim.y rows of blockDim.x threads each.
struct RowGrid {
  unsigned blocks;
  dim3 threads;
};
RowGrid GridOf(std::int64_t rows, std::int64_t packs) {
  unsigned across = 1;
  while (across < packs && across < kThreads) across *= 2;
  const unsigned down = kThreads / across;
  return {static_cast<unsigned>((rows + down - 1) / down), dim3(across, down)};
}
__device__ std::int64_t OwnRow() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

template <class T, int kN>
__global__ void permute_kernel(const std::int32_t* slot_of_row, std::int64_t top_k,
                               RowsOf<const T> x, RowsOf<T> rows, std::int64_t width,
                               bool accumulate) {
  const std::int64_t r = OwnRow();
  if (r >= rows.rows) return;
  const std::int64_t slot = slot_of_row[r];
  if (slot < 0) return;
  const T* from = x[slot / top_k];
  T* to = rows[r];
  for (std::int64_t j = threadIdx.x * kN; j < width; j += blockDim.x * kN) {
    const Pack<T, kN> in = LoadPack<T, kN>(from + j);
    Compute<T> values[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] = Value(in.v[i]);
    StorePack<T, kN>(to + j, values, accumulate);
  }
}

template <class T, int kN>
__global__ void unpermute_kernel(const std::int32_t* row_of_slot, std::int64_t top_k,
                                 RowsOf<const T> rows, const Compute<T>* probs, RowsOf<T> y,
                                 std::int64_t width, bool accumulate) {
  using C = Compute<T>;
  const std::int64_t t = OwnRow();
  if (t >= y.rows) return;
  T* to = y[t];
  for (std::int64_t j = threadIdx.x * kN; j < width; j += blockDim.x * kN) {
    C sums[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) sums[i] = C(0);
    for (std::int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      const std::int64_t r = row_of_slot[s];
      if (r < 0 || r >= rows.rows) continue;
      const Pack<T, kN> in = LoadPack<T, kN>(rows[r] + j);
      const C prob = probs ? probs[s] : C(1);
#pragma unroll
      for (int i = 0; i < kN; ++i) sums[i] += prob * Value(in.v[i]);
    }
    StorePack<T, kN>(to + j, sums, accumulate);
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
template <class T, int kN>
__global__ void unpermute_backward_kernel(BackwardArgs<T> args) {
  using C = Compute<T>;
  const std::int64_t s = internal::GridStart() / 32;
  if (s >= args.slots) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t r = args.row_of_slot[s];
  C dprob = 0;
  if (r >= 0 && r < args.drows.rows && (args.dprobs == nullptr || r < args.rows.rows)) {
    const T* dy = args.dy[s / args.top_k];
    const C prob = args.probs ? args.probs[s] : C(1);
    for (std::int64_t j = lane * kN; j < args.width; j += 32 * kN) {
      const Pack<T, kN> d = LoadPack<T, kN>(dy + j);
      if (args.dprobs != nullptr) {
        const Pack<T, kN> row = LoadPack<T, kN>(args.rows[r] + j);
#pragma unroll
        for (int i = 0; i < kN; ++i) dprob += Value(d.v[i]) * Value(row.v[i]);
      }
      C values[kN];
#pragma unroll
      for (int i = 0; i < kN; ++i) values[i] = prob * Value(d.v[i]);
      StorePack<T, kN>(args.drows[r] + j, values, args.add_drows);
    }
  }
  if (args.dprobs == nullptr) return;
  dprob = internal::WarpSum(dprob);
  if (lane == 0) StoreElement(args.dprobs[s], dprob, args.add_dprobs);
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
  if (!t) return true;
  const auto bytes = [&](std::int64_t n) {
    return n * static_cast<std::int64_t>(SizeOf(t.dtype()));
  };
  return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0 && bytes(t.stride(0)) % 16 == 0 &&
         bytes(t.dim(1)) % 16 == 0;
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

void PermuteCuda(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows) {
  const std::int64_t count = std::min(rows.tensor.dim(0), map.slot_of_row.dim(0));
  const std::int64_t width = x.dim(1);
  if (count == 0 || width == 0) return;
  DispatchPacks("permute", {x, rows.tensor}, [&](auto tag, auto pack) {
    using T = typename decltype(tag)::type;
    constexpr int kN = decltype(pack)::value;
    RowsOf<T> to = MakeRows<T>(rows.tensor);
    to.rows = count;
    const RowGrid grid = GridOf(count, width / kN);
    permute_kernel<T, kN><<<grid.blocks, grid.threads, 0, StreamOf(ctx)>>>(
        map.slot_of_row.data<std::int32_t>(), map.top_k,
        RowsOf<const T>{x.data<T>(), x.stride(0), x.dim(0)}, to, width, Accumulates(rows));
  });
}

void UnpermuteCuda(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
                   const Output& y) {
  const std::int64_t width = rows.dim(1);
  if (y.tensor.dim(0) == 0 || width == 0) return;
  DispatchPacks("unpermute", {rows, y.tensor}, [&](auto tag, auto pack) {
    using T = typename decltype(tag)::type;
    constexpr int kN = decltype(pack)::value;
    const RowGrid grid = GridOf(y.tensor.dim(0), width / kN);
    unpermute_kernel<T, kN><<<grid.blocks, grid.threads, 0, StreamOf(ctx)>>>(
        map.row_of_slot.data<std::int32_t>(), map.top_k,
        RowsOf<const T>{rows.data<T>(), rows.stride(0), rows.dim(0)},
        internal::DataOrNull<Compute<T>>(probs), MakeRows<T>(y.tensor), width, Accumulates(y));
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
        BackwardArgs<T> args{};
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
        unpermute_backward_kernel<T, kN>
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
