// adamw: one update of one parameter, decoupled weight decay, PyTorch's order of operations.
//
//   g ← clip·g;  p ← p − lr·wd·p
//   m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²
//   p ← p − lr · (m / (1−β1^t)) / (√(v / (1−β2^t)) + eps)
//
// Values that change from step to step are device scalars: lr, t (number of this update, from 1),
// clip. Where clip is NaN nothing changes: how a device stops an update (GateUpdate in reduce.h).
// Shapes: p, m, v, g alike. Dtypes, computed in f32 (f64 for f64):
//   masters: p, m, v f32, g f32 or bf16 (all f64 for f64 models); `low`, optional, bf16: receives
//            p rounded to nearest even (the weights that the model computes with). Of g in bf16 the
//            update is that of the same values in f32, bit for bit
//   without: p, m, v bf16, g f32 or bf16, no `low`: each of p, m, v is rounded to nearest even
//            after the update. Steps of p below 2^-9 of it are lost, and v shrinks only where
//            1 − β2 is above that: torch.optim.AdamW on bf16 parameters does the same
// On a device t is not checked to be at least 1; where it is not, the result is NaN.
// In place; each element is independent of the others, so shards update as the whole does.
// Source: Loshchilov & Hutter, "Decoupled weight decay regularization", 2019; torch.optim.AdamW.
#pragma once

#include <span>

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

// One parameter of several that are updated together.
struct AdamWTensors {
  Tensor g, p, m, v, low;
  double weight_decay = 0;  // in place of the configuration's
};
// The same, parameter by parameter; on a device one launch serves many. All of one dtype of p and
// one of g, all with `low` or none.
void AdamWOfAll(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
                std::span<const AdamWTensors> parameters);

struct AdamWProblem {
  DType dtype;  // of p
  std::int64_t numel;
  bool has_low;
  DType grad_dtype = dtype;
};
struct AdamWRun {
  void (*run)(const Context&, const AdamWConfig&, const AdamWScalars&,
              std::span<const AdamWTensors> parameters);
};
using AdamWImpl = Implementation<AdamWProblem, AdamWRun>;
std::span<const AdamWImpl> AdamWImpls();

}  // namespace cistron::ops
