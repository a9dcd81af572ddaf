// Scalar reference of AdamW. The order of operations is that of torch.optim.AdamW without `foreach`
// and `fused`: lerp for m, the second moment's correction applied to its root, addcdiv for the
// step.
#include <cmath>

#include "cistron/ops/optimizer/adamw_impls.h"

namespace cistron::ops {
namespace {

Support SupportsAdamW(const AdamWProblem& problem) {
  if (problem.dtype != DType::kF32 && problem.dtype != DType::kF64 &&
      problem.dtype != DType::kBF16) {
    return Support::No("parameters are f32, f64 or bf16");
  }
  return Support::Yes();
}

// P: parameter and moments; G: gradient. Computed in the compute type of P, each result rounded
// once.
template <class P, class G>
void Update(const AdamWFactors<Compute<P>>& f, const AdamWTensors& t) {
  using C = Compute<P>;
  const G* gradient = t.g.data<G>();
  P* parameter = t.p.data<P>();
  P* first = t.m.data<P>();
  P* second = t.v.data<P>();
  bf16* rounded = t.low ? t.low.data<bf16>() : nullptr;
  for (std::int64_t i = 0; i < t.p.numel(); ++i) {
    const C grad = static_cast<C>(gradient[i]) * f.clip;
    const C m0 = static_cast<C>(first[i]), v0 = static_cast<C>(second[i]);
    const C m = m0 + f.one_minus_beta1 * (grad - m0);
    const C v = v0 * f.beta2 + f.one_minus_beta2 * grad * grad;
    const C denominator = std::sqrt(v) / f.root_correction2 + f.eps;
    const C p = static_cast<C>(parameter[i]) * f.decay - f.step_size * m / denominator;
    first[i] = P(m);
    second[i] = P(v);
    parameter[i] = P(p);
    if (rounded) rounded[i] = bf16(static_cast<float>(p));
  }
}

template <class P, class G>
void UpdateAll(const AdamWConfig& config, const AdamWScalars& scalars,
               std::span<const AdamWTensors> parameters) {
  if (std::isnan(*scalars.clip.data<double>())) return;
  for (const AdamWTensors& t : parameters) {
    AdamWConfig own = config;
    own.weight_decay = t.weight_decay;
    Update<P, G>(MakeAdamWFactors<Compute<P>>(own, scalars), t);
  }
}

void AdamWRef(const Context&, const AdamWConfig& config, const AdamWScalars& scalars,
              std::span<const AdamWTensors> parameters) {
  const bool low_gradient = parameters.front().g.dtype() == DType::kBF16;
  switch (parameters.front().p.dtype()) {
    case DType::kF64: return UpdateAll<double, double>(config, scalars, parameters);
    case DType::kF32:
      return low_gradient ? UpdateAll<float, bf16>(config, scalars, parameters)
                          : UpdateAll<float, float>(config, scalars, parameters);
    default:
      return low_gradient ? UpdateAll<bf16, bf16>(config, scalars, parameters)
                          : UpdateAll<bf16, float>(config, scalars, parameters);
  }
}

}  // namespace

constinit const AdamWImpl kAdamWRef = {"ref", SupportsAdamW, {AdamWRef}};

}  // namespace cistron::ops
