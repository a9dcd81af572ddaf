#include "cistron/ops/activation/scaled_activation.h"

#include <cmath>

#include "cistron/ops/activation/scaled_activation_impls.h"
#include "cistron/ops/check_tensor.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops {
namespace {

ScaledActivationProblem CheckInputs(std::string_view op, const ActivationConfig& config,
                                    const Tensor& x, const Tensor& row_scale) {
  const bool gated = IsGated(config.kind);
  const std::int64_t g = config.glu_interleave_size;
  CISTRON_CHECK(x && x.rank() == 2 && (!gated || x.dim(1) % 2 == 0), "{}: x is {}, expected {}", op,
                Describe(x), gated ? "[M, 2F] with gate and up columns" : "[M, F]");
  CheckMatrix(op, "x", x, x.dim(0), x.dim(1), x.dtype());
  const std::int64_t width = gated ? x.dim(1) / 2 : x.dim(1);
  CISTRON_CHECK(g >= 0, "{}: glu_interleave_size is {}; it must be 0 or more", op, g);
  CISTRON_CHECK(gated || g == 0, "{}: glu_interleave_size is {}, but {} has no up columns", op, g,
                Name(config.kind));
  CISTRON_CHECK(g == 0 || width % g == 0, "{}: glu_interleave_size = {} does not divide F = {}", op,
                g, width);
  if (config.kind == ActivationKind::kClampedSwiGlu) {
    CISTRON_CHECK(config.limit > 0 && std::isfinite(config.alpha),
                  "{}: limit = {} must be positive and alpha = {} finite", op, config.limit,
                  config.alpha);
  }
  if (row_scale) CheckRowValues(op, "row_scale", row_scale, x.dim(0), ComputeType(x.dtype()));
  return {x.dtype(), config, x.dim(0), width};
}

}  // namespace

std::string_view Name(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSwiGlu: return "swiglu";
    case ActivationKind::kClampedSwiGlu: return "clamped_swiglu";
    case ActivationKind::kGeGlu: return "geglu";
    case ActivationKind::kSRelu: return "srelu";
  }
  CISTRON_THROW(kInternal, "activation kind {} has no name", static_cast<int>(kind));
}

std::span<const ScaledActivationImpl> ScaledActivationImpls() {
  static const ScaledActivationImpl list[] = {internal::kScaledActivationCuda,
                                              internal::kScaledActivationCpu,
                                              internal::kScaledActivationRef};
  return list;
}

void ScaledActivationForward(const Context& ctx, const ActivationConfig& config, const Tensor& x,
                             const Tensor& row_scale, const Tensor& split_sizes, const Output& y) {
  const std::string op = fmt::format("{} forward", Name(config.kind));
  const ScaledActivationProblem problem = CheckInputs(op, config, x, row_scale);
  CheckMatrix(op, "y", y.tensor, problem.rows, problem.width, problem.dtype);
  if (split_sizes) CheckSplitSizes(op, split_sizes, problem.rows);
  Select(ctx, "activation", ScaledActivationImpls(), problem)
      .forward(ctx, config, x, row_scale, split_sizes, y);
}

void ScaledActivationBackward(const Context& ctx, const ActivationConfig& config, const Tensor& dy,
                              const Tensor& x, const Tensor& row_scale, const Tensor& split_sizes,
                              const Output& dx, const Output& dscale, const Output& y_out) {
  const std::string op = fmt::format("{} backward", Name(config.kind));
  const ScaledActivationProblem problem = CheckInputs(op, config, x, row_scale);
  CheckMatrix(op, "dy", dy, problem.rows, problem.width, problem.dtype);
  CheckMatrix(op, "dx", dx.tensor, problem.rows, x.dim(1), problem.dtype);
  if (dscale) {
    CheckRowValues(op, "dscale", dscale.tensor, problem.rows, ComputeType(problem.dtype));
  }
  if (y_out) CheckMatrix(op, "y", y_out.tensor, problem.rows, problem.width, problem.dtype);
  if (split_sizes) CheckSplitSizes(op, split_sizes, problem.rows);
  Select(ctx, "activation", ScaledActivationImpls(), problem)
      .backward(ctx, config, dy, x, row_scale, split_sizes, dx, dscale, y_out);
}

}  // namespace cistron::ops
