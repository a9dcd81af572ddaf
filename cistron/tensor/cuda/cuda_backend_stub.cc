// A build without CUDA.
#include "cistron/base/error.h"
#include "cistron/tensor/block_cache.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/tensor/cuda_graph.h"

namespace cistron::cuda {
namespace {

[[noreturn]] void ThrowNotBuilt() {
  CISTRON_THROW(kUnsupported,
                "cuda: this build has no CUDA backend; configure with `cmake --preset cuda` (CUDA "
                "toolkit 13.0), or use device=cpu");
}

}  // namespace

bool IsBuilt() {
  return false;
}
std::vector<DeviceInfo> Devices() {
  return {};
}
std::string Describe() {
  return "not in this build";
}
int ComputeCapability() {
  return 0;
}
void RequireDevice(int) {
  ThrowNotBuilt();
}
Allocator& DeviceAllocator(int) {
  ThrowNotBuilt();
}
Stream MainStream(int) {
  ThrowNotBuilt();
}
HostMemory PinnedHostMemory() {
  ThrowNotBuilt();
}
void Copy(void*, Device, const void*, Device, std::size_t) {
  ThrowNotBuilt();
}
void FillBytes(void*, Device, unsigned char, std::size_t) {
  ThrowNotBuilt();
}
Event::Event(Device) {
  ThrowNotBuilt();
}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;
void Event::Record() {}
void Event::Wait() const {}
double Event::MillisecondsSince(const Event&) const {
  return 0;
}
void Synchronize(Device) {
  ThrowNotBuilt();
}

MemoryPool::MemoryPool(Device) {
  ThrowNotBuilt();
}
MemoryPool::Scope::Scope(const MemoryPool&) {
  ThrowNotBuilt();
}
MemoryPool::Scope::~Scope() = default;
Graph::Graph(Device, const std::function<void()>&) {
  ThrowNotBuilt();
}
void Graph::Launch() {}
Allocator& PinnedAllocator() {
  ThrowNotBuilt();
}
void CopyLater(void*, const void*, Device, std::size_t) {
  ThrowNotBuilt();
}
Upload::Upload(Device) {
  ThrowNotBuilt();
}
void Upload::Start(void*, const void*, std::size_t) {}
void Upload::Join() {}
void Upload::Release() {}

}  // namespace cistron::cuda
