// reduce on a GPU. Partial sums of fixed blocks of elements, then one block of threads adds them in
// a fixed order: the bits depend on nothing but the input.
#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/reduce/reduce_impls.h"

namespace cistron::ops {
namespace {

using internal::BlockSum;
using internal::CheckLaunch;
using internal::GridStart;
using internal::GridStep;
using internal::kThreads;
using internal::StreamOf;
using internal::Value;

// Elements of one partial sum.
constexpr std::int64_t kPart = 16 * kThreads;

std::int64_t PartsOf(std::int64_t n) {
  return (n + kPart - 1) / kPart;
}

template <class Term>
__global__ void PartialSums(std::int64_t n, Term term, double* parts) {
  __shared__ double scratch[33];
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kPart;
  const std::int64_t end = min(n, begin + kPart);
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) sum += term(i);
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void SumParts(std::int64_t count, const double* parts, double* out, bool accumulate) {
  __shared__ double scratch[33];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += parts[i];
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) *out = accumulate ? *out + sum : sum;
}

template <class Term>
void Sum(const Context& ctx, std::int64_t n, const Term& term, const Output& out) {
  const std::int64_t count = PartsOf(n);
  const Tensor parts = ctx.Empty({count}, DType::kF64);
  const cudaStream_t stream = StreamOf(ctx);
  if (count > 0) {
    PartialSums<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(n, term,
                                                                       parts.data<double>());
  }
  SumParts<<<1, kThreads, 0, stream>>>(count, parts.data<double>(), out.tensor.data<double>(),
                                       internal::Accumulates(out));
  CheckLaunch("reduce");
}

template <class T>
struct Square {
  const T* x;
  __device__ double operator()(std::int64_t i) const {
    const Compute<T> v = Value(x[i]);
    return static_cast<double>(v * v);
  }
};

template <class T, class W>
struct Weighted {
  const T* x;
  const W* w;  // null: 1
  __device__ double operator()(std::int64_t i) const {
    const double v = static_cast<double>(Value(x[i]));
    return w == nullptr ? v : v * static_cast<double>(w[i]);
  }
};

void SumOfSquaresCuda(const Context& ctx, const Tensor& x, const Output& out) {
  DispatchFloat("SumOfSquares", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Sum(ctx, x.numel(), Square<T>{x.data<T>()}, out);
  });
}

void WeightedSumCuda(const Context& ctx, const Tensor& x, const Tensor& weights,
                     const Output& out) {
  DispatchFloat("WeightedSum", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (weights && weights.dtype() == DType::kF32) {
      Sum(ctx, x.numel(), Weighted<T, float>{x.data<T>(), weights.data<float>()}, out);
    } else {
      Sum(ctx, x.numel(), Weighted<T, double>{x.data<T>(), internal::DataOrNull<double>(weights)},
          out);
    }
  });
}

template <class T>
__global__ void Add(std::int64_t n, const T* x, T* y) {
  for (std::int64_t i = GridStart(); i < n; i += GridStep()) {
    internal::StoreElement(y[i], Value(x[i]), /*accumulate=*/true);
  }
}

void AddToCuda(const Context& ctx, const Tensor& x, const Tensor& y) {
  DispatchFloat("AddTo", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Add<<<internal::BlocksFor(x.numel()), kThreads, 0, StreamOf(ctx)>>>(x.numel(), x.data<T>(),
                                                                        y.data<T>());
    CheckLaunch("AddTo");
  });
}

__global__ void Clip(const double* sum_of_squares, double max_norm, double* norm, double* clip) {
  const double root = sqrt(*sum_of_squares);
  *norm = root;
  *clip = ClipFactorOf(root, max_norm);
}

void ClipFactorCuda(const Context& ctx, const Tensor& sum_of_squares, double max_norm,
                    const Tensor& norm, const Tensor& clip) {
  Clip<<<1, 1, 0, StreamOf(ctx)>>>(sum_of_squares.data<double>(), max_norm, norm.data<double>(),
                                   clip.data<double>());
  CheckLaunch("ClipFactor");
}

}  // namespace

extern constinit const ReduceImpl kReduceCuda = {
    "cuda",
    internal::FloatsOnCuda<ReduceProblem>,
    {SumOfSquaresCuda, WeightedSumCuda, AddToCuda, ClipFactorCuda},
    DeviceType::kCuda};

}  // namespace cistron::ops
