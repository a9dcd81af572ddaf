// jitter: every element times a random factor near 1 (Hugging Face's router_jitter_noise).
//
//   y[t, h] (= or +=) x[t, h] · (1 + j·(2·u − 1)),  u uniform in [0, 1)
//   u = RandomStream(seed, "router_jitter", step, layer) at (first_token + t)·H + h
// so that the factor is a function of (seed, step, place of the token in the global batch, element,
// layer), never of a rank, a micro-batch or a thread. Backward is the same map of dy.
//
// Shapes: x, y [T, H], contiguous; y may be x. step i64 [], on the device.
// Dtypes: f64, f32, bf16; computed in f32 (f64 for f64), one rounding. 0 ≤ j < 1.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

struct JitterConfig {
  double amplitude = 0;  // j
  std::uint64_t seed = 0;
  std::int64_t layer = 0;
  std::int64_t first_token = 0;  // place of row 0 in the global batch
};

void Jitter(const Context& ctx, const JitterConfig& config, const Tensor& step, const Tensor& x,
            const Output& y);

struct JitterProblem {
  DType dtype;
  std::int64_t rows, width;  // T, H
};
using JitterRun = void (*)(const Context&, const JitterConfig&, const Tensor& step, const Tensor& x,
                           const Output& y);
using JitterImpl = Implementation<JitterProblem, JitterRun>;
std::span<const JitterImpl> JitterImpls();

}  // namespace cistron::ops
