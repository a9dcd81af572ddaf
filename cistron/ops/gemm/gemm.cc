#include "cistron/ops/gemm/gemm.h"

#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/op_work.h"

namespace cistron::ops {
namespace {

void CheckMatrix(const char* name, const Tensor& t) {
  CISTRON_CHECK(t && t.rank() == 2, "gemm: {} is {}, expected a matrix", name, Describe(t));
  CISTRON_CHECK(t.dim(1) <= 1 || t.stride(1) == 1,
                "gemm: the rows of {} ({}) are not contiguous: the last stride is {}", name,
                Describe(t), t.stride(1));
}

}  // namespace

void Gemm(const Context& ctx, const Tensor& a, Transpose trans_a, const Tensor& b,
          Transpose trans_b, const Output& c) {
  CheckMatrix("a", a);
  CheckMatrix("b", b);
  CheckMatrix("c", c.tensor);
  const bool ta = trans_a == Transpose::kYes;
  const bool tb = trans_b == Transpose::kYes;
  GemmProblem problem{a.dtype(),         c.tensor.dtype(),  trans_a,          trans_b,
                      a.dim(ta ? 1 : 0), b.dim(tb ? 0 : 1), a.dim(ta ? 0 : 1)};
  CISTRON_CHECK(b.dim(tb ? 1 : 0) == problem.k && c.tensor.dim(0) == problem.m &&
                    c.tensor.dim(1) == problem.n,
                "gemm: shapes do not fit: a{} {}, b{} {}, c {}", ta ? "ᵀ" : "", Describe(a),
                tb ? "ᵀ" : "", Describe(b), Describe(c.tensor));
  CISTRON_CHECK(a.dtype() == b.dtype() &&
                    (c.tensor.dtype() == a.dtype() || c.tensor.dtype() == ComputeType(a.dtype())),
                "gemm: dtypes do not fit: a {}, b {}, c {}", Describe(a), Describe(b),
                Describe(c.tensor));
  AnnounceWork(ctx, ProductFlops(problem.m, problem.n, problem.k), a, b, c);
  const GemmRun& run = Select(ctx, "gemm", GemmImpls(), problem);
  if (problem.m == 0 || problem.n == 0) return;
  run.run(ctx, problem, a, b, c);
}

std::span<const GemmImpl> GemmImpls() {
  static const GemmImpl list[] = {
      kGemmCublas,
      kGemmCuda,
      {"cpu", internal::GemmCpuSupports, {internal::GemmCpu}},
      {"ref", internal::GemmRefSupports, {internal::GemmRef}},
  };
  return list;
}

}  // namespace cistron::ops
