// cross_entropy on a GPU. A chunk of tokens at a time: logits by one product, nll and the gradient
// of the logits by one block a token, dx and dw by two more products, dw added up over the chunks
// in order.
#include "cistron/ops/cross_entropy/cross_entropy_impls.h"
#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/gemm/gemm.h"

namespace cistron::ops {
namespace {

using internal::Value;

template <class T>
struct Rows {
  using C = Compute<T>;
  std::int64_t vocab;
  const C* logits;  // [rows, V]
  const std::int64_t* labels;
  const float* weights;      // null: all 1
  const double* grad_scale;  // null without gradients
  C* nll;
  T* gradients;  // [rows, V], or null; may be the memory of the logits
};

// The largest value of a block, in every thread. `scratch` as for BlockSum.
template <class C>
__device__ C BlockMax(C x, C* scratch) {
  x = internal::WarpMax(x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32;
  return internal::WarpMax(scratch[lane < warps ? lane : 0]);
}

template <class T>
__global__ void cross_entropy_rows_kernel(Rows<T> rows) {
  using C = Compute<T>;
  __shared__ C max_scratch[32], sum_scratch[33];
  const std::int64_t t = blockIdx.x, vocab = rows.vocab;
  const C* logits = rows.logits + t * vocab;
  const std::int64_t label = rows.labels[t];
  const bool valid = label >= 0 && label < vocab;
  C largest = 0, sum = 1;
  if (valid) {
    const C label_logit = logits[label];
    // Softmax relative to the largest logit: no exponential overflows. A NaN that the maxima lose
    // comes back with its exponential.
    C x = logits[0];
    for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) x = max(x, logits[v]);
    largest = BlockMax(x, max_scratch);
    x = 0;
    for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) x += exp(logits[v] - largest);
    sum = internal::BlockSum(x, sum_scratch);
    if (threadIdx.x == 0) rows.nll[t] = log(sum) - (label_logit - largest);
  } else if (threadIdx.x == 0) {
    // A label that the host could not check is seen in the loss.
    rows.nll[t] = label == kIgnoreLabel ? C(0) : C(NAN);
  }
  if (rows.gradients == nullptr) return;
  T* gradients = rows.gradients + t * vocab;
  const C weight = rows.weights ? C(rows.weights[t]) : C(1);
  if (!valid || weight == C(0)) {
    for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
      gradients[v] = internal::Rounded<T>(C(0));
    }
    return;
  }
  const C scale = static_cast<C>(*rows.grad_scale) * weight;
  for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
    const C probability = exp(logits[v] - largest) / sum;
    gradients[v] = internal::Rounded<T>(scale * (probability - (v == label ? C(1) : C(0))));
  }
}

// A few logits a thread, in whole warps.
unsigned ThreadsFor(std::int64_t vocab) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((vocab + 127) / 128 * 32, 32, 1024));
}

template <class T>
void RunTyped(const Context& ctx, const CrossEntropyArgs& args) {
  using C = Compute<T>;
  const std::int64_t tokens = args.x.dim(0), vocab = args.w.dim(0);
  const DType dtype = args.x.dtype(), compute = ComputeType(dtype);
  const std::int64_t size = std::min(CrossEntropyCudaChunk(vocab), tokens);
  const bool gradients = args.dx || args.dw;
  const Tensor logits = ctx.Empty({size, vocab}, compute);
  // Gradients in the compute type take the place of the logits.
  const Tensor g = gradients && dtype != compute ? ctx.Empty({size, vocab}, dtype) : logits;

  // Without tokens there is one empty chunk, whose products leave dw as a sum over nothing.
  std::int64_t begin = 0;
  do {
    const std::int64_t n = std::min(size, tokens - begin);
    const Tensor x = args.x.Slice(0, begin, n);
    const Tensor logits_now = logits.Slice(0, 0, n);
    Gemm(ctx, x, Transpose::kNo, args.w, Transpose::kYes, Write(logits_now));
    if (n > 0) {
      Rows<T> rows{};
      rows.vocab = vocab;
      rows.logits = logits.data<C>();
      rows.labels = args.labels.data<std::int64_t>() + begin;
      rows.weights = args.weights ? args.weights.data<float>() + begin : nullptr;
      rows.nll = args.nll.data<C>() + begin;
      if (gradients) {
        rows.grad_scale = args.grad_scale.data<double>();
        rows.gradients = g.data<T>();
      }
      cross_entropy_rows_kernel<T>
          <<<static_cast<unsigned>(n), ThreadsFor(vocab), 0, internal::StreamOf(ctx)>>>(rows);
      internal::CheckLaunch("cross_entropy");
    }
    if (args.dx) {
      Gemm(ctx, g.Slice(0, 0, n), Transpose::kNo, args.w, Transpose::kNo,
           {args.dx.tensor.Slice(0, begin, n), args.dx.mode});
    }
    if (args.dw) {
      // The first chunk writes the sum over the chunks, or adds to what was there.
      Gemm(ctx, g.Slice(0, 0, n), Transpose::kYes, x, Transpose::kNo,
           {args.dw.tensor, begin == 0 ? args.dw.mode : WriteMode::kAccumulate});
    }
    begin += size;
  } while (begin < tokens);
}

void RunCuda(const Context& ctx, const CrossEntropyArgs& args) {
  DispatchFloat("cross_entropy", args.x.dtype(),
                [&](auto tag) { RunTyped<typename decltype(tag)::type>(ctx, args); });
}

}  // namespace

extern constinit const CrossEntropyImpl kCrossEntropyCuda = {
    "cuda", internal::FloatsOnCuda<CrossEntropyProblem>, {RunCuda}, DeviceType::kCuda};

}  // namespace cistron::ops
