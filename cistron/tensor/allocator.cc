#include "cistron/tensor/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/tensor/block_size.h"

// AddressSanitizer cannot see into a block that we keep or rounded up, unless it is told.
#if defined(__SANITIZE_ADDRESS__)
#define CISTRON_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CISTRON_ASAN 1
#endif
#endif
#ifdef CISTRON_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace cistron {
namespace {

// Makes [block, block + used) legal to touch and [block + used, block + size) an error.
void MarkUsed([[maybe_unused]] void* block, [[maybe_unused]] std::size_t used,
              [[maybe_unused]] std::size_t size) {
#ifdef CISTRON_ASAN
  ASAN_UNPOISON_MEMORY_REGION(block, used);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(block) + used, size - used);
#endif
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Size classes: eight steps a power of two, so at most 1/8 of a block is lost.
std::size_t SizeClass(std::size_t bytes) {
  if (bytes <= 512) return 512;
  const std::size_t step = std::bit_floor(bytes - 1) / 8;
  return (bytes + step - 1) / step * step;
}

HostMemory SystemMemory() {
  return {std::aligned_alloc, std::free};
}

class CachingCpuAllocator final : public Allocator {
 public:
  ~CachingCpuAllocator() override { ReleaseCache(); }

  void* Allocate(std::size_t bytes) override {
    const std::size_t size = SizeClass(bytes);
    std::lock_guard lock(mutex_);
    void* block = nullptr;
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      block = found->second.back();
      found->second.pop_back();
      stats_.cached_bytes -= static_cast<std::int64_t>(size);
    } else {
      block = NewBlock(size);
    }
    stats_.live_bytes += static_cast<std::int64_t>(size);
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
    MarkUsed(block, bytes, size);
    return block;
  }

  void Deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    const std::size_t size = SizeClass(bytes);
    std::lock_guard lock(mutex_);
    stats_.live_bytes -= static_cast<std::int64_t>(size);
    try {
      free_[size].push_back(pointer);
      MarkUsed(pointer, 0, size);
      stats_.cached_bytes += static_cast<std::int64_t>(size);
    } catch (...) {
      source_.release(pointer);  // no memory to remember the block: give it back
    }
  }

  Device device() const override { return {}; }

  void SetSource(const HostMemory& source) {
    std::lock_guard lock(mutex_);
    CISTRON_CHECK(stats_.live_bytes == 0,
                  "memory: its source cannot change while {} bytes are in use", stats_.live_bytes);
    ReleaseCache();
    source_ = source;
  }

  AllocatorStats Stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void ResetPeak() override {
    std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.live_bytes;
  }

 private:
  void* NewBlock(std::size_t size) {
    const std::size_t alignment = size >= kHugePage ? kHugePage : kAlignment;
    const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
    void* block = source_.allocate(alignment, rounded);
    if (block == nullptr) {
      ReleaseCache();
      block = source_.allocate(alignment, rounded);
    }
    if (block == nullptr) {
      CISTRON_THROW(kOutOfMemory, "memory: the system refused {} MiB; {} MiB are in use by tensors",
                    size >> 20, stats_.live_bytes >> 20);
    }
    if (size >= kHugePage) madvise(block, rounded, MADV_HUGEPAGE);  // a hint: failure is harmless
    ++stats_.allocations;
    return block;
  }

  void ReleaseCache() {
    for (auto& [size, blocks] : free_) {
      for (void* block : blocks) {
        MarkUsed(block, size, size);
        source_.release(block);
      }
      stats_.cached_bytes -= static_cast<std::int64_t>(size * blocks.size());
      blocks.clear();
    }
  }

  mutable std::mutex mutex_;
  HostMemory source_ = SystemMemory();
  std::map<std::size_t, std::vector<void*>> free_;
  AllocatorStats stats_;
};

}  // namespace

namespace {
CachingCpuAllocator& ProcessAllocator() {
  // Never destroyed: tensors with static lifetime may outlive any order of destruction.
  static auto* allocator = new CachingCpuAllocator();
  return *allocator;
}
}  // namespace

std::int64_t CpuBlockBytes(std::int64_t bytes) {
  return static_cast<std::int64_t>(SizeClass(static_cast<std::size_t>(bytes)));
}

Allocator& CpuAllocator() {
  return ProcessAllocator();
}

void SetHostMemory(const HostMemory& source) {
  ProcessAllocator().SetSource(source);
}

std::unique_ptr<Allocator> MakeCachingCpuAllocator() {
  return std::make_unique<CachingCpuAllocator>();
}

}  // namespace cistron
