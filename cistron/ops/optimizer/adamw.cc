// Argument checks and choice of implementation of adamw.
#include "cistron/ops/optimizer/adamw.h"

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/op_work.h"
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
  static const AdamWImpl list[] = {kAdamWCuda, kAdamWCpu, kAdamWRef};
  return list;
}

template <class T>
AdamWFactors<T> MakeAdamWFactors(const AdamWConfig& config, const AdamWScalars& scalars) {
  const double lr = *scalars.lr.data<double>();
  const double step = *scalars.step.data<double>();
  CISTRON_CHECK(step >= 1, "AdamW: step {} is below 1", step);
  return AdamWFactorsOf<T>(config, lr, *scalars.clip.data<double>(), PowerOf(config.beta1, step),
                           PowerOf(config.beta2, step));
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
  AnnounceWork(ctx, 0, g, p, p, m, m, v, v, low);
  Select(ctx, "adamw", AdamWImpls(), problem).run(ctx, config, scalars, g, p, m, v, low);
}

}  // namespace cistron::ops
