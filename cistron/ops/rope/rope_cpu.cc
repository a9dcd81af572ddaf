// Tuned rope on the CPU; the kernels are in rope_rows_cpu.cc.
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/rope/rope_impls.h"
#include "cistron/ops/rope/rope_rows.h"

namespace cistron::ops {
namespace {

constexpr std::int64_t kGrain = 16;  // rows below which a thread is not worth waking

template <class T>
void RotateTyped(const Tensor& table, const Tensor& positions, std::int64_t head_dim, bool inverse,
                 const Tensor& x) {
  const RopeArgs<T> args{table.data<float>(),
                         positions.data<std::int64_t>(),
                         head_dim,
                         inverse ? -1.0f : 1.0f,
                         x.data<T>(),
                         x.stride(0),
                         x.dim(1)};
  ParallelChunks(x.dim(0), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    std::vector<float> scratch(static_cast<std::size_t>(head_dim));
    RopeRows(args, begin, end, scratch.data());
  });
}

Support Supports(const RopeProblem& problem) {
  if (problem.dtype == DType::kF32 || problem.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(problem.dtype)));
}

void Rotate(const Context&, const Tensor& table, const Tensor& positions, std::int64_t head_dim,
            bool inverse, const Tensor& x) {
  if (x.dtype() == DType::kBF16) {
    RotateTyped<bf16>(table, positions, head_dim, inverse, x);
  } else {
    RotateTyped<float>(table, positions, head_dim, inverse, x);
  }
}

}  // namespace

RopeImpl CpuRope() {
  return {"cpu", Supports, {Rotate}};
}

}  // namespace cistron::ops
