#include "cistron/tensor/allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "cistron/base/error.h"

namespace cistron {
namespace {

bool IsAligned(const void* p, std::size_t to) {
  return reinterpret_cast<std::uintptr_t>(p) % to == 0;
}

TEST(Allocator, EverySizeIsAlignedAndWritable) {
  const auto allocator = MakeCachingCpuAllocator();
  for (const std::size_t bytes : {0ul, 1ul, 63ul, 64ul, 511ul, 512ul, 513ul, 4097ul, 1000003ul,
                                  (2ul << 20) - 1, 2ul << 20, (2ul << 20) + 1, 5000000ul}) {
    void* p = allocator->Allocate(bytes);
    EXPECT_TRUE(IsAligned(p, Allocator::kAlignment)) << bytes;
    std::memset(p, 0xab, bytes);
    allocator->Deallocate(p, bytes);
  }
  EXPECT_EQ(allocator->Stats().live_bytes, 0);
}

TEST(Allocator, AReturnedBlockServesTheNextOfItsSize) {
  const auto allocator = MakeCachingCpuAllocator();
  void* first = allocator->Allocate(100000);
  allocator->Deallocate(first, 100000);
  EXPECT_GE(allocator->Stats().cached_bytes, 100000);
  void* second = allocator->Allocate(99990);  // the same size class
  EXPECT_EQ(first, second);
  EXPECT_EQ(allocator->Stats().allocations, 1);
  EXPECT_EQ(allocator->Stats().cached_bytes, 0);
  allocator->Deallocate(second, 99990);
}

TEST(Allocator, ABlockIsNeverHandedOutTwice) {
  const auto allocator = MakeCachingCpuAllocator();
  void* a = allocator->Allocate(5000);
  void* b = allocator->Allocate(5000);
  EXPECT_NE(a, b);
  allocator->Deallocate(a, 5000);
  allocator->Deallocate(b, 5000);
}

TEST(Allocator, PeakIsTheLargestLiveSum) {
  const auto allocator = MakeCachingCpuAllocator();
  void* a = allocator->Allocate(1 << 16);
  void* b = allocator->Allocate(1 << 16);
  const std::int64_t both = allocator->Stats().live_bytes;
  EXPECT_GE(both, 2 << 16);
  EXPECT_LE(both, (2 << 16) * 9 / 8);  // at most 1/8 is lost to size classes
  allocator->Deallocate(a, 1 << 16);
  EXPECT_EQ(allocator->Stats().peak_bytes, both);
  allocator->ResetPeak();
  EXPECT_EQ(allocator->Stats().peak_bytes, allocator->Stats().live_bytes);
  allocator->Deallocate(b, 1 << 16);
  EXPECT_EQ(allocator->Stats().live_bytes, 0);
}

TEST(Allocator, RefusalNamesTheSize) {
  const auto allocator = MakeCachingCpuAllocator();
  try {
    allocator->Allocate(std::size_t{1} << 60);
    FAIL() << "an exbibyte was granted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(e.message(), ::testing::HasSubstr(std::to_string(1ll << 40) + " MiB"));
  }
  EXPECT_EQ(allocator->Stats().live_bytes, 0);  // still usable, and nothing was counted
  allocator->Deallocate(allocator->Allocate(10), 10);
}

TEST(Allocator, ThreadsShareIt) {
  const auto allocator = MakeCachingCpuAllocator();
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&allocator, t] {
      for (std::size_t i = 0; i < 500; ++i) {
        const std::size_t bytes = 100 + 37 * (i % 50);
        void* p = allocator->Allocate(bytes);
        std::memset(p, t, bytes);
        const auto* c = static_cast<const unsigned char*>(p);
        for (std::size_t k = 0; k < bytes; ++k) EXPECT_EQ(c[k], t);
        allocator->Deallocate(p, bytes);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(allocator->Stats().live_bytes, 0);
}

}  // namespace
}  // namespace cistron
