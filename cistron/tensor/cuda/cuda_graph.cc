#include "cistron/tensor/cuda_graph.h"

#include <mutex>

#include "cistron/tensor/block_cache.h"
#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda/stream_allocator.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::cuda {
namespace {

cudaStream_t MainOf(Device device) {
  return static_cast<cudaStream_t>(MainStream(device.index).handle);
}

// `kDestroy`: cudaStreamDestroy and its like.
template <class T, cudaError_t (*kDestroy)(T)>
Handle Own(T made) {
  return {made, [](void* handle) { kDestroy(static_cast<T>(handle)); }};
}

Handle MakeStream() {
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return Own<cudaStream_t, cudaStreamDestroy>(stream);
}
Handle MakeEvent() {
  cudaEvent_t event = nullptr;
  Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return Own<cudaEvent_t, cudaEventDestroy>(event);
}

class PinnedBlocks final : public Allocator {
 public:
  void* Allocate(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    void* block = cache_.Allocate(bytes);
    if (block == nullptr) {
      CISTRON_THROW(kOutOfMemory, "memory: the system has no {} MiB of page-locked memory",
                    bytes >> 20);
    }
    stats_.live_bytes += static_cast<std::int64_t>(bytes);
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
    return block;
  }
  void Deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    const std::lock_guard lock(mutex_);
    cache_.Free(pointer);
    stats_.live_bytes -= static_cast<std::int64_t>(bytes);
  }
  Device device() const override { return {}; }
  AllocatorStats Stats() const override {
    const std::lock_guard lock(mutex_);
    AllocatorStats stats = stats_;
    stats.cached_bytes = cache_.segment_bytes() - cache_.used_bytes();
    stats.allocations = cache_.takes();
    return stats;
  }
  void ResetPeak() override {
    const std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.live_bytes;
  }

 private:
  mutable std::mutex mutex_;
  BlockCache cache_{{AllocatePinned, [](void* segment) { cudaFreeHost(segment); }}};
  AllocatorStats stats_;
};

}  // namespace

MemoryPool::MemoryPool(Device device)
    : device_(device), blocks_(std::make_shared<BlockCache>(DeviceSegments())) {
  RequireDevice(device.index);
}

MemoryPool::Scope::Scope(const MemoryPool& pool) : device_(pool.device_) {
  static_cast<StreamAllocator&>(DeviceAllocator(device_.index)).UsePool(pool.blocks_);
}

MemoryPool::Scope::~Scope() {
  static_cast<StreamAllocator&>(DeviceAllocator(device_.index)).UsePool(nullptr);
}

Graph::Graph(Device device, const std::function<void()>& work) : device_(device) {
  const cudaStream_t stream = MainOf(device);
  // Relaxed: memory may be taken from the driver on the way.
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();  // of a capture that was broken off: nothing has run
    throw;
  }
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  const Handle captured = Own<cudaGraph_t, cudaGraphDestroy>(graph);
  Check(ended, "cudaStreamEndCapture");
  std::size_t nodes = 0;
  cudaGraphGetNodes(graph, nullptr, &nodes);
  nodes_ = static_cast<std::int64_t>(nodes);
  cudaGraphExec_t exec = nullptr;
  Check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  exec_ = Own<cudaGraphExec_t, cudaGraphExecDestroy>(exec);
  Check(cudaGraphUpload(exec, stream), "cudaGraphUpload");
}

void Graph::Launch() {
  Check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(exec_.get()), MainOf(device_)),
        "cudaGraphLaunch");
}

Allocator& PinnedAllocator() {
  // Never destroyed: tensors with static lifetime may outlive any order of destruction.
  static auto* allocator = new PinnedBlocks();
  return *allocator;
}

void CopyLater(void* to, const void* from, Device device, std::size_t bytes) {
  Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, MainOf(device)), "cudaMemcpyAsync");
}

Upload::Upload(Device device) : device_(device) {
  RequireDevice(device.index);
  stream_ = MakeStream();
  copied_ = MakeEvent();
  released_ = MakeEvent();
}

void Upload::Start(void* to, const void* from, std::size_t bytes) {
  const auto stream = static_cast<cudaStream_t>(stream_.get());
  Check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(released_.get()), 0),
        "cudaStreamWaitEvent");
  Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  Check(cudaEventRecord(static_cast<cudaEvent_t>(copied_.get()), stream), "cudaEventRecord");
}

void Upload::Join() {
  Check(cudaStreamWaitEvent(MainOf(device_), static_cast<cudaEvent_t>(copied_.get()), 0),
        "cudaStreamWaitEvent");
}

void Upload::Release() {
  Check(cudaEventRecord(static_cast<cudaEvent_t>(released_.get()), MainOf(device_)),
        "cudaEventRecord");
}

}  // namespace cistron::cuda
