// Scalar reference of RMSNorm.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/norm/norm_impls.h"

namespace cistron::ops {
namespace {

template <class T>
T* Row(const Tensor& t, std::int64_t row) {
  return t.data<T>() + row * t.stride(0);
}

template <class T>
void Store(T& to, Compute<T> value, WriteMode mode) {
  to = T(mode == WriteMode::kAccumulate ? static_cast<Compute<T>>(to) + value : value);
}

template <class T>
void ForwardTyped(const Tensor& x, const Tensor& residual, const Tensor& g, double eps,
                  const Tensor& h, const Tensor& rstd, const Output& y) {
  using C = Compute<T>;
  const std::int64_t width = x.dim(1);
  ParallelFor(x.dim(0), 16, [&](std::int64_t t) {
    const T* row = Row<T>(x, t);
    if (residual) {
      const T* other = Row<T>(residual, t);
      T* sum = Row<T>(h, t);
      for (std::int64_t j = 0; j < width; ++j) {
        sum[j] = T(static_cast<C>(row[j]) + static_cast<C>(other[j]));
      }
      row = sum;
    } else if (h && Row<T>(h, t) != row) {
      std::copy_n(row, width, Row<T>(h, t));
    }
    C squares = 0;
    for (std::int64_t j = 0; j < width; ++j) {
      squares += static_cast<C>(row[j]) * static_cast<C>(row[j]);
    }
    const C r = C(1) / std::sqrt(squares / static_cast<C>(width) + static_cast<C>(eps));
    T* out = Row<T>(y.tensor, t);
    for (std::int64_t j = 0; j < width; ++j) {
      Store(out[j], static_cast<C>(row[j]) * r * static_cast<C>(g.data<T>()[j]), y.mode);
    }
    if (rstd) rstd.data<C>()[t] = r;
  });
}

template <class T>
void BackwardTyped(const Tensor& dy, const Tensor& h, const Tensor& rstd, const Tensor& g,
                   const Tensor& dh_in, const Output& dh, const Output& dg) {
  using C = Compute<T>;
  const std::int64_t width = h.dim(1);
  const T* gain = g.data<T>();
  if (dg) {
    // Before dh, which may be written over dy.
    std::vector<C> sum(static_cast<std::size_t>(width));
    for (std::int64_t t = 0; t < h.dim(0); ++t) {
      const C r = rstd.data<C>()[t];
      for (std::int64_t j = 0; j < width; ++j) {
        sum[static_cast<std::size_t>(j)] +=
            static_cast<C>(Row<T>(dy, t)[j]) * static_cast<C>(Row<T>(h, t)[j]) * r;
      }
    }
    for (std::int64_t j = 0; j < width; ++j) {
      Store(dg.tensor.data<C>()[j], sum[static_cast<std::size_t>(j)], dg.mode);
    }
  }
  ParallelFor(h.dim(0), 16, [&](std::int64_t t) {
    const T* dy_row = Row<T>(dy, t);
    const T* h_row = Row<T>(h, t);
    const C r = rstd.data<C>()[t];
    C dot = 0;
    for (std::int64_t j = 0; j < width; ++j) {
      dot += static_cast<C>(gain[j]) * static_cast<C>(dy_row[j]) * static_cast<C>(h_row[j]);
    }
    const C factor = r * r * dot / static_cast<C>(width);
    for (std::int64_t j = 0; j < width; ++j) {
      C value = r * (static_cast<C>(gain[j]) * static_cast<C>(dy_row[j]) -
                     static_cast<C>(h_row[j]) * factor);
      if (dh_in) value += static_cast<C>(Row<T>(dh_in, t)[j]);
      Store(Row<T>(dh.tensor, t)[j], value, dh.mode);
    }
  });
}

Support Supports(const RmsNormProblem& problem) {
  if (problem.dtype == DType::kF64 || problem.dtype == DType::kF32 ||
      problem.dtype == DType::kBF16) {
    return Support::Yes();
  }
  return Support::No(fmt::format("dtype {} is not one of f64, f32, bf16", Name(problem.dtype)));
}

void Forward(const Context&, const Tensor& x, const Tensor& residual, const Tensor& g, double eps,
             const Tensor& h, const Tensor& rstd, const Output& y) {
  DispatchFloat("norm", x.dtype(), [&](auto tag) {
    ForwardTyped<typename decltype(tag)::type>(x, residual, g, eps, h, rstd, y);
  });
}

void Backward(const Context&, const Tensor& dy, const Tensor& h, const Tensor& rstd,
              const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg) {
  DispatchFloat("norm", h.dtype(), [&](auto tag) {
    BackwardTyped<typename decltype(tag)::type>(dy, h, rstd, g, dh_in, dh, dg);
  });
}

}  // namespace

RmsNormImpl RefRmsNorm() {
  return {"ref", Supports, {Forward, Backward}};
}

}  // namespace cistron::ops
