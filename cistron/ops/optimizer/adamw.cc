// Argument checks and choice of implementation of adamw.
#include "cistron/ops/optimizer/adamw.h"

#include <cmath>

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/optimizer/adamw_impls.h"

namespace cistron::ops {
namespace {

void CheckConfig(const AdamWConfig& config) {
  CISTRON_CHECK(config.beta1 >= 0 && config.beta1 < 1, "AdamW: beta1 {} is not in [0, 1)",
                config.beta1);
  CISTRON_CHECK(config.beta2 >= 0 && config.beta2 < 1, "AdamW: beta2 {} is not in [0, 1)",
                config.beta2);
  CISTRON_CHECK(config.eps >= 0, "AdamW: eps {} is negative", config.eps);
  CISTRON_CHECK(config.weight_decay >= 0, "AdamW: weight_decay {} is negative",
                config.weight_decay);
}

}  // namespace

std::span<const AdamWImpl> AdamWImpls() {
  static const AdamWImpl list[] = {kAdamWCpu, kAdamWRef};
  return list;
}

template <class T>
AdamWFactors<T> MakeAdamWFactors(const AdamWConfig& config, const AdamWScalars& scalars) {
  const double lr = *scalars.lr.data<double>();
  const double step = *scalars.step.data<double>();
  CISTRON_CHECK(step >= 1, "AdamW: step {} is below 1", step);
  return {
      .clip = static_cast<T>(*scalars.clip.data<double>()),
      .decay = static_cast<T>(1 - lr * config.weight_decay),
      .one_minus_beta1 = static_cast<T>(1 - config.beta1),
      .beta2 = static_cast<T>(config.beta2),
      .one_minus_beta2 = static_cast<T>(1 - config.beta2),
      .root_correction2 = static_cast<T>(std::sqrt(1 - std::pow(config.beta2, step))),
      .eps = static_cast<T>(config.eps),
      .step_size = static_cast<T>(lr / (1 - std::pow(config.beta1, step))),
  };
}
template AdamWFactors<float> MakeAdamWFactors<float>(const AdamWConfig&, const AdamWScalars&);
template AdamWFactors<double> MakeAdamWFactors<double>(const AdamWConfig&, const AdamWScalars&);

void AdamW(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
           const Tensor& g, const Tensor& p, const Tensor& m, const Tensor& v, const Tensor& low) {
  CheckConfig(config);
  CheckTensor("AdamW", "lr", scalars.lr, {}, DType::kF64);
  CheckTensor("AdamW", "step", scalars.step, {}, DType::kF64);
  CheckTensor("AdamW", "clip", scalars.clip, {}, DType::kF64);
  CISTRON_CHECK(p && (p.dtype() == DType::kF32 || p.dtype() == DType::kF64),
                "AdamW: the parameter is {}; masters are f32 or f64", Describe(p));
  CheckTensor("AdamW", "p", p, p.shape(), p.dtype());
  CheckTensor("AdamW", "g", g, p.shape(), p.dtype());
  CheckTensor("AdamW", "m", m, p.shape(), p.dtype());
  CheckTensor("AdamW", "v", v, p.shape(), p.dtype());
  if (low) CheckTensor("AdamW", "low", low, p.shape(), DType::kBF16);
  const AdamWProblem problem{p.dtype(), p.numel(), static_cast<bool>(low)};
  Select(ctx, "adamw", AdamWImpls(), problem).run(ctx, config, scalars, g, p, m, v, low);
}

}  // namespace cistron::ops
