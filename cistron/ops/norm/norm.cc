// Argument checks and choice of the implementation of RMSNorm.
#include "cistron/ops/norm/norm.h"

#include <array>

#include "cistron/ops/norm/norm_impls.h"
#include "cistron/ops/op_work.h"

namespace cistron::ops {
namespace {

void CheckRows(std::string_view name, const Tensor& t, const Tensor& like) {
  CISTRON_CHECK(t && t.dtype() == like.dtype() && t.shape() == like.shape(),
                "norm: {} is {}, not {}", name, Describe(t), Describe(like));
  CISTRON_CHECK(t.numel() == 0 || t.dim(1) == 1 || t.stride(1) == 1,
                "norm: {} has stride {} along the last dimension, not 1", name, t.stride(1));
}

void CheckVector(std::string_view name, const Tensor& t, DType dtype, std::int64_t size) {
  CISTRON_CHECK(t && t.rank() == 1 && t.dtype() == dtype && t.dim(0) == size && t.IsContiguous(),
                "norm: {} is {}, not {} [{}]", name, Describe(t), Name(dtype), size);
}

const RmsNormRun& Choose(const Context& ctx, const Tensor& x) {
  return Select(ctx, "norm", RmsNormImpls(), RmsNormProblem{x.dtype(), x.dim(0), x.dim(1)});
}

}  // namespace

std::span<const RmsNormImpl> RmsNormImpls() {
  static const std::array impls = {CudaRmsNorm(), CpuRmsNorm(), RefRmsNorm()};
  return impls;
}

void RmsNormForward(const Context& ctx, const Tensor& x, const Tensor& residual, const Tensor& g,
                    double eps, const Tensor& h, const Tensor& rstd, const Output& y) {
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) >= 1, "norm: x is {}, not [T, H] with H ≥ 1",
                Describe(x));
  CISTRON_CHECK(eps >= 0, "norm: eps {} is negative", eps);
  CheckRows("x", x, x);
  CISTRON_CHECK(h || !residual, "norm: h must be given where there is a residual");
  if (residual) CheckRows("residual", residual, x);
  if (h) CheckRows("h", h, x);
  CheckRows("y", y.tensor, x);
  CheckVector("g", g, x.dtype(), x.dim(1));
  if (rstd) CheckVector("rstd", rstd, ComputeType(x.dtype()), x.dim(0));
  AnnounceWork(ctx, 0, x, residual, h, y);
  Choose(ctx, x).forward(ctx, x, residual, g, eps, h, rstd, y);
}

void RmsNormBackward(const Context& ctx, const Tensor& dy, const Tensor& h, const Tensor& rstd,
                     const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg) {
  CISTRON_CHECK(h && h.rank() == 2 && h.dim(1) >= 1, "norm: h is {}, not [T, H] with H ≥ 1",
                Describe(h));
  CheckRows("h", h, h);
  CheckRows("dy", dy, h);
  if (dh_in) CheckRows("dh_in", dh_in, h);
  CheckRows("dh", dh.tensor, h);
  CheckVector("g", g, h.dtype(), h.dim(1));
  CheckVector("rstd", rstd, ComputeType(h.dtype()), h.dim(0));
  if (dg) CheckVector("dg", dg.tensor, ComputeType(h.dtype()), h.dim(1));
  AnnounceWork(ctx, 0, dy, h, dh_in, dh);
  Choose(ctx, h).backward(ctx, dy, h, rstd, g, dh_in, dh, dg);
}

}  // namespace cistron::ops
