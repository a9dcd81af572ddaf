// grouped_gemm on the CPU: one product a group.
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {

Support GroupedGemmCpuSupports(const GroupedGemmProblem& p) {
  const bool ok = p.in_dtype == DType::kF32 || p.in_dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.in_dtype)));
}

void GroupedGemmCpu(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
                    const Tensor& a, const Tensor& b, const Output& c) {
  const auto offsets = RowOffsets("grouped_gemm", split_sizes, p.max_rows);
  for (std::int64_t e = 0; e < p.groups; ++e) {
    const std::int64_t begin = offsets[static_cast<std::size_t>(e)];
    const std::int64_t rows = offsets[static_cast<std::size_t>(e) + 1] - begin;
    const Tensor a_e = a.Slice(0, begin, rows);
    GemmProblem gemm{p.in_dtype, p.out_dtype, Transpose::kNo, Transpose::kNo, rows, p.n, p.k};
    Tensor b_e, c_e;
    switch (p.kind) {
      case GroupedGemmKind::kForward:
        gemm.trans_b = Transpose::kYes;
        b_e = b.Select(e);
        c_e = c.tensor.Slice(0, begin, rows);
        break;
      case GroupedGemmKind::kDgrad:
        gemm.n = p.k;
        gemm.k = p.n;
        b_e = b.Select(e);
        c_e = c.tensor.Slice(0, begin, rows);
        break;
      case GroupedGemmKind::kWgrad:
        gemm.trans_a = Transpose::kYes;
        gemm.m = p.n;
        gemm.n = p.k;
        gemm.k = rows;
        b_e = b.Slice(0, begin, rows);
        c_e = c.tensor.Select(e);
        break;
    }
    // An empty group still writes its dw: the sum over no rows is zero.
    if (gemm.m > 0 && gemm.n > 0)
      (gemm.k > 0 ? GemmCpu : GemmRef)(ctx, gemm, a_e, b_e, {c_e, c.mode});
  }
}

}  // namespace cistron::ops::internal
