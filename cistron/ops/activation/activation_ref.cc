// SwiGLU, scalar reference: the formulas of activation.h, one row after another.
#include <cmath>

#include "cistron/base/threads.h"
#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

template <class T>
void Store(T& out, Compute<T> value, WriteMode mode) {
  if (mode == WriteMode::kAccumulate) value += static_cast<Compute<T>>(out);
  out = static_cast<T>(value);
}

// Through exp(−|a|), which does not overflow and loses nothing of a small σ.
template <class C>
C Sigmoid(C a) {
  const C e = std::exp(-std::abs(a));
  return (a < 0 ? e : C(1)) / (C(1) + e);
}

template <class T>
void Forward(std::int64_t rows, const Tensor& x, const Tensor& row_scale, const Output& y) {
  using C = Compute<T>;
  const std::int64_t width = y.tensor.dim(1);
  ParallelFor(rows, 1 + 4096 / (width + 1), [&](std::int64_t i) {
    const T* gate = x.data<T>() + i * x.stride(0);
    const T* up = gate + width;
    T* out = y.tensor.data<T>() + i * y.tensor.stride(0);
    const C scale = row_scale ? row_scale.data<C>()[i] : C(1);
    for (std::int64_t j = 0; j < width; ++j) {
      const C a = static_cast<C>(gate[j]);
      const C b = static_cast<C>(up[j]);
      Store(out[j], a * Sigmoid(a) * b * scale, y.mode);
    }
  });
}

template <class T>
void Backward(std::int64_t rows, const Tensor& dy, const Tensor& x, const Tensor& row_scale,
              const Output& dx, const Output& dscale, const Output& y_out) {
  using C = Compute<T>;
  const std::int64_t width = dy.dim(1);
  ParallelFor(rows, 1 + 4096 / (width + 1), [&](std::int64_t i) {
    const T* gate = x.data<T>() + i * x.stride(0);
    const T* up = gate + width;
    const T* dout = dy.data<T>() + i * dy.stride(0);
    T* dgate = dx.tensor.data<T>() + i * dx.tensor.stride(0);
    T* dup = dgate + width;
    T* out = y_out ? y_out.tensor.data<T>() + i * y_out.tensor.stride(0) : nullptr;
    const C scale = row_scale ? row_scale.data<C>()[i] : C(1);
    C dscale_sum = 0;
    for (std::int64_t j = 0; j < width; ++j) {
      const C a = static_cast<C>(gate[j]);
      const C b = static_cast<C>(up[j]);
      const C d = static_cast<C>(dout[j]);
      const C sigma = Sigmoid(a);
      const C silu = a * sigma;
      dscale_sum += d * silu * b;
      Store(dgate[j], d * scale * b * sigma * (C(1) + a * (C(1) - sigma)), dx.mode);
      Store(dup[j], d * scale * silu, dx.mode);
      if (out != nullptr) Store(out[j], silu * b * scale, y_out.mode);
    }
    if (dscale) Store(dscale.tensor.data<C>()[i], dscale_sum, dscale.mode);
  });
}

}  // namespace

Support SwiGluRefSupports(const SwiGluProblem& p) {
  const bool ok = p.dtype == DType::kF64 || p.dtype == DType::kF32 || p.dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

void SwiGluForwardRef(const Context&, const Tensor& x, const Tensor& row_scale,
                      const Tensor& split_sizes, const Output& y) {
  const std::int64_t rows = RowsInUse("swiglu forward", split_sizes, x.dim(0));
  DispatchFloat("swiglu", x.dtype(),
                [&](auto tag) { Forward<typename decltype(tag)::type>(rows, x, row_scale, y); });
}

void SwiGluBackwardRef(const Context&, const Tensor& dy, const Tensor& x, const Tensor& row_scale,
                       const Tensor& split_sizes, const Output& dx, const Output& dscale,
                       const Output& y_out) {
  const std::int64_t rows = RowsInUse("swiglu backward", split_sizes, x.dim(0));
  DispatchFloat("swiglu", x.dtype(), [&](auto tag) {
    Backward<typename decltype(tag)::type>(rows, dy, x, row_scale, dx, dscale, y_out);
  });
}

}  // namespace cistron::ops::internal
