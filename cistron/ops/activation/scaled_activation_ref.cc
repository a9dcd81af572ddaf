// Scaled activations, scalar reference: the formulas of scaled_activation.h, one row after another.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "cistron/base/threads.h"
#include "cistron/ops/activation/scaled_activation_impls.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

template <class T>
void Store(T& out, Compute<T> value, WriteMode mode) {
  if (mode == WriteMode::kAccumulate) value += static_cast<Compute<T>>(out);
  out = static_cast<T>(value);
}

// Through exp(−|z|), which does not overflow and loses nothing of a small σ.
template <class C>
C Sigmoid(C z) {
  const C e = std::exp(-std::abs(z));
  return (z < 0 ? e : C(1)) / (C(1) + e);
}

// G, G', U and U' of one element.
template <class C>
struct Values {
  C gate, gate_slope, up, up_slope;
};

template <class C>
Values<C> Evaluate(const ActivationConfig& config, C a, C b) {
  // a·σ(z(a)) has the slope σ·(1 + (1 − σ)·a·z'); `az_slope` is a·z'.
  const auto gated = [](C x, C z, C az_slope, C up) {
    const C sigma = Sigmoid(z);
    return Values<C>{x * sigma, sigma * (C(1) + az_slope * (C(1) - sigma)), up, C(1)};
  };
  switch (config.kind) {
    case ActivationKind::kSwiGlu: return gated(a, a, a, b);
    case ActivationKind::kClampedSwiGlu: {
      const C limit = static_cast<C>(config.limit), alpha = static_cast<C>(config.alpha);
      const C x = a > limit ? limit : a;  // keeps NaN
      const C up = b > limit ? limit : b < -limit ? -limit : b;
      // Beyond −kSaturated σ is 0, and alpha·x may overflow.
      const C product = alpha * x;
      const C z = product < C(-kSaturated) ? C(-kSaturated) : product;
      Values<C> v = gated(x, z, z, up + C(1));
      if (a > limit) v.gate_slope = 0;
      if (std::abs(b) > limit) v.up_slope = 0;
      return v;
    }
    case ActivationKind::kGeGlu: {
      const C scale = static_cast<C>(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
      const C cubic = static_cast<C>(0.044715);
      const C c = a > C(kGeluSaturated)    ? C(kGeluSaturated)
                  : a < C(-kGeluSaturated) ? C(-kGeluSaturated)
                                           : a;
      const C square = c * c;
      return gated(a, scale * c * (C(1) + cubic * square),
                   scale * c * (C(1) + C(3) * cubic * square), b);
    }
    case ActivationKind::kSRelu: {
      const C r = a < 0 ? C(0) : a;  // keeps NaN
      return {r * r, C(2) * r, C(1), C(0)};
    }
  }
  CISTRON_THROW(kInternal, "activation: kind {}", static_cast<int>(config.kind));
}

// Column of the gate of element j; its up lies `up_distance` further on.
struct Columns {
  std::int64_t interleave, up_distance;

  Columns(const ActivationConfig& config, std::int64_t width)
      : interleave(config.glu_interleave_size),
        up_distance(!IsGated(config.kind) ? 0
                    : interleave > 0      ? interleave
                                          : width) {}
  std::int64_t Gate(std::int64_t j) const {
    return interleave > 0 ? j + j / interleave * interleave : j;
  }
};

template <class T>
void Forward(const ActivationConfig& config, std::int64_t rows, const Tensor& x,
             const Tensor& row_scale, const Output& y) {
  using C = Compute<T>;
  const std::int64_t width = y.tensor.dim(1);
  const Columns columns(config, width);
  ParallelFor(rows, 1 + 4096 / (width + 1), [&](std::int64_t i) {
    const T* in = x.data<T>() + i * x.stride(0);
    T* out = y.tensor.data<T>() + i * y.tensor.stride(0);
    const C scale = row_scale ? row_scale.data<C>()[i] : C(1);
    for (std::int64_t j = 0; j < width; ++j) {
      const T* a = in + columns.Gate(j);
      const auto v =
          Evaluate<C>(config, static_cast<C>(*a), static_cast<C>(a[columns.up_distance]));
      Store(out[j], v.gate * v.up * scale, y.mode);
    }
  });
}

template <class T>
void Backward(const ActivationConfig& config, std::int64_t rows, const Tensor& dy, const Tensor& x,
              const Tensor& row_scale, const Output& dx, const Output& dscale,
              const Output& y_out) {
  using C = Compute<T>;
  const std::int64_t width = dy.dim(1);
  const Columns columns(config, width);
  ParallelFor(rows, 1 + 4096 / (width + 1), [&](std::int64_t i) {
    const T* in = x.data<T>() + i * x.stride(0);
    const T* dout = dy.data<T>() + i * dy.stride(0);
    T* din = dx.tensor.data<T>() + i * dx.tensor.stride(0);
    T* out = y_out ? y_out.tensor.data<T>() + i * y_out.tensor.stride(0) : nullptr;
    const C scale = row_scale ? row_scale.data<C>()[i] : C(1);
    C dscale_sum = 0;
    for (std::int64_t j = 0; j < width; ++j) {
      const std::int64_t gate = columns.Gate(j), up = gate + columns.up_distance;
      const auto v = Evaluate<C>(config, static_cast<C>(in[gate]), static_cast<C>(in[up]));
      const C d = static_cast<C>(dout[j]);
      dscale_sum += d * v.gate * v.up;
      Store(din[gate], d * scale * v.up * v.gate_slope, dx.mode);
      if (up != gate) Store(din[up], d * scale * v.gate * v.up_slope, dx.mode);
      if (out != nullptr) Store(out[j], v.gate * v.up * scale, y_out.mode);
    }
    if (dscale) Store(dscale.tensor.data<C>()[i], dscale_sum, dscale.mode);
  });
}

Support Supports(const ScaledActivationProblem& p) {
  const bool ok = p.dtype == DType::kF64 || p.dtype == DType::kF32 || p.dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

void ForwardRef(const Context&, const ActivationConfig& config, const Tensor& x,
                const Tensor& row_scale, const Tensor& split_sizes, const Output& y) {
  const std::int64_t rows = RowsInUse("activation forward", split_sizes, x.dim(0));
  DispatchFloat("activation", x.dtype(), [&](auto tag) {
    Forward<typename decltype(tag)::type>(config, rows, x, row_scale, y);
  });
}

void BackwardRef(const Context&, const ActivationConfig& config, const Tensor& dy, const Tensor& x,
                 const Tensor& row_scale, const Tensor& split_sizes, const Output& dx,
                 const Output& dscale, const Output& y_out) {
  const std::int64_t rows = RowsInUse("activation backward", split_sizes, x.dim(0));
  DispatchFloat("activation", x.dtype(), [&](auto tag) {
    Backward<typename decltype(tag)::type>(config, rows, dy, x, row_scale, dx, dscale, y_out);
  });
}

}  // namespace

constinit const ScaledActivationImpl kScaledActivationRef = {
    "ref", Supports, {ForwardRef, BackwardRef}};

}  // namespace cistron::ops::internal
