#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "bench/cuda/adamw_blocks.h"
#include "cistron/base/error.h"

namespace cistron::bench {
namespace {

constexpr int kThreads = 512, kAtOnce = 4;  // loads in flight of a thread, for each tensor

void Check(cudaError_t status) {
  CISTRON_CHECK(status == cudaSuccess, "adamw_blocks: {}", cudaGetErrorString(status));
}

__device__ void Update(float& p, float& m, float& v, float g) {
  m = 0.9f * m + 0.1f * g;
  v = 0.99f * v + 0.01f * g * g;
  p -= 1e-6f * m * rsqrtf(v + 1e-8f);
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(float4* master, float4* first, float4* second, const float4* gradient,
                 __nv_bfloat162* weight, std::int64_t n) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += stride * kAtOnce) {
    float4 p[kAtOnce], m[kAtOnce], v[kAtOnce], g[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const std::int64_t j = i + u * stride;
      if (j >= n) continue;
      p[u] = master[j];
      m[u] = first[j];
      v[u] = second[j];
      g[u] = __ldcs(gradient + j);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const std::int64_t j = i + u * stride;
      if (j >= n) continue;
      Update(p[u].x, m[u].x, v[u].x, g[u].x);
      Update(p[u].y, m[u].y, v[u].y, g[u].y);
      Update(p[u].z, m[u].z, v[u].z, g[u].z);
      Update(p[u].w, m[u].w, v[u].w, g[u].w);
      master[j] = p[u];
      first[j] = m[u];
      second[j] = v[u];
      weight[2 * j] = __floats2bfloat162_rn(p[u].x, p[u].y);
      weight[2 * j + 1] = __floats2bfloat162_rn(p[u].z, p[u].w);
    }
  }
}

}  // namespace

AdamWOnBlocks::AdamWOnBlocks(std::int64_t n) : n_(n) {
  const auto bytes = static_cast<std::size_t>(n) * sizeof(float);
  for (float** tensor : {&master_, &m_, &v_, &gradient_}) {
    Check(cudaMalloc(tensor, bytes));
    Check(cudaMemset(*tensor, 0, bytes));
  }
  Check(cudaMalloc(&weight_, bytes / 2));
  int least = 0, greatest = 0;
  Check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  stream_ = stream;
}

AdamWOnBlocks::~AdamWOnBlocks() {
  for (float* tensor : {master_, m_, v_, gradient_}) cudaFree(tensor);
  cudaFree(weight_);
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

void AdamWOnBlocks::Start(int blocks) {
  adamw_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream_)>>>(
      reinterpret_cast<float4*>(master_), reinterpret_cast<float4*>(m_),
      reinterpret_cast<float4*>(v_), reinterpret_cast<const float4*>(gradient_),
      static_cast<__nv_bfloat162*>(weight_), n_ / 4);
  Check(cudaGetLastError());
}

void WaitForDevice() {
  Check(cudaDeviceSynchronize());
}

}  // namespace cistron::bench
