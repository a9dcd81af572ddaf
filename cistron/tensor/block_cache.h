// Memory kept for reuse: large segments from a source, cut into blocks.
//
// A block is the smallest free one that is large enough, the rest of it stays free; freed
// neighbours become one block again. Small requests have segments of their own, so that they do not
// cut up what large ones need. Which block a request gets depends on the calls alone, never on the
// addresses of segments: ranks that make the same calls get the same places. Knows nothing of
// devices and reads none of the memory it hands out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>

namespace cistron {

class BlockCache {
 public:
  static constexpr std::size_t kAlignment = 512;

  struct Source {
    std::function<void*(std::size_t bytes)> take;  // aligned to kAlignment; null: none is left
    std::function<void(void* segment)> give_back;
  };
  explicit BlockCache(Source source);
  // Every block must have been freed.
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // Null where the source has nothing left, even after Trim.
  void* Allocate(std::size_t bytes);
  void Free(void* block);
  // Gives back the segments of which nothing is in use.
  void Trim();

  std::int64_t segment_bytes() const { return segment_bytes_; }  // held, in use or not
  std::int64_t used_bytes() const { return used_bytes_; }        // handed out, rounded up
  std::int64_t takes() const { return takes_; }                  // calls of Source::take so far

 private:
  struct Block {
    char* data = nullptr;
    std::size_t size = 0;
    std::int64_t segment = 0;  // segments are counted as they are taken
    bool small = false, free = false;
    Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->size, a->segment, a->data) < std::tie(b->size, b->segment, b->data);
    }
  };
  using FreeBlocks = std::set<Block*, BySize>;

  Block* FindFree(std::size_t size, bool small);
  Block* TakeSegment(std::size_t size, bool small);
  void Cut(Block* block, std::size_t size);
  // Joins a free block with the one after it.
  void Absorb(Block* block, Block* next);

  Source source_;
  FreeBlocks free_[2];  // large, small
  std::unordered_map<void*, std::unique_ptr<Block>> blocks_;
  std::int64_t segment_bytes_ = 0, used_bytes_ = 0, takes_ = 0, segments_ = 0;
};

}  // namespace cistron
