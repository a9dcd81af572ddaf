#include "cistron/tensor/cuda_backend.h"

#include <fmt/format.h>
#include <cstdlib>

#include <atomic>
#include <mutex>
#include <utility>

#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda/device_check.h"
#include "cistron/tensor/cuda/stream_allocator.h"

namespace cistron::cuda {
namespace {

constexpr int kMaxDevices = 64;

std::atomic<int> capability{0};
std::atomic<int> required{0};  // the device that was required last

// Stream and allocator of a device, made at first use. They live until the process ends: tensors in
// static storage may outlive any order of destruction.
struct State {
  cudaStream_t stream = nullptr;
  StreamAllocator* allocator = nullptr;
};

State& StateOf(int index) {
  static std::mutex mutex;
  static State states[kMaxDevices];
  RequireDevice(index);
  std::lock_guard lock(mutex);
  State& s = states[index];
  if (s.stream == nullptr) {
    Check(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  if (s.allocator == nullptr) s.allocator = new StreamAllocator(index);
  return s;
}

}  // namespace

bool IsBuilt() {
  return true;
}

namespace {

// Before the driver is first called. Kernels of ranks wait for each other: streams that shared one
// of the 8 queues to the device that are the default would make such a kernel hold up the one that
// another rank waits for (CUDA C++ Programming Guide, "CUDA Environment Variables").
void PrepareDriver() {
  static const int done = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  static_cast<void>(done);
}

}  // namespace

std::vector<DeviceInfo> Devices() {
  PrepareDriver();
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    Check(cudaGetDeviceProperties(&p, i), "cudaGetDeviceProperties");
    devices.push_back({p.name, p.major, p.minor, p.multiProcessorCount,
                       static_cast<std::int64_t>(p.totalGlobalMem),
                       static_cast<std::int64_t>(p.l2CacheSize)});
  }
  return devices;
}

std::string Describe() {
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  return DescribeVersions(runtime, driver);
}

int ComputeCapability() {
  return capability;
}

void RequireDevice(int index) {
  DeviceFacts facts;
  facts.index = index;
  PrepareDriver();
  cudaRuntimeGetVersion(&facts.runtime);
  cudaDriverGetVersion(&facts.driver);
  const cudaError_t status = cudaGetDeviceCount(&facts.count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    facts.error = cudaGetErrorString(status);
  } else if (index >= 0 && index < facts.count) {
    Check(cudaDeviceGetAttribute(&facts.major, cudaDevAttrComputeCapabilityMajor, index),
          "attribute");
    Check(cudaDeviceGetAttribute(&facts.minor, cudaDevAttrComputeCapabilityMinor, index),
          "attribute");
    // Its name costs a millisecond, and is asked for only where it will be shown.
    cudaDeviceProp p{};
    if (!DeviceRefusal(facts, CISTRON_CUDA_ARCHITECTURES).empty() &&
        cudaGetDeviceProperties(&p, index) == cudaSuccess) {
      facts.name = p.name;
    }
  }
  if (const std::string why = DeviceRefusal(facts, CISTRON_CUDA_ARCHITECTURES); !why.empty()) {
    CISTRON_THROW(kUnsupported, "{}", why);
  }
  CISTRON_CHECK(index < kMaxDevices, "cuda: device {} is beyond the {} that are supported", index,
                kMaxDevices);
  Check(cudaSetDevice(index), "cudaSetDevice");
  capability = 10 * facts.major + facts.minor;
  required = index;
}

void* AllocatePinned(std::size_t bytes) {
  // A thread of its own begins on device 0, where the call would make a context for another GPU's
  // process.
  cudaSetDevice(required);
  void* block = nullptr;
  if (cudaMallocHost(&block, bytes) == cudaSuccess) return block;
  cudaGetLastError();  // not sticky: forget it
  return nullptr;
}

Allocator& DeviceAllocator(int index) {
  return *StateOf(index).allocator;
}

Stream MainStream(int index) {
  return {{DeviceType::kCuda, index}, StateOf(index).stream};
}

HostMemory PinnedHostMemory() {
  // Blocks are aligned to pages.
  return {[](std::size_t, std::size_t bytes) { return AllocatePinned(bytes); },
          [](void* block) { cudaFreeHost(block); }};
}

void Copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) {
  if (bytes == 0) return;
  const bool to_host = to_device.type == DeviceType::kCpu;
  const bool from_host = from_device.type == DeviceType::kCpu;
  const cudaStream_t stream = StateOf((to_host ? from_device : to_device).index).stream;
  Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  if (to_host || from_host) Check(cudaStreamSynchronize(stream), "a copy between host and device");
}

void FillBytes(void* data, Device device, unsigned char value, std::size_t bytes) {
  if (bytes == 0) return;
  Check(cudaMemsetAsync(data, value, bytes, StateOf(device.index).stream), "cudaMemsetAsync");
}

Event::Event(Device device) : device_(device) {
  RequireDevice(device.index);
  cudaEvent_t event = nullptr;
  Check(cudaEventCreate(&event), "cudaEventCreate");
  handle_ = event;
}

Event::~Event() {
  if (handle_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(handle_));
}

Event::Event(Event&& other) noexcept
    : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}

void Event::Record() {
  Check(cudaEventRecord(static_cast<cudaEvent_t>(handle_), StateOf(device_.index).stream),
        "cudaEventRecord");
}

void Event::Wait() const {
  Check(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_)), "work on the device");
}

double Event::MillisecondsSince(const Event& earlier) const {
  float ms = 0;
  Check(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_)), "cudaEventSynchronize");
  Check(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(earlier.handle_),
                             static_cast<cudaEvent_t>(handle_)),
        "cudaEventElapsedTime");
  return static_cast<double>(ms);
}

void Synchronize(Device device) {
  Check(cudaStreamSynchronize(StateOf(device.index).stream), "work on the device");
}

}  // namespace cistron::cuda
