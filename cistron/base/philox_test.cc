#include "cistron/base/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace cistron {
namespace {

// Known answers of Random123's test vectors (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, 0),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffffull),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822ull),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// FNV-1a's published answers.
TEST(Philox, HashKnownAnswers) {
  EXPECT_EQ(HashName(""), 0xcbf29ce484222325u);
  EXPECT_EQ(HashName("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(HashName("foobar"), 0x85944171f73967e8u);
}

// A weight's stream is fixed for ever: models drawn from a seed must not change between versions.
TEST(RandomStream, IsPinned) {
  const RandomStream weight(1234, "model.embed_tokens.weight");
  EXPECT_EQ(weight.Bits(0), 0x5957d0d1u);
  EXPECT_EQ(weight.Bits(5), 0xa99c46b9u);
  EXPECT_EQ(weight.Bits(std::uint64_t{1} << 40), 0xadb125d1u);
  const RandomStream sample(1234, "sample", 3, 77);
  EXPECT_EQ(sample.Bits(0), 0x62250396u);
  EXPECT_NEAR(weight.Normal(9), -0.1978308295442551,
              1e-14);  // log and cos may differ in the last bit
}

TEST(RandomStream, AnyOrderGivesTheSameNumbers) {
  const RandomStream stream(1, "order");
  std::vector<double> forward;
  for (std::uint64_t i = 0; i < 100; ++i) forward.push_back(stream.Normal(i));
  const RandomStream again(1, "order");
  for (std::uint64_t i = 100; i-- > 0;) EXPECT_EQ(again.Normal(i), forward[i]);
}

TEST(RandomStream, NamesSeedsAndNumbersMakeStreams) {
  std::set<std::uint32_t> first;
  first.insert(RandomStream(1, "a").Bits(0));
  first.insert(RandomStream(2, "a").Bits(0));
  first.insert(RandomStream(1, "b").Bits(0));
  first.insert(RandomStream(1, "a", 0).Bits(0));
  first.insert(RandomStream(1, "a", 1).Bits(0));
  first.insert(RandomStream(1, "a", 0, 1).Bits(0));
  first.insert(RandomStream(1, "a").Bits(1));
  EXPECT_EQ(first.size(), 7u);
}

TEST(RandomStream, WordsOfABlockAreAllUsed) {
  const RandomStream stream(1, "block");
  std::set<std::uint32_t> words;
  for (std::uint64_t i = 0; i < 10000; ++i) words.insert(stream.Bits(i));
  EXPECT_GE(words.size(), 9995u);  // a repeat among 10^4 of 2^32 words is rare
}

TEST(RandomStream, UniformStaysBelowOne) {
  const RandomStream stream(1, "uniform");
  double sum = 0;
  constexpr int kDraws = 20000;
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const float u = stream.Uniform(i);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
  }
  // Six standard errors of the mean of a uniform.
  EXPECT_NEAR(sum / kDraws, 0.5, 6 * std::sqrt(1.0 / 12 / kDraws));
}

TEST(RandomStream, NormalHasItsMoments) {
  const RandomStream stream(1, "normal");
  constexpr int kDraws = 20000;
  double sum = 0, squares = 0, neighbours = 0, last = 0;
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double z = stream.Normal(i);
    sum += z;
    squares += z * z;
    neighbours += z * last;
    last = z;
  }
  // Six standard errors each: 1/√n, √2/√n, 1/√n.
  const double se = 1 / std::sqrt(double{kDraws});
  EXPECT_NEAR(sum / kDraws, 0, 6 * se);
  EXPECT_NEAR(squares / kDraws, 1, 6 * std::sqrt(2.0) * se);
  EXPECT_NEAR(neighbours / kDraws, 0, 6 * se);
}

TEST(RandomStream, BelowCoversItsRangeEvenly) {
  const RandomStream stream(1, "below");
  std::vector<int> counts(7);
  constexpr int kDraws = 7000;
  for (std::uint64_t i = 0; i < kDraws; ++i) ++counts[stream.Below(i, 7)];
  for (const int count : counts) EXPECT_NEAR(count, 1000, 6 * std::sqrt(1000.0 * 6 / 7));
  EXPECT_EQ(stream.Below(3, 1), 0u);
  const std::uint64_t large = std::uint64_t{1} << 63;
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_LT(stream.Below(i, large), large);
}

}  // namespace
}  // namespace cistron
