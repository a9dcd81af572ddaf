// Memory of tensors and scratch buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cistron/tensor/device.h"

namespace cistron {

struct AllocatorStats {
  std::int64_t live_bytes = 0;    // handed out and not returned
  std::int64_t peak_bytes = 0;    // largest live_bytes since the last ResetPeak
  std::int64_t cached_bytes = 0;  // returned by users, kept for reuse
  std::int64_t allocations = 0;   // calls that went to the operating system or driver
};

// Blocks aligned to kAlignment; thread-safe. Contents are undefined.
class Allocator {
 public:
  static constexpr std::size_t kAlignment = 64;  // a cache line, and one AVX-512 vector

  virtual ~Allocator() = default;
  // Throws kOutOfMemory with the size and what is live.
  virtual void* Allocate(std::size_t bytes) = 0;
  // `bytes` is what was asked for.
  virtual void Deallocate(void* pointer, std::size_t bytes) noexcept = 0;
  virtual Device device() const = 0;
  virtual AllocatorStats Stats() const = 0;
  virtual void ResetPeak() = 0;
};

// Where the process's CPU allocator gets its blocks.
struct HostMemory {
  void* (*allocate)(std::size_t alignment, std::size_t bytes);  // null: there is none
  void (*release)(void* block);
};
// From now on, e.g. memory that a GPU reads by itself (cuda::PinnedHostMemory). Before the first
// tensor: throws kInvalidArgument while blocks are in use.
void SetHostMemory(const HostMemory& source);

// The process's CPU allocator: freed blocks are kept by size class and reused, because a fresh
// mapping costs a page fault for every 4 KiB at each step of training.
Allocator& CpuAllocator();

// A caching CPU allocator of its own, with its own statistics.
std::unique_ptr<Allocator> MakeCachingCpuAllocator();

}  // namespace cistron
