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

// σ(±z) is 0 or 1 in f64 from here on, so that what is beyond may be brought here, where nothing
// overflows; of GELU's argument a, whose z is 1025 there.
inline constexpr double kSaturated = 1000;
inline constexpr double kGeluSaturated = 24;

}  // namespace cistron::ops::internal
