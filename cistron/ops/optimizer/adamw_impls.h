// The implementations of AdamW; private to this folder.
#pragma once

#include <cmath>
#include <cstdint>

#include "cistron/ops/optimizer/adamw.h"

namespace cistron::ops {

extern const AdamWImpl kAdamWCuda;
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

// beta^step of a whole step ≥ 1, the same bits on every device: powers by squaring, in pairs of f64
// whose sum is the value. Their error is far below the last bit of the result, which is therefore
// what the C library's pow gives, but for its own rare misroundings. A template, so that std::fma,
// which is not constexpr, may be called in device code too.
template <class C>
constexpr C PowerOf(C beta, C step) {
  struct Pair {
    C high, low;
  };
  const auto product = [](const Pair& a, const Pair& b) {
    const C high = a.high * b.high;
    const C low = std::fma(a.high, b.high, -high) + (a.high * b.low + a.low * b.high);
    const C sum = high + low;
    return Pair{sum, low - (sum - high)};
  };
  Pair power{1, 0}, square{beta, 0};
  for (auto n = static_cast<std::uint64_t>(step); n > 0; n >>= 1) {
    if (n & 1) power = product(power, square);
    square = product(square, square);
  }
  return power.high;
}

// `power1`, `power2`: β1^t and β2^t.
template <class T>
constexpr AdamWFactors<T> AdamWFactorsOf(const AdamWConfig& config, double lr, double clip,
                                         double power1, double power2) {
  return {
      .clip = static_cast<T>(clip),
      .decay = static_cast<T>(1 - lr * config.weight_decay),
      .one_minus_beta1 = static_cast<T>(1 - config.beta1),
      .beta2 = static_cast<T>(config.beta2),
      .one_minus_beta2 = static_cast<T>(1 - config.beta2),
      .root_correction2 = static_cast<T>(std::sqrt(1 - power2)),
      .eps = static_cast<T>(config.eps),
      .step_size = static_cast<T>(lr / (1 - power1)),
  };
}
// Of scalars that the host can read.
template <class T>
AdamWFactors<T> MakeAdamWFactors(const AdamWConfig& config, const AdamWScalars& scalars);

// Of the implementation on a GPU, in every build.
inline Support SupportsAdamWOnCuda(const AdamWProblem& problem) {
  if (problem.dtype != DType::kF32 && problem.dtype != DType::kF64 &&
      problem.dtype != DType::kBF16) {
    return Support::No("parameters are f32, f64 or bf16");
  }
  return Support::Yes();
}

}  // namespace cistron::ops
