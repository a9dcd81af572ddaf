#include "cistron/tensor/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "cistron/base/philox.h"

namespace cistron {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Segments of the host's memory, at most `limit` bytes of them.
class BlockCacheTest : public ::testing::Test {
 protected:
  BlockCache::Source Source(std::size_t limit = std::size_t{1} << 40) {
    return {[this, limit](std::size_t bytes) -> void* {
              if (held_ + bytes > limit) return nullptr;
              void* segment = std::aligned_alloc(BlockCache::kAlignment, bytes);
              segments_[segment] = bytes;
              held_ += bytes;
              return segment;
            },
            [this](void* segment) {
              held_ -= segments_.at(segment);
              segments_.erase(segment);
              std::free(segment);
            }};
  }
  std::map<void*, std::size_t> segments_;
  std::size_t held_ = 0;
};

TEST_F(BlockCacheTest, AFreedBlockServesTheNextRequest) {
  BlockCache cache(Source());
  void* a = cache.Allocate(3000);
  cache.Free(a);
  EXPECT_EQ(cache.Allocate(2900), a);
  EXPECT_EQ(cache.takes(), 1);
  cache.Free(a);
  EXPECT_EQ(cache.used_bytes(), 0);
}

TEST_F(BlockCacheTest, NeighboursBecomeOneBlock) {
  BlockCache cache(Source());
  std::vector<void*> blocks(10);
  for (void*& block : blocks) block = cache.Allocate(2 * kMiB);  // one segment
  EXPECT_EQ(cache.takes(), 1);
  for (const int i : {1, 3, 2, 0, 9, 8, 4, 6, 5, 7})
    cache.Free(blocks[static_cast<std::size_t>(i)]);
  void* all = cache.Allocate(20 * kMiB);
  EXPECT_EQ(all, blocks[0]);
  EXPECT_EQ(cache.takes(), 1);
  cache.Free(all);
}

TEST_F(BlockCacheTest, SmallRequestsDoNotCutLargeBlocks) {
  BlockCache cache(Source());
  void* large = cache.Allocate(20 * kMiB);
  cache.Free(large);
  void* small = cache.Allocate(100);
  void* again = cache.Allocate(20 * kMiB);
  EXPECT_EQ(again, large);
  EXPECT_EQ(cache.takes(), 2);
  cache.Free(again);
  cache.Free(small);
}

TEST_F(BlockCacheTest, TheSmallestFreeBlockIsTaken) {
  BlockCache cache(Source());
  void* a = cache.Allocate(40 * kMiB);
  void* b = cache.Allocate(30 * kMiB);
  cache.Free(a);
  cache.Free(b);
  EXPECT_EQ(cache.Allocate(29 * kMiB + kMiB / 2), b);
  cache.Free(b);
}

// Ranks keep rows for each other at places that they do not tell one another.
TEST_F(BlockCacheTest, PlacesDoNotDependOnAddresses) {
  std::vector<std::vector<std::size_t>> places;
  for (const bool ascending : {true, false}) {
    std::vector<char*> taken;
    BlockCache cache({[&](std::size_t) -> void* {
                        const std::size_t n = taken.size();
                        // Nobody reads them, so any address will do. Far apart: blocks are cut.
                        const std::uintptr_t at = (ascending ? n + 1 : 8 - n) << 32;
                        taken.push_back(
                            reinterpret_cast<char*>(at));  // NOLINT(performance-no-int-to-ptr)
                        return taken.back();
                      },
                      [](void*) {}});
    std::vector<void*> blocks;
    blocks.reserve(4);
    for (int i = 0; i < 4; ++i) blocks.push_back(cache.Allocate(40 * kMiB));
    for (void* block : blocks) cache.Free(block);
    blocks.clear();
    places.emplace_back();
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(cache.Allocate(40 * kMiB));
      places.back().push_back(static_cast<std::size_t>(
          std::find(taken.begin(), taken.end(), blocks.back()) - taken.begin()));
    }
    for (void* block : blocks) cache.Free(block);
  }
  EXPECT_EQ(places[0], (std::vector<std::size_t>{0, 1, 2, 3}));
  EXPECT_EQ(places[1], places[0]);
}

TEST_F(BlockCacheTest, FreeSegmentsAreGivenBackBeforeARefusal) {
  BlockCache cache(Source(64 * kMiB));
  void* a = cache.Allocate(40 * kMiB);
  cache.Free(a);
  void* b = cache.Allocate(60 * kMiB);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(held_, 60 * kMiB);
  EXPECT_EQ(cache.Allocate(10 * kMiB), nullptr);
  EXPECT_EQ(cache.used_bytes(), static_cast<std::int64_t>(60 * kMiB));
  cache.Free(b);
  cache.Trim();
  EXPECT_EQ(held_, 0u);
  EXPECT_EQ(cache.segment_bytes(), 0);
}

TEST_F(BlockCacheTest, WhatIsLeftWillDoWhereAWholeSegmentIsRefused) {
  BlockCache cache(Source(8 * kMiB));
  void* a = cache.Allocate(5 * kMiB);
  EXPECT_NE(a, nullptr);
  cache.Free(a);
}

// Blocks in use never overlap, are aligned, and keep what is written to them; in the end all of it
// is one free block a segment again.
TEST_F(BlockCacheTest, RandomRequests) {
  const RandomStream stream(20240611, "block_cache");
  struct Live {
    unsigned char* data;
    std::size_t bytes;
    unsigned char mark;
  };
  std::vector<Live> live;
  {
    BlockCache cache(Source());
    for (std::uint64_t i = 0; i < 4000; ++i) {
      if (live.size() > 40 || (!live.empty() && stream.Below(3 * i, 2) == 0)) {
        const std::size_t at = stream.Below(3 * i + 1, live.size());
        for (std::size_t k = 0; k < live[at].bytes; k += 509) {
          ASSERT_EQ(live[at].data[k], live[at].mark);
        }
        cache.Free(live[at].data);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      } else {
        const std::size_t bytes = std::size_t{1} << stream.Below(3 * i + 1, 22);
        auto* data =
            static_cast<unsigned char*>(cache.Allocate(bytes + stream.Below(3 * i + 2, bytes)));
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(data) % BlockCache::kAlignment, 0u);
        const auto mark = static_cast<unsigned char>(i);
        std::memset(data, mark, bytes);
        live.push_back({data, bytes, mark});
      }
    }
    for (const Live& block : live) cache.Free(block.data);
    EXPECT_EQ(cache.used_bytes(), 0);
    cache.Trim();
    EXPECT_EQ(cache.segment_bytes(), 0);
  }
  EXPECT_EQ(held_, 0u);
}

}  // namespace
}  // namespace cistron
