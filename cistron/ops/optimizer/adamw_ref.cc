// Scalar reference of AdamW. The order of operations is that of torch.optim.AdamW without `foreach`
// and `fused`: lerp for m, the second moment's correction applied to its root, addcdiv for the
// step.
#include <cmath>

#include "cistron/ops/optimizer/adamw_impls.h"

namespace cistron::ops {
namespace {

Support SupportsAdamW(const AdamWProblem& problem) {
  if (problem.dtype != DType::kF32 && problem.dtype != DType::kF64) {
    return Support::No("masters are f32 or f64");
  }
  return Support::Yes();
}

template <class T>
void Update(const AdamWFactors<T>& f, const Tensor& g, const Tensor& p, const Tensor& m,
            const Tensor& v, const Tensor& low) {
  const T* gradient = g.data<T>();
  T* parameter = p.data<T>();
  T* first = m.data<T>();
  T* second = v.data<T>();
  bf16* rounded = low ? low.data<bf16>() : nullptr;
  for (std::int64_t i = 0; i < p.numel(); ++i) {
    const T grad = gradient[i] * f.clip;
    first[i] = first[i] + f.one_minus_beta1 * (grad - first[i]);
    second[i] = second[i] * f.beta2 + f.one_minus_beta2 * grad * grad;
    const T denominator = std::sqrt(second[i]) / f.root_correction2 + f.eps;
    parameter[i] = parameter[i] * f.decay - f.step_size * first[i] / denominator;
    if (rounded) rounded[i] = bf16(static_cast<float>(parameter[i]));
  }
}

void AdamWRef(const Context&, const AdamWConfig& config, const AdamWScalars& scalars,
              const Tensor& g, const Tensor& p, const Tensor& m, const Tensor& v,
              const Tensor& low) {
  if (p.dtype() == DType::kF64) {
    Update(MakeAdamWFactors<double>(config, scalars), g, p, m, v, low);
  } else {
    Update(MakeAdamWFactors<float>(config, scalars), g, p, m, v, low);
  }
}

}  // namespace

constinit const AdamWImpl kAdamWRef = {"ref", SupportsAdamW, {AdamWRef}};

}  // namespace cistron::ops
