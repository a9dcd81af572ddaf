#include "cistron/ops/grouped_mlp/grouped_mlp.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "cistron/ops/grouped_mlp/grouped_mlp_impls.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops {
namespace {

void Check(std::string_view op, const char* name, const Tensor& t, const Shape& shape,
           DType dtype) {
  CISTRON_CHECK(t && t.shape() == shape && t.dtype() == dtype, "{}: {} is {}, expected {} {}", op,
                name, Describe(t), Name(dtype), ToString(shape));
  CISTRON_CHECK(t.dim(-1) <= 1 || t.stride(-1) == 1,
                "{}: the rows of {} are not contiguous: the last stride is {}", op, name,
                t.stride(-1));
}

void CheckRowValues(std::string_view op, const char* name, const Tensor& t, std::int64_t rows,
                    DType dtype) {
  Check(op, name, t, {rows}, ComputeType(dtype));
}

// The same output, checked when it is asked for.
DeferredOutput Checked(std::string_view op, const char* name, DeferredOutput output,
                       const Shape& shape, DType dtype, DType other_dtype) {
  if (!output) return output;
  return DeferredOutput([=, output = std::move(output)] {
    const Output o = output.Get();
    Check(op, name, o.tensor, shape, o && o.tensor.dtype() == other_dtype ? other_dtype : dtype);
    return o;
  });
}

bool Aligned(std::initializer_list<Tensor> tensors) {
  constexpr std::int64_t kBytes = 16;
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) {
    return !t || (reinterpret_cast<std::uintptr_t>(t.raw()) % kBytes == 0 &&
                  t.stride(-2) * static_cast<std::int64_t>(SizeOf(t.dtype())) % kBytes == 0);
  });
}

// Checks w2, the counts, the row scale and `rows`, which have N values each. `hidden` is left at 0.
GroupedMlpProblem CheckHalf(std::string_view op, const char* name, const GroupedTensor& rows,
                            const Tensor& w2, const Tensor& row_scale) {
  CISTRON_CHECK(w2 && w2.rank() == 3 && rows.data && rows.data.rank() == 2,
                "{}: {} is {}, w2 {}, expected [M, N], [E, N, F]", op, name, Describe(rows.data),
                Describe(w2));
  const GroupedMlpProblem p{rows.data.dtype(), w2.dim(0), rows.max_rows(), 0, w2.dim(2), w2.dim(1)};
  Check(op, name, rows.data, {p.max_rows, p.out}, p.dtype);
  Check(op, "w2", w2, {p.groups, p.out, p.ffn}, p.dtype);
  CISTRON_CHECK(rows.split_sizes && rows.num_groups() == p.groups,
                "{}: split_sizes is {}, expected i64 [{}]", op, Describe(rows.split_sizes),
                p.groups);
  CheckSplitSizes(op, rows.split_sizes, p.max_rows);
  if (row_scale) CheckRowValues(op, "row_scale", row_scale, p.max_rows, p.dtype);
  return p;
}

// Checks w1 too.
GroupedMlpProblem CheckProblem(std::string_view op, const char* name, const GroupedTensor& rows,
                               const GroupedMlpWeights& w, const Tensor& row_scale) {
  GroupedMlpProblem p = CheckHalf(op, name, rows, w.w2, row_scale);
  CISTRON_CHECK(w.w1 && w.w1.rank() == 3, "{}: w1 is {}, expected [E, 2F, H]", op, Describe(w.w1));
  p.hidden = w.w1.dim(2);
  Check(op, "w1", w.w1, {p.groups, 2 * p.ffn, p.hidden}, p.dtype);
  return p;
}

// A CPU makes them itself; on a GPU they are ops of their own. `products`: of [M, H] with [H, F].
void AnnounceProducts(const Context& ctx, const GroupedMlpProblem& p, double products) {
  if (ctx.device().type != DeviceType::kCpu) return;
  AnnounceWork(ctx, products * GroupedProductFlops(ctx, p.max_rows, p.hidden, p.ffn));
}

}  // namespace

std::span<const GroupedMlpImpl> GroupedMlpImpls() {
  static const std::array impls = {kGroupedMlpHopper, internal::CudaGroupedMlp(),
                                   internal::CpuGroupedMlp(), internal::RefGroupedMlp()};
  return impls;
}

