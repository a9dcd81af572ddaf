// adamw: one update of one parameter, decoupled weight decay, PyTorch's order of operations.
//
//   g ← clip·g;  p ← p − lr·wd·p
//   m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²
//   p ← p − lr · (m / (1−β1^t)) / (√(v / (1−β2^t)) + eps)
//
// Values that change from step to step are device scalars: lr, t (number of this update, from 1),
// clip. Shapes: p, m, v, g alike, f32 (f64 for f64 models); `low`, optional, bf16 of the same
// shape: receives p
//         rounded to nearest even (the weights that the model computes with).
// On a device t is not checked to be at least 1; where it is not, the result is NaN.
// In place; each element is independent of the others, so shards update as the whole does.
// Source: Loshchilov & Hutter, "Decoupled weight decay regularization", 2019; torch.optim.AdamW.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};
struct AdamWScalars {
  Tensor lr;    // f64 []
  Tensor step;  // f64 []
  Tensor clip;  // f64 []: factor on the gradient
};
void AdamW(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
           const Tensor& g, const Tensor& p, const Tensor& m, const Tensor& v, const Tensor& low);

struct AdamWProblem {
  DType dtype;
  std::int64_t numel;
  bool has_low;
};
struct AdamWRun {
  void (*run)(const Context&, const AdamWConfig&, const AdamWScalars&, const Tensor& g,
              const Tensor& p, const Tensor& m, const Tensor& v, const Tensor& low);
};
using AdamWImpl = Implementation<AdamWProblem, AdamWRun>;
std::span<const AdamWImpl> AdamWImpls();

}  // namespace cistron::ops
