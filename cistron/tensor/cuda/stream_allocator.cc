#include "cistron/tensor/cuda/stream_allocator.h"

#include <algorithm>

#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::cuda {

BlockCache::Source DeviceSegments() {
  return {[](std::size_t bytes) -> void* {
            void* segment = nullptr;
            const cudaError_t status = cudaMalloc(&segment, bytes);
            if (status == cudaErrorMemoryAllocation) {
              cudaGetLastError();  // not sticky: forget it
              return nullptr;
            }
            Check(status, "cudaMalloc");
            return segment;
          },
          [](void* segment) { cudaFree(segment); }};
}

void TrimDeviceMemory(int index) {
  static_cast<StreamAllocator&>(DeviceAllocator(index)).Trim();
}

StreamAllocator::StreamAllocator(int index)
    : index_(index), common_(std::make_shared<BlockCache>(DeviceSegments())) {}

void* StreamAllocator::Allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<BlockCache>& blocks = pool_ ? pool_ : common_;
  const std::int64_t takes = blocks->takes();
  void* block = blocks->Allocate(bytes);
  if (block == nullptr && pool_) {
    common_->Trim();
    block = blocks->Allocate(bytes);
  }
  stats_.allocations += blocks->takes() - takes;
  if (block == nullptr) {
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    CISTRON_THROW(kOutOfMemory,
                  "memory: cuda:{} has no {} MiB left; tensors hold {} MiB (peak {} MiB) of its "
                  "{} MiB, {} MiB are free",
                  index_, bytes >> 20, stats_.live_bytes >> 20, stats_.peak_bytes >> 20,
                  total >> 20, free >> 20);
  }
  owners_[block] = blocks;
  stats_.live_bytes += static_cast<std::int64_t>(bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
  return block;
}

void StreamAllocator::Deallocate(void* pointer, std::size_t bytes) noexcept {
  if (pointer == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto owner = owners_.find(pointer);
  if (owner == owners_.end()) return;
  const std::shared_ptr<BlockCache> blocks = std::move(owner->second);
  owners_.erase(owner);
  blocks->Free(pointer);
  stats_.live_bytes -= static_cast<std::int64_t>(bytes);
}

AllocatorStats StreamAllocator::Stats() const {
  const std::lock_guard lock(mutex_);
  AllocatorStats stats = stats_;
  stats.cached_bytes = common_->segment_bytes() - common_->used_bytes();
  return stats;
}

void StreamAllocator::ResetPeak() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.live_bytes;
}

void StreamAllocator::Trim() {
  const std::lock_guard lock(mutex_);
  common_->Trim();
  if (pool_) pool_->Trim();
}

void StreamAllocator::UsePool(const std::shared_ptr<BlockCache>& pool) {
  const std::lock_guard lock(mutex_);
  CISTRON_CHECK(!pool || !pool_, "memory: cuda:{} takes from a pool already", index_);
  pool_ = pool;
}

}  // namespace cistron::cuda
