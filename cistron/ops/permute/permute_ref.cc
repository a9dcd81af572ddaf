// permute, scalar reference.
#include "cistron/base/threads.h"
#include "cistron/ops/permute/permute_impls.h"

namespace cistron::ops::internal {
namespace {

template <class T>
void Store(T& out, Compute<T> value, WriteMode mode) {
  if (mode == WriteMode::kAccumulate) value += static_cast<Compute<T>>(out);
  out = static_cast<T>(value);
}

template <class T>
void PermuteRows(const RowMap& map, const Tensor& x, const Output& rows) {
  const std::int64_t width = x.dim(1);
  const std::int32_t* slot_of_row = map.slot_of_row.data<std::int32_t>();
  ParallelFor(RoutedRows(map), 1 + 32768 / (width + 1), [&](std::int64_t r) {
    const T* from = x.data<T>() + slot_of_row[r] / map.top_k * x.stride(0);
    T* to = rows.tensor.data<T>() + r * rows.tensor.stride(0);
    for (std::int64_t j = 0; j < width; ++j) {
      Store(to[j], static_cast<Compute<T>>(from[j]), rows.mode);
    }
  });
}

template <class T>
void UnpermuteRows(const RowMap& map, const Tensor& rows, const Tensor& probs, const Output& y) {
  using C = Compute<T>;
  const std::int64_t width = rows.dim(1);
  const std::int32_t* row_of_slot = map.row_of_slot.data<std::int32_t>();
  ParallelFor(y.tensor.dim(0), 1 + 32768 / (width + 1), [&](std::int64_t t) {
    T* to = y.tensor.data<T>() + t * y.tensor.stride(0);
    for (std::int64_t j = 0; j < width; ++j) {
      C sum = 0;
      for (std::int64_t s = t * map.top_k; s < (t + 1) * map.top_k; ++s) {
        if (row_of_slot[s] < 0) continue;
        const C value = static_cast<C>(rows.data<T>()[row_of_slot[s] * rows.stride(0) + j]);
        sum += probs ? probs.data<C>()[s] * value : value;
      }
      Store(to[j], sum, y.mode);
    }
  });
}

template <class T>
void UnpermuteRowsBackward(const RowMap& map, const Tensor& dy, const Tensor& rows,
                           const Tensor& probs, const Output& drows, const Output& dprobs) {
  using C = Compute<T>;
  const std::int64_t width = dy.dim(1);
  const std::int32_t* row_of_slot = map.row_of_slot.data<std::int32_t>();
  ParallelFor(map.row_of_slot.dim(0), 1 + 32768 / (width + 1), [&](std::int64_t s) {
    const std::int64_t r = row_of_slot[s];
    C dprob = 0;
    if (r >= 0) {
      const T* dout = dy.data<T>() + s / map.top_k * dy.stride(0);
      T* drow = drows.tensor.data<T>() + r * drows.tensor.stride(0);
      const C prob = probs ? probs.data<C>()[s] : C(1);
      for (std::int64_t j = 0; j < width; ++j) {
        const C d = static_cast<C>(dout[j]);
        if (dprobs) dprob += d * static_cast<C>(rows.data<T>()[r * rows.stride(0) + j]);
        Store(drow[j], prob * d, drows.mode);
      }
    }
    if (dprobs) Store(dprobs.tensor.data<C>()[s], dprob, dprobs.mode);
  });
}

}  // namespace

Support PermuteRefSupports(const PermuteProblem& p) {
  const bool ok = p.dtype == DType::kF64 || p.dtype == DType::kF32 || p.dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

void PermuteRef(const Context&, const RowMap& map, const Tensor& x, const Output& rows) {
  DispatchFloat("permute", x.dtype(),
                [&](auto tag) { PermuteRows<typename decltype(tag)::type>(map, x, rows); });
}

void UnpermuteRef(const Context&, const RowMap& map, const Tensor& rows, const Tensor& probs,
                  const Output& y) {
  DispatchFloat("unpermute", rows.dtype(), [&](auto tag) {
    UnpermuteRows<typename decltype(tag)::type>(map, rows, probs, y);
  });
}

void UnpermuteBackwardRef(const Context&, const RowMap& map, const Tensor& dy, const Tensor& rows,
                          const Tensor& probs, const Output& drows, const Output& dprobs) {
  DispatchFloat("unpermute backward", dy.dtype(), [&](auto tag) {
    UnpermuteRowsBackward<typename decltype(tag)::type>(map, dy, rows, probs, drows, dprobs);
  });
}

}  // namespace cistron::ops::internal
