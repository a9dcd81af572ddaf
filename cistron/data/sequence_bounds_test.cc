// Bounds on the sequences of micro-batches: closed forms, and draws that try to exceed them.
#include "cistron/data/sequence_bounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"

namespace cistron::data {
namespace {

TEST(SequenceBounds, SumsOfLengths) {
  WindowLengthSums sums;
  EXPECT_EQ(sums.Lengths().longest, 0);
  sums.Add(10, 3);
  sums.Add(30, 1);
  const WindowLengths lengths = sums.Lengths();
  EXPECT_EQ(lengths.shortest, 10);
  EXPECT_EQ(lengths.longest, 30);
  EXPECT_EQ(lengths.mean, 15);
  EXPECT_EQ(lengths.variance, (3 * 25 + 225) / 4);
  EXPECT_THROW(sums.Add(0, 1), Error);
  EXPECT_THROW(sums.Add(5, 0), Error);
}

TEST(SequenceBounds, ClosedForms) {
  // Windows of one length: 7 whole ones and two parts of a row of 8.
  EXPECT_EQ(SequencesBound({100, 100, 100, 0}, 1, 800), 9);
  // The end of each of 4 rows may cut one more.
  EXPECT_EQ(SequencesBound({100, 100, 100, 0}, 4, 200), 12);
  // Longer than a row is none; one may be cut in the middle.
  EXPECT_EQ(SequencesBound({800, 800, 800, 0}, 1, 800), 2);
  // Never more than tokens, nor than what the shortest windows allow: 7 whole ones again.
  EXPECT_EQ(SequencesBound({1, 1000, 2, 500}, 1, 16), 16);
  EXPECT_EQ(SequencesBound({100, 1000, 101, 900}, 1, 800), 9);
  // k = 100 solves 10·k − 6·√(k·25) = 700.
  EXPECT_EQ(SequencesBound({1, 100, 10, 25}, 1, 700), 101);
  EXPECT_THROW(SequencesBound({}, 1, 16), Error);
}

// Windows one after another, cut at the ends of rows.
std::int64_t SequencesOf(const std::function<std::int64_t()>& draw, std::int64_t rows,
                         std::int64_t row_tokens, std::int64_t& left) {
  std::int64_t number = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t room = row_tokens; room > 0; ++number) {
      if (left == 0) left = draw();
      const std::int64_t piece = std::min(left, room);
      left -= piece;
      room -= piece;
    }
  }
  return number;
}

// Log-normal lengths as those of proteins, and nine of ten windows short: no micro-batch of 20,000
// has more, and a bound that is far too wide would cost time.
TEST(SequenceBounds, HoldForDraws) {
  const RandomStream random(1, "sequence bounds");
  for (const bool short_ones : {false, true}) {
    for (const std::int64_t rows : {1, 2, 16}) {
      const std::int64_t row_tokens = 8192 / rows;
      std::uint64_t i = 0;
      const auto draw = [&]() -> std::int64_t {
        if (short_ones) return random.Below(i++, 10) == 0 ? row_tokens : 10;
        const double length = 300 * std::exp(0.67 * random.Normal(i++));
        return std::clamp<std::int64_t>(static_cast<std::int64_t>(length), 20, row_tokens);
      };
      WindowLengthSums sums;
      for (int k = 0; k < 100'000; ++k) sums.Add(draw(), 1);
      const std::int64_t bound = SequencesBound(sums.Lengths(), rows, row_tokens);
      std::int64_t most = 0, left = 0;
      for (int k = 0; k < 20'000; ++k) {
        most = std::max(most, SequencesOf(draw, rows, row_tokens, left));
      }
      EXPECT_LE(most, bound) << short_ones << " " << rows;
      EXPECT_GE(most, bound / 4) << short_ones << " " << rows;
    }
  }
}

}  // namespace
}  // namespace cistron::data
