// Scalar reference of embedding.
#include <vector>

#include "cistron/ops/embedding/embedding_impls.h"

namespace cistron::ops {
namespace {

Support SupportsEmbedding(const EmbeddingProblem& problem) {
  if (problem.dtype != DType::kF64 && problem.dtype != DType::kF32 &&
      problem.dtype != DType::kBF16) {
    return Support::No("only f64, f32 and bf16");
  }
  return Support::Yes();
}

template <class T>
void Forward(const Tensor& tokens, const Tensor& w, const Output& y) {
  const std::int64_t width = w.dim(1);
  const bool accumulate = y.mode == WriteMode::kAccumulate;
  for (std::int64_t t = 0; t < tokens.numel(); ++t) {
    const T* from = w.data<T>() + tokens.data<std::int64_t>()[t] * width;
    T* to = y.tensor.data<T>() + t * width;
    for (std::int64_t h = 0; h < width; ++h) {
      to[h] = accumulate ? T(Compute<T>(to[h]) + Compute<T>(from[h])) : from[h];
    }
  }
}

template <class T>
void Backward(const Tensor& tokens, const Tensor& dy, const Output& dw) {
  using C = Compute<T>;
  const std::int64_t width = dy.dim(1);
  std::vector<C> sums(static_cast<std::size_t>(dw.tensor.numel()), C(0));
  for (std::int64_t t = 0; t < tokens.numel(); ++t) {
    C* row = sums.data() + tokens.data<std::int64_t>()[t] * width;
    for (std::int64_t h = 0; h < width; ++h) row[h] += C(dy.data<T>()[t * width + h]);
  }
  C* out = dw.tensor.data<C>();
  for (std::int64_t i = 0; i < dw.tensor.numel(); ++i) {
    const C sum = sums[static_cast<std::size_t>(i)];
    out[i] = dw.mode == WriteMode::kAccumulate ? out[i] + sum : sum;
  }
}

void ForwardRef(const Context&, const Tensor& tokens, const Tensor& w, const Output& y) {
  DispatchFloat("embedding", w.dtype(),
                [&](auto tag) { Forward<typename decltype(tag)::type>(tokens, w, y); });
}

void BackwardRef(const Context&, const Tensor& tokens, const Tensor& dy, const Output& dw) {
  DispatchFloat("embedding", dy.dtype(),
                [&](auto tag) { Backward<typename decltype(tag)::type>(tokens, dy, dw); });
}

}  // namespace

constinit const EmbeddingImpl kEmbeddingRef = {"ref", SupportsEmbedding, {ForwardRef, BackwardRef}};

}  // namespace cistron::ops
