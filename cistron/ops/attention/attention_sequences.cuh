// What all CUDA kernels of attention know about packed sequences and about matrices of heads.
#pragma once

#include <cstdint>

#include "cistron/ops/attention/attention.h"
#include "cistron/ops/cuda/launch.cuh"

namespace cistron::ops::internal {

// Sequences cut to the tokens that there are, so that no offset leads outside the tensors.
struct SequenceRows {
  const std::int64_t* cu_seqlens;
  std::int64_t number, tokens;

  __device__ std::int64_t Begin(std::int64_t s) const {
    return max(std::int64_t{0}, min(cu_seqlens[s], tokens));
  }
  __device__ std::int64_t End(std::int64_t s) const { return max(Begin(s), Begin(s + 1)); }
  // Rows before the padding.
  __device__ std::int64_t Used() const { return Begin(number); }
};

// A matrix of heads beside each other.
template <class T>
struct HeadRows {
  T* data;
  std::int64_t stride;
  bool aligned;  // every head of every row begins and ends on 16 bytes

  __device__ T* At(std::int64_t row, std::int64_t column) const {
    return data + row * stride + column;
  }
};
template <class T>
HeadRows<T> MakeHeadRows(const Tensor& t, std::int64_t head_dim) {
  using Element = std::remove_const_t<T>;
  constexpr std::int64_t kSize = sizeof(Element);
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0 &&
                       t.stride(0) * kSize % 16 == 0 && head_dim * kSize % 16 == 0;
  return {t.data<Element>(), t.stride(0), aligned};
}

// Lets a kernel have more shared memory than the usual 48 KiB.
template <class Kernel>
void AllowSharedMemory(Kernel* kernel, std::size_t bytes) {
  cuda::Check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cudaFuncSetAttribute");
}

}  // namespace cistron::ops::internal
