// embedding: rows of a table.
//
//   Forward  y[t] = w[token[t]]
//   Backward dw[v] (= or +=) Σ_{t: token[t] = v} dy[t], summed in token order, in the compute type
//
// Shapes: tokens i64 [T]; w [V, H]; y, dy [T, H]; dw [V, H] in the compute type.
// Errors: kInvalidArgument with position and value when a token on the host is outside [0, V). One
//         on a device is not checked: its y is NaN, and its dy reaches no row of dw.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

void EmbeddingForward(const Context& ctx, const Tensor& tokens, const Tensor& w, const Output& y);
void EmbeddingBackward(const Context& ctx, const Tensor& tokens, const Tensor& dy,
                       const Output& dw);

struct EmbeddingProblem {
  DType dtype;
  std::int64_t tokens, vocab, width;
};
struct EmbeddingRun {
  void (*forward)(const Context&, const Tensor& tokens, const Tensor& w, const Output& y);
  void (*backward)(const Context&, const Tensor& tokens, const Tensor& dy, const Output& dw);
};
using EmbeddingImpl = Implementation<EmbeddingProblem, EmbeddingRun>;
std::span<const EmbeddingImpl> EmbeddingImpls();

}  // namespace cistron::ops
