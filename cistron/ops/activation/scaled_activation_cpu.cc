// Scaled activations on the CPU: vector kernels over chunks of rows. Plain SwiGLU has its own
// (activation_cpu.cc), whose bits it keeps.
#include "cistron/base/threads.h"
#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/activation/scaled_activation_impls.h"
#include "cistron/ops/activation/scaled_activation_rows.h"
#include "cistron/ops/cpu_arguments.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kGrain = 1 << 13;  // elements a thread takes at least

bool IsPlainSwiGlu(const ActivationConfig& config) {
  return config.kind == ActivationKind::kSwiGlu && config.glu_interleave_size == 0;
}

template <class T>
ScaledActivationArgs<T> MakeArgs(const ActivationConfig& config, std::int64_t width,
                                 const Tensor& x, const Tensor& row_scale, const Output& y) {
  const std::int64_t g = config.glu_interleave_size;
  return {.config = config,
          .width = width,
          .segment = g > 0 ? g : width,
          .up_distance = !IsGated(config.kind) ? 0
                         : g > 0               ? g
                                               : width,
          .x = x.data<T>(),
          .x_stride = x.stride(0),
          .row_scale = FloatsOrNull(row_scale),
          .y = y ? y.tensor.data<T>() : nullptr,
          .y_stride = y ? y.tensor.stride(0) : 0,
          .accumulate_y = Accumulates(y)};
}

Support Supports(const ScaledActivationProblem& p) {
  if (p.dtype == DType::kF32 || p.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(p.dtype)));
}

void ForwardCpu(const Context& ctx, const ActivationConfig& config, const Tensor& x,
                const Tensor& row_scale, const Tensor& split_sizes, const Output& y) {
  if (IsPlainSwiGlu(config)) return SwiGluForwardCpu(ctx, x, row_scale, split_sizes, y);
  const std::int64_t rows = RowsInUse("activation forward", split_sizes, x.dim(0));
  DispatchVectorType(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t width = y.tensor.dim(1);
    const auto args = MakeArgs<T>(config, width, x, row_scale, y);
    ParallelChunks(rows, 1 + kGrain / (width + 1), [&](std::int64_t begin, std::int64_t end, int) {
      ActivationForwardRows(args, begin, end);
    });
  });
}

void BackwardCpu(const Context& ctx, const ActivationConfig& config, const Tensor& dy,
                 const Tensor& x, const Tensor& row_scale, const Tensor& split_sizes,
                 const Output& dx, const Output& dscale, const Output& y_out) {
  if (IsPlainSwiGlu(config)) {
    return SwiGluBackwardCpu(ctx, dy, x, row_scale, split_sizes, dx, dscale, y_out);
  }
  const std::int64_t rows = RowsInUse("activation backward", split_sizes, x.dim(0));
  DispatchVectorType(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t width = dy.dim(1);
    auto args = MakeArgs<T>(config, width, x, row_scale, y_out);
    args.dy = dy.data<T>();
    args.dy_stride = dy.stride(0);
    args.dx = dx.tensor.data<T>();
    args.dx_stride = dx.tensor.stride(0);
    args.dscale = FloatsOrNull(dscale.tensor);
    args.accumulate_dx = Accumulates(dx);
    args.accumulate_dscale = Accumulates(dscale);
    ParallelChunks(rows, 1 + kGrain / (width + 1), [&](std::int64_t begin, std::int64_t end, int) {
      ActivationBackwardRows(args, begin, end);
    });
  });
}

}  // namespace

constinit const ScaledActivationImpl kScaledActivationCpu = {
    "cpu", Supports, {ForwardCpu, BackwardCpu}};

}  // namespace cistron::ops::internal
