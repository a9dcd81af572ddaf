#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/testing/device_traffic.h"

namespace cistron::testing {
namespace {

using cuda::Check;

// A collective has a block a channel, and 16 to 32 channels within a machine.
constexpr int kBlocks = 24, kThreads = 512;
constexpr std::int64_t kCount = std::int64_t{4} << 20;  // f32 of a buffer: 16 MiB
constexpr int kPasses = 8;                              // of a kernel over its buffers

// out = a + b, over and over, through shared memory, with a counter for whoever waits: as a step of
// a ring does.
__global__ void __launch_bounds__(kThreads)
    ring_step_kernel(const float4* a, const float4* b, float4* out, std::int64_t count, int* done) {
  __shared__ float4 staged[kThreads];
  for (int pass = 0; pass < kPasses; ++pass) {
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += static_cast<std::int64_t>(kBlocks) * kThreads) {
      staged[threadIdx.x] = a[i];
      __syncwarp();
      const float4 x = staged[threadIdx.x], y = b[i];
      out[i] = float4{x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd_system(done, 1);
  }
}

__global__ void fill_kernel(float* to, std::int64_t count, float value) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    to[i] = value;
  }
}
__global__ void count_others_kernel(const float* x, std::int64_t count, float value, int* others) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    if (x[i] != value) atomicAdd(others, 1);
  }
}

// Freed with their owner; a test that failed may have left the device unusable, so nothing is
// checked there.
struct Buffers {
  cudaStream_t stream = nullptr;
  float *a = nullptr, *b = nullptr, *out = nullptr, *copy = nullptr, *host = nullptr;
  int* counters = nullptr;  // done, others

  Buffers() {
    Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    for (float** p : {&a, &b, &out, &copy}) Check(cudaMalloc(p, kCount * 4), "cudaMalloc");
    Check(cudaMallocHost(&host, kCount * 4), "cudaMallocHost");
    Check(cudaMalloc(&counters, 2 * sizeof(int)), "cudaMalloc");
    Check(cudaMemsetAsync(counters, 0, 2 * sizeof(int), stream), "cudaMemset");
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(a, kCount, 1.0f);
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(b, kCount, 2.0f);
    Check(cudaGetLastError(), "fill");
  }
  ~Buffers() {
    cudaStreamSynchronize(stream);
    for (float* p : {a, b, out, copy}) cudaFree(p);
    cudaFree(counters);
    cudaFreeHost(host);
    cudaStreamDestroy(stream);
  }

  void Round() const {
    ring_step_kernel<<<kBlocks, kThreads, 0, stream>>>(
        reinterpret_cast<float4*>(a), reinterpret_cast<float4*>(b), reinterpret_cast<float4*>(out),
        kCount / 4, counters);
    Check(cudaGetLastError(), "ring step");
    Check(cudaMemcpyAsync(copy, out, kCount * 4, cudaMemcpyDeviceToDevice, stream), "copy");
    Check(cudaMemcpyAsync(host, copy, kCount * 4, cudaMemcpyDeviceToHost, stream), "copy");
    Check(cudaMemsetAsync(copy, 0xFF, kCount * 4, stream), "fill");
    Check(cudaMemcpyAsync(copy, host, kCount * 4, cudaMemcpyHostToDevice, stream), "copy");
    count_others_kernel<<<kBlocks, kThreads, 0, stream>>>(copy, kCount, 3.0f, counters + 1);
    Check(cudaGetLastError(), "count");
    Check(cudaStreamSynchronize(stream), "traffic");
  }
  int Others() const {
    int others = 0;
    Check(cudaMemcpy(&others, counters + 1, sizeof(int), cudaMemcpyDeviceToHost), "copy");
    return others;
  }
};

}  // namespace

void DeviceTraffic::Run(Device device) {
  try {
    cuda::RequireDevice(device.index);
    const Buffers buffers;
    while (!stop_) {
      buffers.Round();
      ++rounds_;
    }
    if (const int others = buffers.Others(); others != 0) {
      CISTRON_THROW(kInternal, "traffic: {} sums are not 3", others);
    }
  } catch (...) {
    error_ = std::current_exception();
  }
}

DeviceTraffic::DeviceTraffic(Device device) : thread_([this, device] { Run(device); }) {}

DeviceTraffic::~DeviceTraffic() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void DeviceTraffic::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
}

}  // namespace cistron::testing
