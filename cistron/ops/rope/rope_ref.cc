// Scalar reference of rope.
#include "cistron/base/threads.h"
#include "cistron/ops/rope/rope_impls.h"

namespace cistron::ops {
namespace {

template <class T>
void RotateTyped(const Tensor& table, const Tensor& positions, std::int64_t head_dim, bool inverse,
                 const Tensor& x) {
  using C = Compute<T>;
  const std::int64_t half = head_dim / 2;
  ParallelFor(x.dim(0), 16, [&](std::int64_t t) {
    const C* angles = table.data<C>() + positions.data<std::int64_t>()[t] * head_dim;
    T* row = x.data<T>() + t * x.stride(0);
    for (T* head = row; head < row + x.dim(1); head += head_dim) {
      for (std::int64_t i = 0; i < half; ++i) {
        const C cosine = angles[2 * i];
        const C sine = inverse ? -angles[2 * i + 1] : angles[2 * i + 1];
        const C a = static_cast<C>(head[i]), b = static_cast<C>(head[i + half]);
        head[i] = T(a * cosine - b * sine);
        head[i + half] = T(b * cosine + a * sine);
      }
    }
  });
}

Support Supports(const RopeProblem& problem) {
  if (problem.dtype == DType::kF64 || problem.dtype == DType::kF32 ||
      problem.dtype == DType::kBF16) {
    return Support::Yes();
  }
  return Support::No(fmt::format("dtype {} is not one of f64, f32, bf16", Name(problem.dtype)));
}

void Rotate(const Context&, const Tensor& table, const Tensor& positions, std::int64_t head_dim,
            bool inverse, const Tensor& x) {
  DispatchFloat("rope", x.dtype(), [&](auto tag) {
    RotateTyped<typename decltype(tag)::type>(table, positions, head_dim, inverse, x);
  });
}

}  // namespace

RopeImpl RefRope() {
  return {"ref", Supports, {Rotate}};
}

}  // namespace cistron::ops
