// Benchmarks of ops that memory bounds: bytes a second, beside copies of as many.
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <functional>
#include <vector>

#include "bench/alternate.h"
#include "bench/copy.h"
#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/tensor/tensor.h"

namespace cistron::bench {

// Uniform in [−1/2, 1/2).
inline Tensor Random(const Shape& shape, DType dtype, std::uint64_t seed) {
  const Tensor t = Tensor::Empty(shape, DType::kF32);
  const RandomStream stream(seed, "bench");
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    t.data<float>()[i] = stream.Uniform(static_cast<std::uint64_t>(i)) - 0.5f;
  }
  return ConvertTo(t, dtype);
}

// Times an op that must move `bytes` and prints one JSON line.
inline void BenchBytes(const Options& options, const char* op, const char* shape, DType dtype,
                       std::int64_t bytes, const std::function<void()>& function) {
  const Copies copies = CopiesOf(bytes);
  const std::vector<double> t = Alternate(options, {function, copies.memcpy, copies.vector});
  const double gb = static_cast<double>(bytes) * 1e-9;
  fmt::print(
      "{{\"op\": \"{}\", \"shape\": \"{}\", \"dtype\": \"{}\", \"threads\": {}, \"gb_per_s\": "
      "{:.1f}, \"memcpy_gb_per_s\": {:.1f}, \"vector_copy_gb_per_s\": {:.1f}, \"of_memcpy\": "
      "{:.3f}, "
      "\"of_vector_copy\": {:.3f}}}\n",
      op, shape, Name(dtype), NumThreads(), gb / t[0], gb / t[1], gb / t[2], t[1] / t[0],
      t[2] / t[0]);
  std::fflush(stdout);
}

}  // namespace cistron::bench
