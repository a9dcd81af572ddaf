// gemm on oneDNN.
#include <oneapi/dnnl/dnnl.h>

#include "cistron/base/threads.h"
#include "cistron/ops/gemm/gemm_impls.h"

namespace cistron::ops::internal {
namespace {

// Row-major c = op(a)·op(b), or += . dnnl_sgemm compiles nothing per shape and does not read c when
// beta is zero.
void Sgemm(const GemmProblem& p, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
           float* c, std::int64_t ldc, bool accumulate) {
  NumThreads();  // settles the thread count that oneDNN sees
  const dnnl_status_t status =
      dnnl_sgemm(p.trans_a == Transpose::kYes ? 'T' : 'N', p.trans_b == Transpose::kYes ? 'T' : 'N',
                 p.m, p.n, p.k, 1.0f, a, lda, b, ldb, accumulate ? 1.0f : 0.0f, c, ldc);
  CISTRON_CHECK(status == dnnl_success, "gemm: oneDNN refused the product {} x {} x {} (status {})",
                p.m, p.n, p.k, static_cast<int>(status));
}

// A dense f32 copy of a bf16 matrix.
Tensor Widen(const Context& ctx, const Tensor& t) {
  Tensor wide = ctx.Empty(t.shape(), DType::kF32);
  const bf16* from = t.data<bf16>();
  float* to = wide.data<float>();
  const std::int64_t cols = t.dim(1);
  ParallelFor(t.dim(0), 1 + 32768 / (cols + 1), [&](std::int64_t i) {
    const bf16* row = from + i * t.stride(0);
    for (std::int64_t j = 0; j < cols; ++j) to[i * cols + j] = static_cast<float>(row[j]);
  });
  return wide;
}

}  // namespace

Support GemmCpuSupports(const GemmProblem& p) {
  if (p.k == 0) return Support::No("an empty sum");
  if (p.in_dtype == DType::kF32 || p.in_dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {}", Name(p.in_dtype)));
}

void GemmCpu(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
             const Output& c) {
  const bool accumulate = c.mode == WriteMode::kAccumulate;
  if (p.in_dtype == DType::kF32) {
    Sgemm(p, a.data<float>(), a.stride(0), b.data<float>(), b.stride(0), c.tensor.data<float>(),
          c.tensor.stride(0), accumulate);
    return;
  }
  const Tensor wide_a = Widen(ctx, a);
  const Tensor wide_b = Widen(ctx, b);
  if (p.out_dtype == DType::kF32) {
    Sgemm(p, wide_a.data<float>(), wide_a.stride(0), wide_b.data<float>(), wide_b.stride(0),
          c.tensor.data<float>(), c.tensor.stride(0), accumulate);
    return;
  }
  const Tensor wide_c = ctx.Empty({p.m, p.n}, DType::kF32);
  float* sums = wide_c.data<float>();
  Sgemm(p, wide_a.data<float>(), wide_a.stride(0), wide_b.data<float>(), wide_b.stride(0), sums,
        p.n, false);
  bf16* out = c.tensor.data<bf16>();
  ParallelFor(p.m, 1 + 32768 / (p.n + 1), [&](std::int64_t i) {
    bf16* row = out + i * c.tensor.stride(0);
    for (std::int64_t j = 0; j < p.n; ++j) {
      const float sum = sums[i * p.n + j] + (accumulate ? static_cast<float>(row[j]) : 0.0f);
      row[j] = bf16(sum);
    }
  });
}

}  // namespace cistron::ops::internal
