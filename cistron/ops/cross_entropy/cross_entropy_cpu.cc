// cross_entropy on the CPU. A chunk of tokens at a time: logits by one product, softmax row by row,
// dx and dw by two more products, dw added up over the chunks in order.
#include <algorithm>
#include <cmath>

#include "cistron/base/threads.h"
#include "cistron/ops/cross_entropy/cross_entropy_impls.h"
#include "cistron/ops/gemm/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/cross_entropy/cross_entropy_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

// One row of logits [V]: returns nll and leaves e^(l − max) in `logits` and the sum of those in
// `sum`.
HWY_INLINE float SoftmaxRow(float* logits, std::int64_t vocab, std::int64_t label, float* sum) {
  const FloatTag d;
  const std::int64_t whole = vocab / kLanes * kLanes;
  float largest = logits[0];
  if (whole > 0) {
    FloatVec maximum = hn::LoadU(d, logits);
    for (std::int64_t v = kLanes; v < whole; v += kLanes) {
      maximum = hn::Max(maximum, hn::LoadU(d, logits + v));
    }
    largest = hn::GetLane(hn::MaxOfLanes(d, maximum));
  }
  for (std::int64_t v = whole; v < vocab; ++v) largest = std::max(largest, logits[v]);
  const float label_logit = logits[label];

  // Where a NaN logit was lost by the maxima above, its exponential is NaN, and so is the sum.
  const FloatVec shift = hn::Set(d, largest);
  FloatVec total = hn::Zero(d);
  for (std::int64_t v = 0; v < whole; v += kLanes) {
    const FloatVec e = Exp(hn::Sub(hn::LoadU(d, logits + v), shift));
    hn::StoreU(e, d, logits + v);
    total = hn::Add(total, e);
  }
  float result = hn::GetLane(hn::SumOfLanes(d, total));
  if (whole < vocab) {
    float rest[kLanes];
    std::fill_n(rest, kLanes, 0.0f);
    for (std::int64_t v = whole; v < vocab; ++v) rest[v - whole] = logits[v] - largest;
    hn::StoreU(Exp(hn::LoadU(d, rest)), d, rest);
    for (std::int64_t v = whole; v < vocab; ++v) result += logits[v] = rest[v - whole];
  }
  *sum = result;
  return std::log(result) - (label_logit - largest);
}

// g[v] = scale·(e[v]/sum − onehot), in the dtype of the products. `e` and `g` may be the same
// memory.
template <class T>
HWY_INLINE void GradientRow(const float* e, std::int64_t vocab, std::int64_t label, float sum,
                            float scale, T* g) {
  const FloatTag d;
  const float at_label = scale * (e[label] / sum - 1.0f);
  const float factor = scale / sum;
  const FloatVec factors = hn::Set(d, factor);
  std::int64_t v = 0;
  for (; v + kLanes <= vocab; v += kLanes) {
    StoreFloat(hn::Mul(hn::LoadU(d, e + v), factors), g + v);
  }
  for (; v < vocab; ++v) g[v] = T(e[v] * factor);
  g[label] = T(at_label);
}

template <class T>
void RowsOf(const ChunkOfLogits& chunk, T* gradients, std::int64_t begin, std::int64_t end) {
  const std::int64_t vocab = chunk.vocab;
  for (std::int64_t t = begin; t < end; ++t) {
    float* logits = chunk.logits + t * vocab;
    const std::int64_t label = chunk.labels[t];
    float sum = 0;
    chunk.nll[t] = label == kIgnoreLabel ? 0 : SoftmaxRow(logits, vocab, label, &sum);
    if (gradients == nullptr) continue;
    const float weight = chunk.weights ? chunk.weights[t] : 1.0f;
    T* g = gradients + t * vocab;
    if (label == kIgnoreLabel || weight == 0) {
      std::fill_n(g, vocab, T(0.0f));
    } else {
      GradientRow(logits, vocab, label, sum, chunk.grad_scale * weight, g);
    }
  }
}

void Rows(const ChunkOfLogits& chunk, std::int64_t begin, std::int64_t end) {
  if (chunk.low_gradients) {
    RowsOf(chunk, chunk.low_gradients, begin, end);
  } else {
    RowsOf(chunk, chunk.gradients, begin, end);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(Rows);

Support SupportsCrossEntropy(const CrossEntropyProblem& problem) {
  if (problem.dtype == DType::kF64) return Support::No("fp64 runs in the reference");
  if (problem.dtype != DType::kF32 && problem.dtype != DType::kBF16) {
    return Support::No("only f32 and bf16");
  }
  return Support::Yes();
}

// The sum over the chunks is written by the first chunk or added from the start.
Output PartOf(const Output& whole, bool first) {
  return {whole.tensor, first ? whole.mode : WriteMode::kAccumulate};
}

void RunCpu(const Context& ctx, const CrossEntropyArgs& args) {
  const std::int64_t tokens = args.x.dim(0), vocab = args.w.dim(0);
  const DType dtype = args.x.dtype();
  const std::int64_t size = std::min(CrossEntropyChunk(vocab), tokens);
  const bool gradients = args.dx || args.dw;
  const Tensor logits = ctx.Empty({size, vocab}, DType::kF32);
  // fp32 gradients take the place of the logits.
  const Tensor g = gradients && dtype == DType::kBF16 ? ctx.Empty({size, vocab}, dtype) : logits;
  if (tokens == 0 && args.dw && args.dw.mode == WriteMode::kWrite) FillZero(args.dw.tensor);

  for (std::int64_t begin = 0; begin < tokens; begin += size) {
    const std::int64_t n = std::min(size, tokens - begin);
    const Tensor x = args.x.Slice(0, begin, n);
    const Tensor logits_now = logits.Slice(0, 0, n), g_now = g.Slice(0, 0, n);
    Gemm(ctx, x, Transpose::kNo, args.w, Transpose::kYes, Write(logits_now));

    ChunkOfLogits chunk;
    chunk.vocab = vocab;
    chunk.logits = logits.data<float>();
    chunk.labels = args.labels.data<std::int64_t>() + begin;
    chunk.weights = args.weights ? args.weights.data<float>() + begin : nullptr;
    chunk.nll = args.nll.data<float>() + begin;
    if (gradients) {
      chunk.grad_scale = static_cast<float>(*args.grad_scale.data<double>());
      if (dtype == DType::kBF16) {
        chunk.low_gradients = g.data<bf16>();
      } else {
        chunk.gradients = g.data<float>();
      }
    }
    ParallelChunks(n, std::max<std::int64_t>(1, 8192 / vocab),
                   [&](std::int64_t from, std::int64_t to, int) {
                     HWY_DYNAMIC_DISPATCH(Rows)(chunk, from, to);
                   });

    if (args.dx) {
      Gemm(ctx, g_now, Transpose::kNo, args.w, Transpose::kNo,
           {args.dx.tensor.Slice(0, begin, n), args.dx.mode});
    }
    if (args.dw) {
      Gemm(ctx, g_now, Transpose::kYes, x, Transpose::kNo, PartOf(args.dw, begin == 0));
    }
  }
}

}  // namespace

constinit const CrossEntropyImpl kCrossEntropyCpu = {"cpu", SupportsCrossEntropy, {RunCpu}};

}  // namespace cistron::ops
#endif  // HWY_ONCE
