// Argument checks and choice of implementation of reduce, and what needs no choice.
#include "cistron/ops/reduce/reduce.h"

#include <cmath>

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/reduce/reduce_impls.h"

namespace cistron::ops {
namespace {

void CheckInput(std::string_view op, const Tensor& x) {
  CISTRON_CHECK(x, "{}: x is not given", op);
  CISTRON_CHECK(x.IsContiguous(), "{}: x ({}) is not contiguous", op, Describe(x));
}

const ReduceRun& SelectReduce(const Context& ctx, const Tensor& x) {
  return Select(ctx, "reduce", ReduceImpls(), ReduceProblem{x.dtype(), x.numel()});
}

}  // namespace

std::span<const ReduceImpl> ReduceImpls() {
  static const ReduceImpl list[] = {kReduceCuda, kReduceCpu, kReduceRef};
  return list;
}

void StoreScalar(const Output& out, double value) {
  double* target = out.tensor.data<double>();
  *target = out.mode == WriteMode::kWrite ? value : *target + value;
}

void ClipFactorHost(const Context&, const Tensor& sum_of_squares, double max_norm,
                    const Tensor& norm, const Tensor& clip) {
  const double root = std::sqrt(*sum_of_squares.data<double>());
  *norm.data<double>() = root;
  *clip.data<double>() = ClipFactorOf(root, max_norm);
}

void GateUpdateHost(const Context&, const Tensor& values, const Tensor& gate, const Tensor& clip) {
  bool finite = !std::isnan(*gate.data<double>());
  for (const double x : values.span<double>()) finite = finite && std::isfinite(x);
  if (finite) return;
  *gate.data<double>() = NAN;
  *clip.data<double>() = NAN;
}

void SumOfSquaresOfAllHost(const Context& ctx, std::span<const Tensor> tensors, const Output& out) {
  if (tensors.empty() && out.mode == WriteMode::kWrite) StoreScalar(out, 0);
  WriteMode mode = out.mode;
  for (const Tensor& x : tensors) {
    SumOfSquares(ctx, x, {out.tensor, mode});
    mode = WriteMode::kAccumulate;
  }
}

void SumOfSquaresOfAll(const Context& ctx, std::span<const Tensor> tensors, const Output& out) {
  for (const Tensor& x : tensors) CheckInput("SumOfSquaresOfAll", x);
  CheckTensor("SumOfSquaresOfAll", "out", out.tensor, {}, DType::kF64);
  const DType dtype = tensors.empty() ? DType::kF32 : tensors.front().dtype();
  std::int64_t numel = 0;
  double bytes = 0;
  for (const Tensor& x : tensors) {
    numel += x.numel();
    bytes += static_cast<double>(x.bytes());
  }
  if (auto* recorder = dynamic_cast<WorkRecorder*>(ctx.recorder())) recorder->Announce({0, bytes});
  Select(ctx, "reduce", ReduceImpls(), ReduceProblem{dtype, numel})
      .sum_of_squares_of_all(ctx, tensors, out);
}

void GateUpdate(const Context& ctx, const Tensor& values, const Tensor& gate, const Tensor& clip) {
  CISTRON_CHECK(values, "GateUpdate: values are not given");
  CheckTensor("GateUpdate", "values", values, {values.numel()}, DType::kF64);
  CheckTensor("GateUpdate", "gate", gate, {}, DType::kF64);
  CheckTensor("GateUpdate", "clip", clip, {}, DType::kF64);
  Select(ctx, "reduce", ReduceImpls(), ReduceProblem{DType::kF64, values.numel()})
      .gate_update(ctx, values, gate, clip);
}

void SumOfSquares(const Context& ctx, const Tensor& x, const Output& out) {
  CheckInput("SumOfSquares", x);
  CheckTensor("SumOfSquares", "out", out.tensor, {}, DType::kF64);
  AnnounceWork(ctx, 0, x);
  SelectReduce(ctx, x).sum_of_squares(ctx, x, out);
}

void WeightedSum(const Context& ctx, const Tensor& x, const Tensor& weights, const Output& out) {
  CheckInput("WeightedSum", x);
  if (weights) {
    CISTRON_CHECK(weights.dtype() == DType::kF32 || weights.dtype() == DType::kF64,
                  "WeightedSum: weights ({}) are neither f32 nor f64", Describe(weights));
    CheckTensor("WeightedSum", "weights", weights, x.shape(), weights.dtype());
  }
  CheckTensor("WeightedSum", "out", out.tensor, {}, DType::kF64);
  SelectReduce(ctx, x).weighted_sum(ctx, x, weights, out);
}

void AddTo(const Context& ctx, const Tensor& x, const Tensor& y) {
  CheckInput("AddTo", x);
  CheckTensor("AddTo", "y", y, x.shape(), x.dtype());
  AnnounceWork(ctx, 0, x, y, y);
  SelectReduce(ctx, x).add_to(ctx, x, y);
}

void ClipFactor(const Context& ctx, const Tensor& sum_of_squares, double max_norm,
                const Tensor& norm, const Tensor& clip) {
  CheckTensor("ClipFactor", "sum_of_squares", sum_of_squares, {}, DType::kF64);
  CheckTensor("ClipFactor", "norm", norm, {}, DType::kF64);
  CheckTensor("ClipFactor", "clip", clip, {}, DType::kF64);
  CISTRON_CHECK(max_norm > 0, "ClipFactor: max_norm {} is not above 0", max_norm);
  Select(ctx, "reduce", ReduceImpls(), ReduceProblem{DType::kF64, 1})
      .clip_factor(ctx, sum_of_squares, max_norm, norm, clip);
}

}  // namespace cistron::ops
