#include "cistron/comm/reduce.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace cistron::comm {
namespace {

template <class T>
std::vector<T> Reduced(ReduceOp reduce, const std::vector<std::vector<T>>& ranks) {
  std::vector<const std::byte*> sources;
  sources.reserve(ranks.size());
  for (const auto& values : ranks)
    sources.push_back(reinterpret_cast<const std::byte*>(values.data()));
  std::vector<T> out(ranks[0].size());
  ReduceInOrder(reduce, kDTypeOf<T>, sources, static_cast<std::int64_t>(out.size()),
                reinterpret_cast<std::byte*>(out.data()));
  return out;
}

TEST(Reduce, I64Wraps) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(Reduced<std::int64_t>(ReduceOp::kSum, {{kMax, -3}, {1, 5}}),
            (std::vector<std::int64_t>{kMin, 2}));
  EXPECT_EQ(Reduced<std::int64_t>(ReduceOp::kMax, {{kMax, -3}, {kMin, -5}, {0, -4}}),
            (std::vector<std::int64_t>{kMax, -3}));
  EXPECT_EQ(Reduced<std::int64_t>(ReduceOp::kMin, {{kMax, -3}, {kMin, -5}, {0, -4}}),
            (std::vector<std::int64_t>{kMin, -5}));
}

TEST(Reduce, F64IsNotNarrowed) {
  EXPECT_EQ(Reduced<double>(ReduceOp::kSum, {{1.0}, {0x1p-52}}),
            (std::vector<double>{1.0 + 0x1p-52}));
}

TEST(Reduce, SumsOverflowToInfinityAndOneSourceIsCopied) {
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(Reduced<float>(ReduceOp::kSum, {{kMax}, {kMax}})[0],
            std::numeric_limits<float>::infinity());
  EXPECT_EQ(Reduced<float>(ReduceOp::kMin, {{3.5f, -0.0f}}), (std::vector<float>{3.5f, -0.0f}));
}

TEST(Reduce, AnySourceMayBeTheResult) {
  for (std::size_t result = 0; result < 3; ++result) {
    std::vector<std::vector<float>> ranks(3, std::vector<float>(3000));
    std::vector<const std::byte*> sources;
    for (std::size_t r = 0; r < 3; ++r) {
      for (std::size_t i = 0; i < 3000; ++i) ranks[r][i] = static_cast<float>(i * (r + 1));
      sources.push_back(reinterpret_cast<const std::byte*>(ranks[r].data()));
    }
    ReduceInOrder(ReduceOp::kSum, DType::kF32, sources, 3000,
                  reinterpret_cast<std::byte*>(ranks[result].data()));
    for (std::size_t i = 0; i < 3000; ++i) ASSERT_EQ(ranks[result][i], static_cast<float>(6 * i));
  }
}

TEST(Reduce, OtherTypesAreRefused) {
  EXPECT_FALSE(CanReduce(DType::kE4M3));
  EXPECT_THROW(ReduceInOrder(ReduceOp::kSum, DType::kU8, {}, 0, nullptr), Error);
}

}  // namespace
}  // namespace cistron::comm
