// SwiGLU on the CPU: vector kernels over chunks of rows.
#include "cistron/base/threads.h"
#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/activation/swiglu_rows.h"
#include "cistron/ops/cpu_arguments.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kGrain = 1 << 13;  // elements a thread takes at least

// Whether an op on rows of `columns` elements touches more than stays in the caches.
template <class T>
bool LeavesCaches(std::int64_t rows, std::int64_t columns) {
  return rows * columns * static_cast<std::int64_t>(sizeof(T)) > kLastCacheBytes;
}

}  // namespace

Support SwiGluCpuSupports(const SwiGluProblem& p) {
  if (p.dtype == DType::kF32 || p.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(p.dtype)));
}

void SwiGluForwardCpu(const Context&, const Tensor& x, const Tensor& row_scale,
                      const Tensor& split_sizes, const Output& y) {
  const std::int64_t rows = RowsInUse("swiglu forward", split_sizes, x.dim(0));
  DispatchVectorType(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t width = y.tensor.dim(1);
    const SwiGluForwardArgs<T> args{
        x.data<T>(),        x.stride(0), FloatsOrNull(row_scale), y.tensor.data<T>(),
        y.tensor.stride(0), width,       Accumulates(y),          LeavesCaches<T>(rows, 3 * width)};
    ParallelChunks(rows, 1 + kGrain / (width + 1), [&](std::int64_t begin, std::int64_t end, int) {
      SwiGluForwardRows(args, begin, end);
    });
  });
}

void SwiGluBackwardCpu(const Context&, const Tensor& dy, const Tensor& x, const Tensor& row_scale,
                       const Tensor& split_sizes, const Output& dx, const Output& dscale,
                       const Output& y_out) {
  const std::int64_t rows = RowsInUse("swiglu backward", split_sizes, x.dim(0));
  DispatchVectorType(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t width = dy.dim(1);
    const SwiGluBackwardArgs<T> args{dy.data<T>(),
                                     x.data<T>(),
                                     dy.stride(0),
                                     x.stride(0),
                                     FloatsOrNull(row_scale),
                                     dx.tensor.data<T>(),
                                     dx.tensor.stride(0),
                                     dscale ? dscale.tensor.data<float>() : nullptr,
                                     y_out ? y_out.tensor.data<T>() : nullptr,
                                     y_out ? y_out.tensor.stride(0) : 0,
                                     width,
                                     Accumulates(dx),
                                     Accumulates(dscale),
                                     Accumulates(y_out),
                                     LeavesCaches<T>(rows, 6 * width)};
    ParallelChunks(rows, 1 + kGrain / (width + 1), [&](std::int64_t begin, std::int64_t end, int) {
      SwiGluBackwardRows(args, begin, end);
    });
  });
}

}  // namespace cistron::ops::internal
