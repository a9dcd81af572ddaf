#include "cistron/testing/guarded_allocator.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "cistron/base/error.h"

namespace cistron::testing {
namespace {

// Two vectors wide, so that a vector store that starts inside the block cannot jump over the guard.
constexpr std::size_t kGuardBytes = 2 * Allocator::kAlignment;
constexpr std::byte kPoison{0xff};

// Byte i of a guard: little-endian 0x7FF5 again and again.
constexpr std::byte GuardByte(std::size_t i) {
  return (i & 1) ? std::byte{0x7f} : std::byte{0xf5};
}

void WriteGuard(std::byte* begin) {
  for (std::size_t i = 0; i < kGuardBytes; ++i) begin[i] = GuardByte(i);
}

// Offset of the first byte that is not the guard's.
std::optional<std::size_t> FirstDamage(const std::byte* begin) {
  for (std::size_t i = 0; i < kGuardBytes; ++i) {
    if (begin[i] != GuardByte(i)) return i;
  }
  return std::nullopt;
}

std::optional<std::size_t> LastDamage(const std::byte* begin) {
  for (std::size_t i = kGuardBytes; i-- > 0;) {
    if (begin[i] != GuardByte(i)) return i;
  }
  return std::nullopt;
}

// Of a block with its guards.
std::size_t BlockBytes(std::size_t payload) {
  const std::size_t total = payload + 2 * kGuardBytes;
  return (total + Allocator::kAlignment - 1) / Allocator::kAlignment * Allocator::kAlignment;
}

}  // namespace

GuardedAllocator::~GuardedAllocator() {
  for (const std::string& violation : TakeViolations()) ADD_FAILURE() << violation;
  for (auto& [payload, block] : blocks_) {
    if (block.live) {
      ADD_FAILURE() << "a block of " << block.bytes << " bytes outlives its GuardedAllocator";
    } else {
      CpuAllocator().Deallocate(payload - kGuardBytes, BlockBytes(block.bytes));
    }
  }
}

void* GuardedAllocator::Allocate(std::size_t bytes) {
  auto* base = static_cast<std::byte*>(CpuAllocator().Allocate(BlockBytes(bytes)));
  std::byte* payload = base + kGuardBytes;
  WriteGuard(base);
  std::fill_n(payload, bytes, kPoison);
  WriteGuard(payload + bytes);
  std::lock_guard lock(mutex_);
  blocks_[payload] = {bytes, true};
  stats_.live_bytes += static_cast<std::int64_t>(bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
  ++stats_.allocations;
  return payload;
}

void GuardedAllocator::Deallocate(void* pointer, std::size_t bytes) noexcept {
  if (pointer == nullptr) return;
  std::lock_guard lock(mutex_);
  auto found = blocks_.find(static_cast<std::byte*>(pointer));
  if (found == blocks_.end() || !found->second.live) {
    violations_.push_back(
        fmt::format("a block of {} bytes was returned that is not in use here", bytes));
    return;
  }
  Block& block = found->second;
  if (block.bytes != bytes) {
    violations_.push_back(
        fmt::format("a block of {} bytes was returned as one of {}", block.bytes, bytes));
  }
  CheckBlock(found->first, block);
  block.live = false;
  WriteGuard(found->first - kGuardBytes);
  std::fill_n(found->first, block.bytes, kPoison);
  WriteGuard(found->first + block.bytes);
  stats_.live_bytes -= static_cast<std::int64_t>(block.bytes);
}

void GuardedAllocator::CheckBlock(const std::byte* payload, const Block& block) {
  const char* state = block.live ? "" : "returned ";
  if (const auto i = LastDamage(payload - kGuardBytes)) {
    violations_.push_back(fmt::format("{} bytes before a {}block of {} bytes were overwritten",
                                      kGuardBytes - *i, state, block.bytes));
  }
  if (const auto i = FirstDamage(payload + block.bytes)) {
    violations_.push_back(fmt::format("byte {} beyond a {}block of {} bytes was overwritten", *i,
                                      state, block.bytes));
  }
  if (block.live) return;
  const std::byte* end = payload + block.bytes;
  const std::byte* damage = std::find_if(payload, end, [](std::byte b) { return b != kPoison; });
  if (damage != end) {
    violations_.push_back(fmt::format("byte {} of a block of {} bytes was written after its return",
                                      damage - payload, block.bytes));
  }
}

AllocatorStats GuardedAllocator::Stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void GuardedAllocator::ResetPeak() {
  std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.live_bytes;
}

std::vector<std::string> GuardedAllocator::TakeViolations() {
  std::lock_guard lock(mutex_);
  for (auto& [payload, block] : blocks_) {
    CheckBlock(payload, block);
    // Reported once: the guards are whole again.
    WriteGuard(payload - kGuardBytes);
    WriteGuard(payload + block.bytes);
    if (!block.live) std::fill_n(payload, block.bytes, kPoison);
  }
  return std::exchange(violations_, {});
}

}  // namespace cistron::testing
