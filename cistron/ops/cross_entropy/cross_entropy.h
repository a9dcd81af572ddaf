// cross_entropy: the output projection and the loss together, in chunks of tokens; logits are never
// whole.
//
//   l_t = w · x_t [V];  nll[t] = logsumexp(l_t) − l_t[label[t]]   (0 where label = kIgnoreLabel)
//   with gradients:  g_t = grad_scale · weight[t] · (softmax(l_t) − onehot(label[t]))
//   dx[t] = g_t · w;   dw (= or +=) Σ_t g_t ⊗ x_t
//
// g_t is rounded to the dtype of x and w before both products. Where weight[t] = 0 or the label is
// ignored, g_t is 0 whatever the logits are; nll is not weighted.
//
// grad_scale is a device scalar (f64), normally 1 / Σ weights of the global batch, so one pass
// makes loss and gradients. Σ w·nll and Σ w are sums the caller makes over all micro-batches and
// ranks.
//
// Shapes: x, dx [T, H]; w [V, H], dw [V, H] in the compute type; labels i64 [T]; weights [T] f32 or
//         undefined (all 1); nll [T] in the compute type.
// Dtypes: f64, f32, bf16 for x and w; logits and softmax in the compute type.
// Errors: a label that is neither kIgnoreLabel nor in [0, V), with its position. Labels on a device
//         are not read by the host: there the nll of such a token is NaN, and its gradient 0.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

inline constexpr std::int64_t kIgnoreLabel = -100;  // as PyTorch's ignore_index

struct CrossEntropyArgs {
  Tensor x, w, labels, weights;
  Tensor nll;         // written; 0 for ignored labels
  Tensor grad_scale;  // f64 scalar; needed with dx or dw
  Output dx;          // optional
  Output dw;          // optional
};
void LinearCrossEntropy(const Context& ctx, const CrossEntropyArgs& args);

struct CrossEntropyProblem {
  DType dtype;
  std::int64_t tokens, width, vocab;
};
struct CrossEntropyRun {
  void (*run)(const Context&, const CrossEntropyArgs&);
};
using CrossEntropyImpl = Implementation<CrossEntropyProblem, CrossEntropyRun>;
std::span<const CrossEntropyImpl> CrossEntropyImpls();

}  // namespace cistron::ops
