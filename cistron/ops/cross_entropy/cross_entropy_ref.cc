// Scalar reference of cross_entropy: one token at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cistron/ops/cross_entropy/cross_entropy_impls.h"

namespace cistron::ops {
namespace {

Support SupportsCrossEntropy(const CrossEntropyProblem& problem) {
  if (problem.dtype != DType::kF64 && problem.dtype != DType::kF32 &&
      problem.dtype != DType::kBF16) {
    return Support::No("only f64, f32 and bf16");
  }
  return Support::Yes();
}

template <class T>
void Run(const CrossEntropyArgs& args) {
  using C = Compute<T>;
  const std::int64_t tokens = args.x.dim(0), width = args.x.dim(1), vocab = args.w.dim(0);
  const T* w = args.w.data<T>();
  const bool gradients = args.dx || args.dw;
  const double grad_scale = gradients ? *args.grad_scale.data<double>() : 0;
  std::vector<C> g(static_cast<std::size_t>(vocab));  // logits, then their gradient
  std::vector<C> dx(static_cast<std::size_t>(width));
  std::vector<C> dw(args.dw ? static_cast<std::size_t>(vocab * width) : 0, C(0));

  for (std::int64_t t = 0; t < tokens; ++t) {
    const T* x = args.x.data<T>() + t * width;
    const std::int64_t label = args.labels.data<std::int64_t>()[t];
    const C weight = args.weights ? C(args.weights.data<float>()[t]) : C(1);
    std::fill(dx.begin(), dx.end(), C(0));
    C nll = 0;
    if (label != kIgnoreLabel) {
      for (std::int64_t v = 0; v < vocab; ++v) {
        C dot = 0;
        for (std::int64_t h = 0; h < width; ++h) dot += C(w[v * width + h]) * C(x[h]);
        g[static_cast<std::size_t>(v)] = dot;
      }
      // Softmax relative to the largest logit: no exponential overflows.
      const C largest = *std::max_element(g.begin(), g.end());
      const C label_logit = g[static_cast<std::size_t>(label)];
      C sum = 0;
      for (C& value : g) sum += value = std::exp(value - largest);
      nll = std::log(sum) - (label_logit - largest);
      // A token of weight 0 takes no part in the gradient, whatever its logits are.
      if (gradients && weight != 0) {
        const C scale = static_cast<C>(grad_scale) * weight;
        for (std::int64_t v = 0; v < vocab; ++v) {
          const C probability = g[static_cast<std::size_t>(v)] / sum;
          // As the stored type: both products take g in the dtype of x and w.
          const C grad = C(T(scale * (probability - C(v == label))));
          for (std::int64_t h = 0; h < width; ++h) {
            dx[static_cast<std::size_t>(h)] += grad * C(w[v * width + h]);
            if (args.dw) dw[static_cast<std::size_t>(v * width + h)] += grad * C(x[h]);
          }
        }
      }
    }
    args.nll.data<C>()[t] = nll;
    if (args.dx) {
      T* out = args.dx.tensor.data<T>() + t * width;
      for (std::int64_t h = 0; h < width; ++h) {
        const C value = dx[static_cast<std::size_t>(h)];
        out[h] = T(args.dx.mode == WriteMode::kAccumulate ? C(out[h]) + value : value);
      }
    }
  }
  if (args.dw) {
    C* out = args.dw.tensor.data<C>();
    for (std::size_t i = 0; i < dw.size(); ++i) {
      out[i] = args.dw.mode == WriteMode::kAccumulate ? out[i] + dw[i] : dw[i];
    }
  }
}

void RunRef(const Context&, const CrossEntropyArgs& args) {
  DispatchFloat("cross_entropy", args.x.dtype(),
                [&](auto tag) { Run<typename decltype(tag)::type>(args); });
}

}  // namespace

constinit const CrossEntropyImpl kCrossEntropyRef = {"ref", SupportsCrossEntropy, {RunRef}};

}  // namespace cistron::ops
