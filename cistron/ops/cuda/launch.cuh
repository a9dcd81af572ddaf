// What the launchers of CUDA kernels share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cistron/ops/context.h"
#include "cistron/tensor/cuda/check.h"

namespace cistron::ops::internal {

inline cudaStream_t StreamOf(const Context& ctx) {
  return static_cast<cudaStream_t>(ctx.stream().handle);
}

// Throws, naming `op`, when the launch before it was refused.
inline void CheckLaunch(const char* op) {
  cuda::Check(cudaGetLastError(), op);
}

inline constexpr int kThreads = 256;

// Blocks of kThreads for `n` elements, for kernels that loop over a grid (GridStride).
inline unsigned BlocksFor(std::int64_t n) {
  constexpr std::int64_t kMaxBlocks = 132 * 16;
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((n + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

// for (i = GridStart(); i < n; i += GridStep())
__device__ inline std::int64_t GridStart() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t GridStep() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

// Sum over the 32 lanes, in every lane, in a fixed order.
template <class T>
__device__ inline T WarpSum(T x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
template <class T>
__device__ inline T WarpMax(T x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// Sum over a block of up to 1024 threads, in every thread. `scratch` holds 33 values in shared
// memory, which may be used again after the next __syncthreads.
template <class T>
__device__ inline T BlockSum(T x, T* scratch) {
  x = WarpSum(x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  if (warp == 0) {
    const int warps = (static_cast<int>(blockDim.x) + 31) / 32;
    const T sum = WarpSum(lane < warps ? scratch[lane] : T(0));
    if (lane == 0) scratch[32] = sum;
  }
  __syncthreads();
  return scratch[32];
}

}  // namespace cistron::ops::internal
