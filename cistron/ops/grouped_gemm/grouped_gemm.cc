#include "cistron/ops/grouped_gemm/grouped_gemm.h"

#include <algorithm>

#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops {
namespace {

void CheckRows(std::string_view op, const char* name, const Tensor& t, int rank) {
  CISTRON_CHECK(t && t.rank() == rank, "{}: {} is {}, expected rank {}", op, name, Describe(t),
                rank);
  CISTRON_CHECK(t.dim(-1) <= 1 || t.stride(-1) == 1,
                "{}: the rows of {} ({}) are not contiguous: the last stride is {}", op, name,
                Describe(t), t.stride(-1));
}

void CheckDTypes(std::string_view op, const Tensor& a, const Tensor& b, const Tensor& c) {
  CISTRON_CHECK(
      a.dtype() == b.dtype() && (c.dtype() == a.dtype() || c.dtype() == ComputeType(a.dtype())),
      "{}: dtypes do not fit: operands {} and {}, result {}", op, Describe(a), Describe(b),
      Describe(c));
}

// Counts on a device are taken for equal where their numbers are.
bool SameCounts(const Tensor& a, const Tensor& b) {
  if (a.dim(0) != b.dim(0)) return false;
  if (a.raw() == b.raw() || !OnHost(a) || !OnHost(b)) return true;
  return std::ranges::equal(a.span<std::int64_t>(), b.span<std::int64_t>());
}

bool Aligned(const Tensor& t) {
  constexpr std::int64_t kBytes = 16;
  const std::int64_t row = t.stride(-2) * static_cast<std::int64_t>(SizeOf(t.dtype()));
  return reinterpret_cast<std::uintptr_t>(t.raw()) % kBytes == 0 && row % kBytes == 0;
}

// Forward and dgrad: `in` is the width of a's rows, `out` that of c's.
void RunRows(const Context& ctx, std::string_view op, GroupedGemmKind kind, const GroupedTensor& a,
             const Tensor& w, const Output& c) {
  CheckRows(op, "the operand", a.data, 2);
  CheckRows(op, "w", w, 3);
  CheckRows(op, "the result", c.tensor, 2);
  CheckDTypes(op, a.data, w, c.tensor);
  CheckSplitSizes(op, a.split_sizes, a.max_rows());
  const GroupedGemmProblem problem{kind,
                                   a.data.dtype(),
                                   c.tensor.dtype(),
                                   w.dim(0),
                                   a.max_rows(),
                                   w.dim(1),
                                   w.dim(2),
                                   Aligned(a.data) && Aligned(w) && Aligned(c.tensor)};
  const bool forward = kind == GroupedGemmKind::kForward;
  CISTRON_CHECK(a.num_groups() == problem.groups &&
                    a.data.dim(1) == (forward ? problem.k : problem.n) &&
                    c.tensor.dim(1) == (forward ? problem.n : problem.k) &&
                    c.tensor.dim(0) == problem.max_rows,
                "{}: shapes do not fit: {} groups, operand {}, w {}, result {}", op, a.num_groups(),
                Describe(a.data), Describe(w), Describe(c.tensor));
  AnnounceWork(ctx, GroupedProductFlops(ctx, problem.max_rows, problem.n, problem.k), a.data, w, c);
  Select(ctx, "grouped_gemm", GroupedGemmImpls(), problem)
      .run(ctx, problem, a.split_sizes, a.data, w, c);
}

}  // namespace

void GroupedGemmForward(const Context& ctx, const GroupedTensor& x, const Tensor& w,
                        const Output& y) {
  RunRows(ctx, "grouped_gemm forward", GroupedGemmKind::kForward, x, w, y);
}

void GroupedGemmDgrad(const Context& ctx, const GroupedTensor& dy, const Tensor& w,
                      const Output& dx) {
  RunRows(ctx, "grouped_gemm dgrad", GroupedGemmKind::kDgrad, dy, w, dx);
}

namespace {

// The implementation's weight gradient, for the caller to run.
template <class RunFunction>
auto Wgrad(const Context& ctx, const GroupedTensor& dy, const GroupedTensor& x, const Output& dw,
           RunFunction&& run) {
  constexpr std::string_view kOp = "grouped_gemm wgrad";
  CheckRows(kOp, "dy", dy.data, 2);
  CheckRows(kOp, "x", x.data, 2);
  CheckRows(kOp, "dw", dw.tensor, 3);
  CheckDTypes(kOp, dy.data, x.data, dw.tensor);
  CheckSplitSizes(kOp, dy.split_sizes, dy.max_rows());
  CheckSplitSizes(kOp, x.split_sizes, x.max_rows());
  CISTRON_CHECK(SameCounts(dy.split_sizes, x.split_sizes),
                "{}: dy and x have different split_sizes", kOp);
  const GroupedGemmProblem problem{
      GroupedGemmKind::kWgrad, dy.data.dtype(),
      dw.tensor.dtype(),       dw.tensor.dim(0),
      dy.max_rows(),           dw.tensor.dim(1),
      dw.tensor.dim(2),        Aligned(dy.data) && Aligned(x.data) && Aligned(dw.tensor)};
  CISTRON_CHECK(dy.num_groups() == problem.groups && dy.data.dim(1) == problem.n &&
                    x.data.dim(1) == problem.k,
                "{}: shapes do not fit: {} groups, dy {}, x {}, dw {}", kOp, dy.num_groups(),
                Describe(dy.data), Describe(x.data), Describe(dw.tensor));
  AnnounceWork(ctx, GroupedProductFlops(ctx, problem.max_rows, problem.n, problem.k), dy.data,
               x.data, dw);
  return run(Select(ctx, "grouped_gemm", GroupedGemmImpls(), problem), problem);
}

}  // namespace

void GroupedGemmWgrad(const Context& ctx, const GroupedTensor& dy, const GroupedTensor& x,
                      const Output& dw) {
  Wgrad(ctx, dy, x, dw, [&](const GroupedGemmRun& impl, const GroupedGemmProblem& problem) {
    impl.run(ctx, problem, dy.split_sizes, dy.data, x.data, dw);
  });
}

Tensor GroupedGemmWgradWithSquares(const Context& ctx, const GroupedTensor& dy,
                                   const GroupedTensor& x, const Tensor& dw) {
  const auto run = [&](const GroupedGemmRun& impl, const GroupedGemmProblem& problem) {
    if (impl.wgrad_with_squares != nullptr) {
      return impl.wgrad_with_squares(ctx, problem, dy.split_sizes, dy.data, x.data, dw);
    }
    impl.run(ctx, problem, dy.split_sizes, dy.data, x.data, Write(dw));
    return Tensor();
  };
  return Wgrad(ctx, dy, x, Write(dw), run);
}

std::span<const GroupedGemmImpl> GroupedGemmImpls() {
  static const GroupedGemmImpl list[] = {
      kGroupedGemmHopper,
      kGroupedGemmCuda,
      {"cpu", internal::GroupedGemmCpuSupports, {internal::GroupedGemmCpu}},
      {"ref", internal::GroupedGemmRefSupports, {internal::GroupedGemmRef}},
  };
  return list;
}

}  // namespace cistron::ops
