#include "cistron/tensor/block_cache.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cistron/base/error.h"

namespace cistron {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
// Requests up to this share segments of kSmallSegment.
constexpr std::size_t kSmall = kMiB;
constexpr std::size_t kSmallSegment = 2 * kMiB;
// Larger ones have segments of at least kLargeSegment, in steps of kSegmentStep.
constexpr std::size_t kLargeSegment = 20 * kMiB;
constexpr std::size_t kSegmentStep = 2 * kMiB;
// A rest of a large block below this is not worth a block.
constexpr std::size_t kLargeRest = kMiB;

std::size_t RoundUp(std::size_t bytes, std::size_t step) {
  return (std::max<std::size_t>(bytes, 1) + step - 1) / step * step;
}

}  // namespace

BlockCache::BlockCache(Source source) : source_(std::move(source)) {}

BlockCache::~BlockCache() {
  Trim();
}

BlockCache::Block* BlockCache::FindFree(std::size_t size, bool small) {
  Block wanted;
  wanted.size = size;
  const auto found = free_[small].lower_bound(&wanted);
  return found == free_[small].end() ? nullptr : *found;
}

BlockCache::Block* BlockCache::TakeSegment(std::size_t size, bool small) {
  const std::size_t bytes =
      small ? kSmallSegment : std::max(kLargeSegment, RoundUp(size, kSegmentStep));
  ++takes_;
  void* data = source_.take(bytes);
  std::size_t taken = bytes;
  if (data == nullptr && !small && RoundUp(size, kSegmentStep) < bytes) {
    taken = RoundUp(size, kSegmentStep);
    data = source_.take(taken);
  }
  if (data == nullptr) return nullptr;
  segment_bytes_ += static_cast<std::int64_t>(taken);
  auto block = std::make_unique<Block>();
  block->data = static_cast<char*>(data);
  block->size = taken;
  block->segment = segments_++;
  block->small = small;
  block->free = true;
  Block* raw = block.get();
  blocks_.emplace(data, std::move(block));
  free_[small].insert(raw);
  return raw;
}

void BlockCache::Cut(Block* block, std::size_t size) {
  const std::size_t rest = block->size - size;
  if (rest < (block->small ? kAlignment : kLargeRest)) return;
  auto tail = std::make_unique<Block>();
  tail->data = block->data + size;
  tail->size = rest;
  tail->segment = block->segment;
  tail->small = block->small;
  tail->free = true;
  tail->before = block;
  tail->after = block->after;
  if (tail->after != nullptr) tail->after->before = tail.get();
  block->after = tail.get();
  block->size = size;
  free_[tail->small].insert(tail.get());
  void* key = tail->data;
  blocks_.emplace(key, std::move(tail));
}

void* BlockCache::Allocate(std::size_t bytes) {
  const std::size_t size = RoundUp(bytes, kAlignment);
  const bool small = size <= kSmall;
  Block* block = FindFree(size, small);
  if (block == nullptr) block = TakeSegment(size, small);
  if (block == nullptr) {
    Trim();
    block = TakeSegment(size, small);
  }
  if (block == nullptr) return nullptr;
  free_[small].erase(block);
  block->free = false;
  Cut(block, size);
  used_bytes_ += static_cast<std::int64_t>(block->size);
  return block->data;
}

void BlockCache::Absorb(Block* block, Block* next) {
  block->size += next->size;
  block->after = next->after;
  if (block->after != nullptr) block->after->before = block;
  blocks_.erase(next->data);
}

void BlockCache::Free(void* data) {
  const auto found = blocks_.find(data);
  CISTRON_CHECK(found != blocks_.end() && !found->second->free,
                "BlockCache: a block is freed that is not in use");
  Block* block = found->second.get();
  used_bytes_ -= static_cast<std::int64_t>(block->size);
  block->free = true;
  FreeBlocks& free = free_[block->small];
  if (Block* next = block->after; next != nullptr && next->free) {
    free.erase(next);
    Absorb(block, next);
  }
  if (Block* before = block->before; before != nullptr && before->free) {
    free.erase(before);
    Absorb(before, block);
    block = before;
  }
  free.insert(block);
}

void BlockCache::Trim() {
  for (FreeBlocks& free : free_) {
    std::vector<Block*> whole;
    for (Block* block : free) {
      if (block->before == nullptr && block->after == nullptr) whole.push_back(block);
    }
    for (Block* block : whole) {
      free.erase(block);
      segment_bytes_ -= static_cast<std::int64_t>(block->size);
      void* data = block->data;
      blocks_.erase(data);
      source_.give_back(data);
    }
  }
}

}  // namespace cistron
