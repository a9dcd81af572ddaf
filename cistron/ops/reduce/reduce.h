// reduce: sums over a whole tensor, in fp64 and in a fixed order.
//
//   SumOfSquares   out (= or +=) Σ x²   each square in the compute type, the sum in fp64
//   WeightedSum    out (= or +=) Σ x·w  products and sum in fp64; w undefined: Σ x
//   AddTo          y += x (same shape and dtype; used to join gradients)
// Elements are summed in blocks of fixed size, the blocks in order: the bits do not depend on the
// number of threads. `out` is an f64 scalar on the device.
#pragma once

#include <span>

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

void SumOfSquares(const Context& ctx, const Tensor& x, const Output& out);
void WeightedSum(const Context& ctx, const Tensor& x, const Tensor& weights, const Output& out);
void AddTo(const Context& ctx, const Tensor& x, const Tensor& y);

// clip = min(1, max_norm / (√sum_of_squares + 1e-6)); norm = √sum_of_squares. Device scalars (f64).
void ClipFactor(const Context& ctx, const Tensor& sum_of_squares, double max_norm,
                const Tensor& norm, const Tensor& clip);

// Σ x² over several tensors (f64, f32 or bf16, contiguous), each as SumOfSquares makes it, added in
// their order. On a device one launch serves many tensors.
void SumOfSquaresOfAll(const Context& ctx, std::span<const Tensor> tensors, const Output& out);

// Stops an update that values of its step forbid, without the host: where one of `values` (f64 [n])
// is not finite, or `gate` (f64 []) is NaN from a step before, gate and clip become NaN. AdamW
// leaves everything as it is where clip is NaN.
void GateUpdate(const Context& ctx, const Tensor& values, const Tensor& gate, const Tensor& clip);

struct ReduceProblem {
  DType dtype;
  std::int64_t numel;
};
struct ReduceRun {
  void (*sum_of_squares)(const Context&, const Tensor& x, const Output& out);
  void (*weighted_sum)(const Context&, const Tensor& x, const Tensor& weights, const Output& out);
  void (*add_to)(const Context&, const Tensor& x, const Tensor& y);
  void (*clip_factor)(const Context&, const Tensor& sum_of_squares, double max_norm,
                      const Tensor& norm, const Tensor& clip);
  void (*sum_of_squares_of_all)(const Context&, std::span<const Tensor> tensors, const Output& out);
  void (*gate_update)(const Context&, const Tensor& values, const Tensor& gate, const Tensor& clip);
};
using ReduceImpl = Implementation<ReduceProblem, ReduceRun>;
std::span<const ReduceImpl> ReduceImpls();

}  // namespace cistron::ops
