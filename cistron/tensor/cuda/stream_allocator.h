// The allocator of a device, for the sources of the backend.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "cistron/tensor/allocator.h"
#include "cistron/tensor/block_cache.h"

namespace cistron::cuda {

// Segments from the driver, of the current device.
BlockCache::Source DeviceSegments();
// Page-locked memory of the host, by the device that was required last; null where there is none.
void* AllocatePinned(std::size_t bytes);

// Gives back what a device's allocator keeps for reuse and nobody uses.
void TrimDeviceMemory(int index);

// Blocks kept for reuse. All work of a device is in the order of its main stream, so a block that
// is freed may be given out at once: what is queued for its new owner runs after what is queued
// already.
class StreamAllocator final : public Allocator {
 public:
  explicit StreamAllocator(int index);

  void* Allocate(std::size_t bytes) override;
  // Errors are left to the next call that is checked: at exit the driver may be gone already.
  void Deallocate(void* pointer, std::size_t bytes) noexcept override;
  Device device() const override { return {DeviceType::kCuda, index_}; }
  AllocatorStats Stats() const override;
  void ResetPeak() override;
  void Trim();

  // Where blocks come from until the next call; null: the common cache. Throws kInvalidArgument
  // where a pool is in use already.
  void UsePool(const std::shared_ptr<BlockCache>& pool);

 private:
  int index_;
  mutable std::mutex mutex_;
  std::shared_ptr<BlockCache> common_, pool_;
  std::unordered_map<void*, std::shared_ptr<BlockCache>> owners_;
  AllocatorStats stats_;
};

}  // namespace cistron::cuda
