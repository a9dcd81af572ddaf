// Implementations of the scaled activations, for their list in scaled_activation.cc.
#pragma once

#include "cistron/ops/activation/scaled_activation.h"

namespace cistron::ops::internal {

// On a GPU: f64, f32, bf16.
extern const ScaledActivationImpl kScaledActivationCuda;
// Scalar reference: f64, f32, bf16.
extern const ScaledActivationImpl kScaledActivationRef;
// Vectorised with Highway: f32, bf16.
extern const ScaledActivationImpl kScaledActivationCpu;

}  // namespace cistron::ops::internal
