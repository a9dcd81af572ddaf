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
