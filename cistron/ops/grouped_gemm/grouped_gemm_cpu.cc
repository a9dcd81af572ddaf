// grouped_gemm on the CPU: all groups at once, cut into tasks that threads take one after another.
//
// A task is one product of oneDNN on one thread, so that threads wait for each other once a call
// and not once a group, whatever the counts.
#include "cistron/base/threads.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/grouped_gemm/grouped_tasks.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

Tensor Rows(const Tensor& t, std::int64_t begin, std::int64_t end) {
  return t.Slice(0, begin, end - begin);
}
Tensor Cols(const Tensor& t, std::int64_t begin, std::int64_t end) {
  return t.Slice(1, begin, end - begin);
}

}  // namespace

Support GroupedGemmCpuSupports(const GroupedGemmProblem& p) {
  if (p.in_dtype == DType::kF32 || p.in_dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(p.in_dtype)));
}

void GroupedGemmCpu(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
                    const Tensor& a, const Tensor& b, const Output& c) {
  const std::vector<std::int64_t> offsets = RowOffsets("grouped_gemm", split_sizes, p.max_rows);
  std::vector<GroupProduct> products;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const std::int64_t rows = offsets[e + 1] - offsets[e];
    switch (p.kind) {
      case GroupedGemmKind::kForward: products.push_back({rows, p.n, p.k}); break;
      case GroupedGemmKind::kDgrad: products.push_back({rows, p.k, p.n}); break;
      case GroupedGemmKind::kWgrad: products.push_back({p.n, p.k, rows}); break;
    }
  }
  const std::vector<GroupTask> tasks = PlanGroupTasks(products, NumThreads());
  ParallelDynamic(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
    const GroupTask& t = tasks[static_cast<std::size_t>(i)];
    const std::int64_t first = offsets[static_cast<std::size_t>(t.group)];
    const std::int64_t last = offsets[static_cast<std::size_t>(t.group) + 1];
    GemmProblem gemm{p.in_dtype,
                     p.out_dtype,
                     Transpose::kNo,
                     Transpose::kNo,
                     t.row_end - t.row_begin,
                     t.col_end - t.col_begin,
                     products[static_cast<std::size_t>(t.group)].k};
    Tensor a_part, b_part, c_part;
    switch (p.kind) {
      case GroupedGemmKind::kForward:
        gemm.trans_b = Transpose::kYes;
        a_part = Rows(a, first + t.row_begin, first + t.row_end);
        b_part = Rows(b.Select(t.group), t.col_begin, t.col_end);
        c_part = Rows(c.tensor, first + t.row_begin, first + t.row_end);
        break;
      case GroupedGemmKind::kDgrad:
        a_part = Rows(a, first + t.row_begin, first + t.row_end);
        b_part = Cols(b.Select(t.group), t.col_begin, t.col_end);
        c_part = Rows(c.tensor, first + t.row_begin, first + t.row_end);
        break;
      case GroupedGemmKind::kWgrad:
        gemm.trans_a = Transpose::kYes;
        a_part = Cols(Rows(a, first, last), t.row_begin, t.row_end);
        b_part = Cols(Rows(b, first, last), t.col_begin, t.col_end);
        c_part = Rows(c.tensor.Select(t.group), t.row_begin, t.row_end);
        break;
    }
    GemmCpu(ctx, gemm, a_part, b_part, {Cols(c_part, t.col_begin, t.col_end), c.mode});
  });
}

}  // namespace cistron::ops::internal
