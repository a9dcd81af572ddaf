#include "cistron/ops/activation/activation.h"

#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/check_tensor.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops {
namespace {

// Checks x and the row scale; returns the problem.
SwiGluProblem CheckInputs(std::string_view op, const Tensor& x, const Tensor& row_scale) {
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) % 2 == 0,
                "{}: x is {}, expected [M, 2F] with gate and up columns", op, Describe(x));
  CheckMatrix(op, "x", x, x.dim(0), x.dim(1), x.dtype());
  if (row_scale) CheckRowValues(op, "row_scale", row_scale, x.dim(0), ComputeType(x.dtype()));
  return {x.dtype(), x.dim(0), x.dim(1) / 2};
}

}  // namespace

void SwiGluForward(const Context& ctx, const Tensor& x, const Tensor& row_scale,
                   const Tensor& split_sizes, const Output& y) {
  constexpr std::string_view kOp = "swiglu forward";
  const SwiGluProblem problem = CheckInputs(kOp, x, row_scale);
  CheckMatrix(kOp, "y", y.tensor, problem.rows, problem.width, problem.dtype);
  if (split_sizes) CheckSplitSizes(kOp, split_sizes, problem.rows);
  AnnounceWork(ctx, 0, x, y);
  Select(ctx, "activation", SwiGluImpls(), problem).forward(ctx, x, row_scale, split_sizes, y);
}

void SwiGluBackward(const Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& row_scale,
                    const Tensor& split_sizes, const Output& dx, const Output& dscale,
                    const Output& y_out) {
  constexpr std::string_view kOp = "swiglu backward";
  const SwiGluProblem problem = CheckInputs(kOp, x, row_scale);
  CheckMatrix(kOp, "dy", dy, problem.rows, problem.width, problem.dtype);
  CheckMatrix(kOp, "dx", dx.tensor, problem.rows, 2 * problem.width, problem.dtype);
  if (dscale) {
    CheckRowValues(kOp, "dscale", dscale.tensor, problem.rows, ComputeType(problem.dtype));
  }
  if (y_out) CheckMatrix(kOp, "y", y_out.tensor, problem.rows, problem.width, problem.dtype);
  if (split_sizes) CheckSplitSizes(kOp, split_sizes, problem.rows);
  AnnounceWork(ctx, 0, dy, x, dx, y_out);
  Select(ctx, "activation", SwiGluImpls(), problem)
      .backward(ctx, dy, x, row_scale, split_sizes, dx, dscale, y_out);
}

std::span<const SwiGluImpl> SwiGluImpls() {
  static const SwiGluImpl list[] = {internal::kSwiGluCuda,
                                    {"cpu",
                                     internal::SwiGluCpuSupports,
                                     {internal::SwiGluForwardCpu, internal::SwiGluBackwardCpu}},
                                    {"ref",
                                     internal::SwiGluRefSupports,
                                     {internal::SwiGluForwardRef, internal::SwiGluBackwardRef}}};
  return list;
}

}  // namespace cistron::ops
