#include <cuda_bf16.h>

#include <algorithm>

#include "cistron/base/error.h"
#include "cistron/comm/nccl/reduce_ranks.h"

namespace cistron::comm::nccl {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks =
    1024;  // some for every multiprocessor; each takes many elements

// T as it lies in memory, A as it is combined. Sums of i64 wrap, as unsigned ones do.
template <class T>
struct Arithmetic {
  using A = T;
  __device__ static A Load(T x) { return x; }
  __device__ static T Store(A x) { return x; }
};
template <>
struct Arithmetic<__nv_bfloat16> {
  using A = float;
  __device__ static A Load(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 Store(A x) { return __float2bfloat16_rn(x); }
};

struct Sum {
  template <class A>
  __device__ static A Combine(A a, A b) {
    return a + b;
  }
  __device__ static long long Combine(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) +
                                  static_cast<unsigned long long>(b));
  }
};
// b where it is NaN; a NaN in a stays, since nothing is larger.
struct Max {
  template <class A>
  __device__ static A Combine(A a, A b) {
    return b > a || b != b ? b : a;
  }
};
struct Min {
  template <class A>
  __device__ static A Combine(A a, A b) {
    return b < a || b != b ? b : a;
  }
};

template <class T, class Op>
__global__ void __launch_bounds__(kThreads)
    reduce_ranks_kernel(const T* own, const T* received, std::int64_t stride, int rank, int ranks,
                        std::int64_t count, T* out) {
  using R = Arithmetic<T>;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    auto result = R::Load(rank == 0 ? own[i] : received[i]);
    for (int r = 1; r < ranks; ++r) {
      result = Op::Combine(result, R::Load(r == rank ? own[i] : received[r * stride + i]));
    }
    out[i] = R::Store(result);
  }
}

template <class T, class Op>
void Launch(const RankParts& p, std::int64_t count, void* out, cudaStream_t stream) {
  const std::int64_t blocks = std::min(kMaxBlocks, (count + kThreads - 1) / kThreads);
  reduce_ranks_kernel<T, Op><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(p.own), static_cast<const T*>(p.received), p.stride, p.rank, p.ranks,
      count, static_cast<T*>(out));
}

template <class T>
void LaunchTyped(ReduceOp reduce, const RankParts& p, std::int64_t count, void* out,
                 cudaStream_t stream) {
  switch (reduce) {
    case ReduceOp::kSum: return Launch<T, Sum>(p, count, out, stream);
    case ReduceOp::kMax: return Launch<T, Max>(p, count, out, stream);
    case ReduceOp::kMin: return Launch<T, Min>(p, count, out, stream);
  }
}

}  // namespace

void ReduceRanks(ReduceOp reduce, DType dtype, const RankParts& parts, std::int64_t count,
                 void* out, cudaStream_t stream) {
  if (count == 0) return;
  switch (dtype) {
    case DType::kF32: LaunchTyped<float>(reduce, parts, count, out, stream); break;
    case DType::kF64: LaunchTyped<double>(reduce, parts, count, out, stream); break;
    case DType::kBF16: LaunchTyped<__nv_bfloat16>(reduce, parts, count, out, stream); break;
    case DType::kI64: LaunchTyped<long long>(reduce, parts, count, out, stream); break;
    default: CISTRON_THROW(kUnsupported, "nccl: {} cannot be reduced", Name(dtype));
  }
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    CISTRON_THROW(kInternal, "nccl: the sum over ranks cannot be launched: {}",
                  cudaGetErrorString(status));
  }
}

}  // namespace cistron::comm::nccl
