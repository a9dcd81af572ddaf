#include "cistron/train/machine_peak.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "cistron/base/threads.h"
#include "cistron/nn/parameter.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::train {

double MeasurePeakFlops(const ops::Context& ctx, DType dtype) {
  // Large enough that a product runs at the machine's rate, small enough to stay in its caches.
  const bool on_gpu = ctx.device().type == DeviceType::kCuda;
  const std::int64_t size = on_gpu ? 4096 : 512;
  constexpr int kRepeats = 6;
  // Random values: a GPU that multiplies zeros uses less power and runs faster than it does in
  // training.
  const Tensor a = ctx.Empty({size, size}, dtype), b = ctx.Empty({size, size}, dtype);
  const Tensor values = Tensor::Empty({size, size}, ComputeType(dtype));
  nn::DrawNormal(0, "peak", 1, 0, values);
  for (const Tensor& t : {a, b}) Convert(values, t);
  const Tensor c = ctx.Empty({size, size}, dtype);
  const auto wait = [&] {
    if (on_gpu) cuda::Synchronize(ctx.device());
  };
  double fastest = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    ops::Gemm(ctx, a, ops::Transpose::kNo, b, ops::Transpose::kYes, ops::Write(c));
    wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    fastest = std::max(fastest, 2.0 * std::pow(static_cast<double>(size), 3) / took.count());
  }
  return fastest;
}

double MeasurePeakBandwidth(const ops::Context& ctx) {
  const bool on_gpu = ctx.device().type == DeviceType::kCuda;
  // Several times the caches.
  const std::int64_t bytes = std::int64_t{1} << (on_gpu ? 29 : 27);
  const Tensor from = ctx.Zeros({bytes}, DType::kU8), to = ctx.Zeros({bytes}, DType::kU8);
  double fastest = 0;
  for (int i = 0; i < 4; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    if (on_gpu) {
      constexpr int kCopies = 4;
      for (int copy = 0; copy < kCopies; ++copy) CopyTo(from, to);
      cuda::Synchronize(ctx.device());
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      fastest = std::max(fastest, 2.0 * kCopies * static_cast<double>(bytes) / took.count());
      continue;
    }
    ParallelChunks(bytes, std::int64_t{1} << 20, [&](std::int64_t first, std::int64_t last, int) {
      std::memcpy(static_cast<char*>(to.raw()) + first,
                  static_cast<const char*>(from.raw()) + first,
                  static_cast<std::size_t>(last - first));
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    fastest = std::max(fastest, 2.0 * static_cast<double>(bytes) / took.count());
  }
  return fastest;
}

}  // namespace cistron::train
