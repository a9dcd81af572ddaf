// gemm, scalar reference: one dot product an element, in the order of k.
#include "cistron/base/threads.h"
#include "cistron/ops/gemm/gemm_impls.h"

namespace cistron::ops::internal {
namespace {

template <class In, class Out>
void Run(const GemmProblem& p, const Tensor& a, const Tensor& b, const Output& c) {
  using C = Compute<In>;
  const In* a_data = a.data<In>();
  const In* b_data = b.data<In>();
  Out* c_data = c.tensor.data<Out>();
  // Steps along the rows (or columns) of the product, and along the sum.
  const bool ta = p.trans_a == Transpose::kYes;
  const bool tb = p.trans_b == Transpose::kYes;
  const std::int64_t a_m = ta ? 1 : a.stride(0), a_k = ta ? a.stride(0) : 1;
  const std::int64_t b_n = tb ? b.stride(0) : 1, b_k = tb ? 1 : b.stride(0);
  const std::int64_t c_m = c.tensor.stride(0);
  ParallelFor(p.m, 1 + 65536 / (p.n * (p.k + 1)), [&](std::int64_t i) {
    for (std::int64_t j = 0; j < p.n; ++j) {
      C sum = 0;
      for (std::int64_t k = 0; k < p.k; ++k) {
        sum +=
            static_cast<C>(a_data[i * a_m + k * a_k]) * static_cast<C>(b_data[j * b_n + k * b_k]);
      }
      Out& out = c_data[i * c_m + j];
      if (c.mode == WriteMode::kAccumulate) sum += static_cast<C>(out);
      out = static_cast<Out>(sum);
    }
  });
}

}  // namespace

Support GemmRefSupports(const GemmProblem& p) {
  const bool ok =
      p.in_dtype == DType::kF64 || p.in_dtype == DType::kF32 || p.in_dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.in_dtype)));
}

void GemmRef(const Context&, const GemmProblem& p, const Tensor& a, const Tensor& b,
             const Output& c) {
  DispatchFloat("gemm", p.in_dtype, [&](auto tag) {
    using In = typename decltype(tag)::type;
    if (p.out_dtype == p.in_dtype) return Run<In, In>(p, a, b, c);
    Run<In, Compute<In>>(p, a, b, c);
  });
}

}  // namespace cistron::ops::internal
