// The implementations of reduce; private to this folder.
#pragma once

#include "cistron/ops/reduce/reduce.h"

namespace cistron::ops {

extern const ReduceImpl kReduceCuda;
extern const ReduceImpl kReduceCpu;
extern const ReduceImpl kReduceRef;

// Elements of one block: partial sums are made a block at a time, then added in the order of the
// blocks.
inline constexpr std::int64_t kReduceBlock = 4096;

// out (= or +=) value.
void StoreScalar(const Output& out, double value);

// Written so that a NaN norm gives a NaN factor instead of an unclipped step.
constexpr double ClipFactorOf(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1.0 : factor;
}
void ClipFactorHost(const Context& ctx, const Tensor& sum_of_squares, double max_norm,
                    const Tensor& norm, const Tensor& clip);
void GateUpdateHost(const Context& ctx, const Tensor& values, const Tensor& gate,
                    const Tensor& clip);
// By SumOfSquares of each.
void SumOfSquaresOfAllHost(const Context& ctx, std::span<const Tensor> tensors, const Output& out);

}  // namespace cistron::ops
