// Tuned RMSNorm on the CPU: cuts rows into blocks; the kernels are in norm_rows_cpu.cc.
#include <algorithm>

#include "cistron/base/threads.h"
#include "cistron/ops/norm/norm_impls.h"
#include "cistron/ops/norm/norm_rows.h"

namespace cistron::ops {
namespace {

constexpr std::int64_t kGrain = 16;  // rows below which a thread is not worth waking

// Rows of one partial sum of dg: a function of the number of rows alone, so that the sum does not
// depend on the threads; at most 256 partial sums, so that they stay small.
std::int64_t RowsOfBlock(std::int64_t rows) {
  return std::max<std::int64_t>(32, (rows + 255) / 256);
}

template <class T>
const T* DataOrNull(const Tensor& t) {
  return t ? t.data<T>() : nullptr;
}

template <class T>
void ForwardTyped(const Tensor& x, const Tensor& residual, const Tensor& g, double eps,
                  const Tensor& h, const Tensor& rstd, const Output& y) {
  RmsNormForwardArgs<T> args{};
  args.x = x.data<T>();
  args.x_stride = x.stride(0);
  args.residual = DataOrNull<T>(residual);
  args.residual_stride = residual ? residual.stride(0) : 0;
  args.g = g.data<T>();
  args.h = h ? h.data<T>() : nullptr;
  args.h_stride = h ? h.stride(0) : 0;
  args.y = y.tensor.data<T>();
  args.y_stride = y.tensor.stride(0);
  args.rstd = rstd ? rstd.data<float>() : nullptr;
  args.width = x.dim(1);
  args.eps = static_cast<float>(eps);
  args.accumulate = y.mode == WriteMode::kAccumulate;
  ParallelChunks(x.dim(0), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    RmsNormForwardRows(args, begin, end);
  });
}

template <class T>
void BackwardTyped(const Context& ctx, const Tensor& dy, const Tensor& h, const Tensor& rstd,
                   const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg) {
  RmsNormBackwardArgs<T> args{};
  args.dy = dy.data<T>();
  args.dy_stride = dy.stride(0);
  args.h = h.data<T>();
  args.h_stride = h.stride(0);
  args.rstd = rstd.data<float>();
  args.g = g.data<T>();
  args.dh_in = DataOrNull<T>(dh_in);
  args.dh_in_stride = dh_in ? dh_in.stride(0) : 0;
  args.dh = dh.tensor.data<T>();
  args.dh_stride = dh.tensor.stride(0);
  args.width = h.dim(1);
  args.accumulate = dh.mode == WriteMode::kAccumulate;

  const std::int64_t rows = h.dim(0), width = args.width;
  const std::int64_t block = RowsOfBlock(rows);
  const std::int64_t blocks = (rows + block - 1) / block;
  const Tensor partial = dg ? ctx.Empty({blocks, width}, DType::kF32) : Tensor();
  float* sums = dg ? partial.data<float>() : nullptr;
  ParallelFor(blocks, 1, [&](std::int64_t b) {
    RmsNormBackwardRows(args, b * block, std::min(rows, (b + 1) * block),
                        dg ? sums + b * width : nullptr);
  });
  if (!dg) return;
  // Columns side by side, blocks in order.
  constexpr std::int64_t kColumnGrain = 1024;
  ParallelChunks(width, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int) {
    float* out = dg.tensor.data<float>();
    if (blocks == 0) {
      if (dg.mode == WriteMode::kWrite) std::fill(out + begin, out + end, 0.0f);
      return;
    }
    for (std::int64_t b = 1; b < blocks; ++b) {
      for (std::int64_t j = begin; j < end; ++j) sums[j] += sums[b * width + j];
    }
    for (std::int64_t j = begin; j < end; ++j) {
      out[j] = dg.mode == WriteMode::kAccumulate ? out[j] + sums[j] : sums[j];
    }
  });
}

Support Supports(const RmsNormProblem& problem) {
  if (problem.dtype == DType::kF32 || problem.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(problem.dtype)));
}

void Forward(const Context&, const Tensor& x, const Tensor& residual, const Tensor& g, double eps,
             const Tensor& h, const Tensor& rstd, const Output& y) {
  if (x.dtype() == DType::kBF16) {
    ForwardTyped<bf16>(x, residual, g, eps, h, rstd, y);
  } else {
    ForwardTyped<float>(x, residual, g, eps, h, rstd, y);
  }
}

void Backward(const Context& ctx, const Tensor& dy, const Tensor& h, const Tensor& rstd,
              const Tensor& g, const Tensor& dh_in, const Output& dh, const Output& dg) {
  if (h.dtype() == DType::kBF16) {
    BackwardTyped<bf16>(ctx, dy, h, rstd, g, dh_in, dh, dg);
  } else {
    BackwardTyped<float>(ctx, dy, h, rstd, g, dh_in, dh, dg);
  }
}

}  // namespace

RmsNormImpl CpuRmsNorm() {
  return {"cpu", Supports, {Forward, Backward}};
}

}  // namespace cistron::ops
