// The implementations of AdamW; private to this folder.
#pragma once

#include "cistron/ops/optimizer/adamw.h"

namespace cistron::ops {

extern const AdamWImpl kAdamWCpu;
extern const AdamWImpl kAdamWRef;

// The factors of one update, made in f64 from the configuration and the device scalars and rounded
// once to the type of the parameter, as PyTorch does with Python floats.
template <class T>
struct AdamWFactors {
  T clip;
  T decay;            // 1 − lr·wd
  T one_minus_beta1;  // m ← m + (1−β1)·(g − m)
  T beta2, one_minus_beta2;
  T root_correction2;  // √(1 − β2^t)
  T eps;
  T step_size;  // lr / (1 − β1^t)
};
template <class T>
AdamWFactors<T> MakeAdamWFactors(const AdamWConfig& config, const AdamWScalars& scalars);

}  // namespace cistron::ops
