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

namespace {

// Checks one parameter and says what it is.
AdamWProblem ProblemOf(const AdamWTensors& t) {
  const DType dtype = t.p ? t.p.dtype() : DType::kU8;
  CISTRON_CHECK(t.p && (dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16),
                "AdamW: the parameter is {}; it is f32, f64 or bf16", Describe(t.p));
  const bool low_states = dtype == DType::kBF16;
  const bool mixes = t.g && ((low_states && t.g.dtype() == DType::kF32) ||
                             (dtype == DType::kF32 && t.g.dtype() == DType::kBF16));
  const DType grad = mixes ? t.g.dtype() : dtype;
  CheckTensor("AdamW", "p", t.p, t.p.shape(), dtype);
  CheckTensor("AdamW", "g", t.g, t.p.shape(), grad);
  CheckTensor("AdamW", "m", t.m, t.p.shape(), dtype);
  CheckTensor("AdamW", "v", t.v, t.p.shape(), dtype);
  CISTRON_CHECK(!t.low || !low_states, "AdamW: low is for masters, but the parameter is {}",
                Describe(t.p));
  if (t.low) CheckTensor("AdamW", "low", t.low, t.p.shape(), DType::kBF16);
  return {dtype, t.p.numel(), static_cast<bool>(t.low), grad};
}

}  // namespace

void AdamWOfAll(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
                std::span<const AdamWTensors> parameters) {
  CheckConfig(config);
  CheckTensor("AdamW", "lr", scalars.lr, {}, DType::kF64);
  CheckTensor("AdamW", "step", scalars.step, {}, DType::kF64);
  CheckTensor("AdamW", "clip", scalars.clip, {}, DType::kF64);
  if (parameters.empty()) return;
  AdamWProblem problem = ProblemOf(parameters.front());
  for (const AdamWTensors& t : parameters.subspan(1)) {
    const AdamWProblem other = ProblemOf(t);
    CISTRON_CHECK(other.dtype == problem.dtype && other.grad_dtype == problem.grad_dtype &&
                      other.has_low == problem.has_low,
                  "AdamW: parameters that are updated together differ: {} with a gradient {} and "
                  "{} with a gradient {}",
                  Describe(parameters.front().p), Describe(parameters.front().g), Describe(t.p),
                  Describe(t.g));
    problem.numel += other.numel;
  }
  // Parameter and moments are read and written, gradients read, low written.
  std::int64_t bytes = 0;
  for (const AdamWTensors& t : parameters) {
    bytes +=
        t.g.bytes() + 2 * (t.p.bytes() + t.m.bytes() + t.v.bytes()) + (t.low ? t.low.bytes() : 0);
  }
  if (auto* recorder = dynamic_cast<WorkRecorder*>(ctx.recorder())) {
    recorder->Announce({0, static_cast<double>(bytes)});
  }
  Select(ctx, "adamw", AdamWImpls(), problem).run(ctx, config, scalars, parameters);
}

void AdamW(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
           const Tensor& g, const Tensor& p, const Tensor& m, const Tensor& v, const Tensor& low) {
  const AdamWTensors one[] = {{g, p, m, v, low, config.weight_decay}};
  AdamWOfAll(ctx, config, scalars, one);
}

}  // namespace cistron::ops
