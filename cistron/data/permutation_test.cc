#include "cistron/data/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/data/window_grid.h"

namespace cistron::data {
namespace {

std::vector<std::int64_t> Images(std::uint64_t key, std::int64_t n) {
  const KeyedPermutation permutation(key, n);
  std::vector<std::int64_t> images;
  for (std::int64_t i = 0; i < n; ++i) images.push_back(permutation(i));
  return images;
}

TEST(KeyedPermutation, EveryElementIsTheImageOfExactlyOne) {
  for (std::int64_t n = 1; n <= 300; ++n) {
    std::vector<int> seen(static_cast<std::size_t>(n));
    for (const std::int64_t image : Images(7, n)) {
      ASSERT_GE(image, 0);
      ASSERT_LT(image, n);
      ++seen[static_cast<std::size_t>(image)];
    }
    for (const int times : seen) ASSERT_EQ(times, 1) << "n = " << n;
  }
}

TEST(KeyedPermutation, KeysGiveOtherOrders) {
  EXPECT_NE(Images(1, 100), Images(2, 100));
  EXPECT_EQ(Images(1, 100), Images(1, 100));
}

TEST(KeyedPermutation, LargeDomains) {
  const std::int64_t n = (std::int64_t{1} << 40) + 12345;
  const KeyedPermutation permutation(3, n);
  std::int64_t largest = 0;
  for (std::int64_t i = 0; i < 1000; ++i) {
    const std::int64_t image = permutation(n - 1 - i);
    ASSERT_GE(image, 0);
    ASSERT_LT(image, n);
    largest = std::max(largest, image);
  }
  EXPECT_GT(largest, n / 2);
  EXPECT_THROW(KeyedPermutation(3, 0), Error);
  EXPECT_THROW(permutation(n), Error);
}

// All six orders of three elements occur about equally often over 6,000 keys: each count is
// binomial with mean 1,000 and deviation 28.9; six deviations are allowed.
TEST(KeyedPermutation, SmallDomainsAreUniformOverKeys) {
  int counts[9] = {};
  for (std::uint64_t key = 0; key < 6000; ++key) {
    const KeyedPermutation p(key * 0x9E3779B97F4A7C15u, 3);
    ++counts[p(0) * 3 + p(1)];
  }
  for (int a = 0; a < 3; ++a) {
    for (int b = 0; b < 3; ++b) {
      if (a == b) continue;
      EXPECT_LT(std::abs(counts[a * 3 + b] - 1000), 174) << a << b;
    }
  }
}

// The trap shuffle-window: an order that keeps neighbours near each other. For a true shuffle the
// mean distance of the images of neighbours is n/3 with a deviation near 0.24·n/√n; six are
// allowed.
TEST(Shuffle, ShuffleWindow) {
  const std::int64_t n = 10000;
  const std::vector<std::int64_t> images = Images(11, n);
  double distance = 0;
  for (std::size_t i = 1; i < images.size(); ++i) {
    distance += static_cast<double>(std::abs(images[i] - images[i - 1]));
  }
  const double mean = distance / static_cast<double>(n - 1);
  EXPECT_NEAR(mean, static_cast<double>(n) / 3, 6 * 0.24 * 100);
}

// For every small problem: full windows, inside the segment, every token covered whatever the
// phase.
TEST(WindowGrid, CoversEveryToken) {
  for (std::int64_t length = 1; length <= 7; ++length) {
    for (std::int64_t stride = 1; stride <= length; ++stride) {
      const WindowGrid grid{length, stride};
      for (std::int64_t n = 1; n <= 90; ++n) {
        for (std::int64_t phase = 0; phase <= grid.Slack(n); ++phase) {
          std::vector<bool> covered(static_cast<std::size_t>(n));
          for (std::int64_t i = 0; i < grid.Count(n); ++i) {
            const std::int64_t start = grid.Start(n, i, phase);
            ASSERT_GE(start, 0);
            ASSERT_LE(start + grid.Length(n), n);
            for (std::int64_t t = 0; t < grid.Length(n); ++t) {
              covered[static_cast<std::size_t>(start + t)] = true;
            }
          }
          for (const bool c : covered) ASSERT_TRUE(c) << n << " " << length << " " << stride;
        }
      }
    }
  }
}

TEST(WindowGrid, LongSegmentsShiftByAnyPhaseAtTheCostOfOneWindow) {
  const WindowGrid grid{512, 512};
  EXPECT_EQ(grid.Count(512), 1);
  EXPECT_EQ(grid.Count(513), 2);
  EXPECT_EQ(grid.Count(512 * 100), 101);
  EXPECT_EQ(grid.Slack(512 * 100), 512);
  EXPECT_GE(grid.Slack(4407691), 511);
  EXPECT_EQ(grid.Count(4407691), (4407691 - 512 + 511) / 512 + 2);
}

}  // namespace
}  // namespace cistron::data
