// reduce on a GPU. Partial sums of fixed blocks of elements, then one block of threads adds them in
// a fixed order: the bits depend on nothing but the input.
#include "cistron/ops/cuda/rows.cuh"
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

struct Plain {
  const double* x;
  __device__ double operator()(std::int64_t i) const { return x[i]; }
};

template <class T>
struct Square {
  const T* x;
  __device__ double operator()(std::int64_t i) const {
    const Compute<T> v = Value(x[i]);
    return static_cast<double>(v * v);
  }
};

// Tensors of one launch: their addresses travel with it.
constexpr int kTensors = 64;
struct TensorList {
  int count = 0;
  const void* data[kTensors];
  std::int64_t numel[kTensors];
  std::int64_t first_part[kTensors + 1];  // part p belongs to the tensor t with first_part[t] ≤ p
};

// Block p makes part p: as PartialSums of the tensor that it belongs to.
template <class T>
__global__ void __launch_bounds__(kThreads) PartialSquares(TensorList list, double* parts) {
  __shared__ double scratch[33];
  const std::int64_t part = blockIdx.x;
  int low = 0, high = list.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (list.first_part[middle] <= part ? low : high) = middle;
  }
  const T* x = static_cast<const T*>(list.data[low]);
  const std::int64_t begin = (part - list.first_part[low]) * kPart;
  const std::int64_t end = min(list.numel[low], begin + kPart);
  constexpr int kN = internal::kPack<T>;
  constexpr int kSteps = kPart / (kThreads * kN);
  double sum = 0;
  if (end - begin == kPart && reinterpret_cast<std::uintptr_t>(x) % 16 == 0) {
    internal::Pack<T, kN> packs[kSteps];  // asked for together
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      packs[k] = internal::LoadPack<kN>(x + begin + (k * kThreads + threadIdx.x) * kN);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const Compute<T> v = Value(packs[k].at[i]);
        sum += static_cast<double>(v * v);
      }
    }
  } else {
    for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      const Compute<T> v = Value(x[i]);
      sum += static_cast<double>(v * v);
    }
  }
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) parts[part] = sum;
}

// Tensors of one dtype are launched together; the parts of all of them are added at the end.
void SumOfSquaresOfAllCuda(const Context& ctx, std::span<const Tensor> tensors, const Output& out) {
  std::int64_t count = 0;
  for (const Tensor& x : tensors) count += PartsOf(x.numel());
  const Tensor parts = ctx.Empty({count}, DType::kF64);
  const cudaStream_t stream = StreamOf(ctx);
  double* to = parts.data<double>();
  for (std::size_t begin = 0; begin < tensors.size();) {
    const DType dtype = tensors[begin].dtype();
    TensorList list;
    list.first_part[0] = 0;
    std::size_t end = begin;
    for (; end < tensors.size() && list.count < kTensors && tensors[end].dtype() == dtype; ++end) {
      if (tensors[end].numel() == 0) continue;
      list.data[list.count] = tensors[end].raw();
      list.numel[list.count] = tensors[end].numel();
      const std::int64_t next = list.first_part[list.count] + PartsOf(tensors[end].numel());
      list.first_part[++list.count] = next;
    }
    begin = end;
    const std::int64_t own = list.first_part[list.count];
    if (own == 0) continue;
    DispatchFloat("SumOfSquaresOfAll", dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      PartialSquares<T><<<static_cast<unsigned>(own), kThreads, 0, stream>>>(list, to);
    });
    CheckLaunch("SumOfSquaresOfAll");
    to += own;
  }
  // Two stages: a step has hundreds of thousands of parts.
  const std::int64_t groups = PartsOf(count);
  const Tensor sums = ctx.Empty({groups}, DType::kF64);
  if (groups > 0) {
    PartialSums<<<static_cast<unsigned>(groups), kThreads, 0, stream>>>(
        count, Plain{parts.data<double>()}, sums.data<double>());
  }
  SumParts<<<1, kThreads, 0, stream>>>(groups, sums.data<double>(), out.tensor.data<double>(),
                                       internal::Accumulates(out));
  CheckLaunch("SumOfSquaresOfAll");
}

__global__ void Gate(std::int64_t n, const double* values, double* gate, double* clip) {
  bool bad = isnan(*gate);
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x) bad = bad || !isfinite(values[i]);
  if (__syncthreads_or(bad) && threadIdx.x == 0) {
    *gate = NAN;
    *clip = NAN;
  }
}

void GateUpdateCuda(const Context& ctx, const Tensor& values, const Tensor& gate,
                    const Tensor& clip) {
  Gate<<<1, kThreads, 0, StreamOf(ctx)>>>(values.numel(), values.data<double>(),
                                          gate.data<double>(), clip.data<double>());
  CheckLaunch("GateUpdate");
}

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
    {SumOfSquaresCuda, WeightedSumCuda, AddToCuda, ClipFactorCuda, SumOfSquaresOfAllCuda,
     GateUpdateCuda},
    DeviceType::kCuda};

}  // namespace cistron::ops