void GroupedMlpForward(const Context& ctx, const GroupedTensor& x, const GroupedMlpWeights& weights,
                       const Tensor& row_scale, const Tensor& pre, const Output& y) {
  constexpr std::string_view kOp = "grouped_mlp forward";
  GroupedMlpProblem p = CheckProblem(kOp, "y", {y.tensor, x.split_sizes}, weights, row_scale);
  Check(kOp, "x", x.data, {p.max_rows, p.hidden}, p.dtype);
  if (pre) Check(kOp, "pre", pre, {p.max_rows, 2 * p.ffn}, p.dtype);
  AnnounceProducts(ctx, p, 3);
  p.aligned = Aligned({x.data, weights.w1, weights.w2, pre, y.tensor});
  Select(ctx, "grouped_mlp", GroupedMlpImpls(), p)
      .forward(ctx, p, {x.split_sizes, x.data, weights.w1, weights.w2, row_scale, pre, {}, y});
}

void GroupedMlpBackward(const Context& ctx, GroupedTensor dy, Tensor x, Tensor pre,
                        const GroupedMlpWeights& weights, const Tensor& row_scale,
                        GroupedMlpGradients out) {
  constexpr std::string_view kOp = "grouped_mlp backward";
  GroupedMlpProblem p = CheckProblem(kOp, "dy", dy, weights, row_scale);
  Check(kOp, "pre", pre, {p.max_rows, 2 * p.ffn}, p.dtype);
  if (out.dscale) CheckRowValues(kOp, "dscale", out.dscale.tensor, p.max_rows, p.dtype);
  CISTRON_CHECK(static_cast<bool>(out.dw1) == static_cast<bool>(out.dw2),
                "{}: dw1 and dw2 are computed together, but only one was given", kOp);
  if (out.dw1) {
    Check(kOp, "x", x, {p.max_rows, p.hidden}, p.dtype);
  }
  out.dx = Checked(kOp, "dx", std::move(out.dx), {p.max_rows, p.hidden}, p.dtype, p.dtype);
  for (auto [name, dw, w] :
       {std::tuple("dw1", &out.dw1, &weights.w1), std::tuple("dw2", &out.dw2, &weights.w2)}) {
    *dw = Checked(kOp, name, std::move(*dw), w->shape(), p.dtype, ComputeType(p.dtype));
  }
  AnnounceProducts(ctx, p, out.dw1 ? 6 : 3);
  p.aligned = Aligned({dy.data, x, weights.w1, weights.w2, pre});
  Select(ctx, "grouped_mlp", GroupedMlpImpls(), p)
      .backward(ctx, p,
                {std::move(dy.split_sizes),
                 std::move(dy.data),
                 std::move(x),
                 std::move(pre),
                 weights.w1,
                 weights.w2,
                 row_scale,
                 std::move(out),
                 {}});
}

void SwiGluLinearForward(const Context& ctx, const GroupedTensor& pre, const Tensor& w2,
                         const Tensor& row_scale, const Tensor& act, const Output& y) {
  constexpr std::string_view kOp = "swiglu linear forward";
  GroupedMlpProblem p = CheckHalf(kOp, "y", {y.tensor, pre.split_sizes}, w2, row_scale);
  Check(kOp, "pre", pre.data, {p.max_rows, 2 * p.ffn}, p.dtype);
  if (act) Check(kOp, "act", act, {p.max_rows, p.ffn}, p.dtype);
  p.aligned = Aligned({pre.data, w2, act, y.tensor});
  Select(ctx, "grouped_mlp", GroupedMlpImpls(), p)
      .forward(ctx, p, {pre.split_sizes, {}, {}, w2, row_scale, pre.data, act, y});
}

void SwiGluLinearBackward(const Context& ctx, const GroupedTensor& dy, const Tensor& pre,
                          const Tensor& w2, const Tensor& row_scale, const Output& dpre,
                          const Output& dscale) {
  constexpr std::string_view kOp = "swiglu linear backward";
  GroupedMlpProblem p = CheckHalf(kOp, "dy", dy, w2, row_scale);
  Check(kOp, "pre", pre, {p.max_rows, 2 * p.ffn}, p.dtype);
  Check(kOp, "dpre", dpre.tensor, {p.max_rows, 2 * p.ffn}, p.dtype);
  if (dscale) CheckRowValues(kOp, "dscale", dscale.tensor, p.max_rows, p.dtype);
  p.aligned = Aligned({dy.data, pre, w2, dpre.tensor});
  Select(ctx, "grouped_mlp", GroupedMlpImpls(), p)
      .backward(ctx, p,
                {dy.split_sizes, dy.data, {}, pre, {}, w2, row_scale, {.dscale = dscale}, dpre});
}

}  // namespace cistron::ops
