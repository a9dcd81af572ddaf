// Where rows go, against a sort of every row; buffers and their growth.
#include "cistron/parallel/exchange_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "cistron/base/philox.h"

namespace cistron::parallel {
namespace {

using Counts = std::vector<std::int64_t>;

// One row: who sent it, for which expert, and its number among those.
struct Row {
  int source, expert;
  std::int64_t index;
};

// Every row of every rank, in the order of its row map.
std::vector<Row> AllRows(const ExchangePlan& plan) {
  std::vector<Row> rows;
  for (int s = 0; s < plan.ranks; ++s) {
    for (int e = 0; e < plan.experts; ++e) {
      for (std::int64_t i = 0; i < plan.Count(s, e); ++i) rows.push_back({s, e, i});
    }
  }
  return rows;
}

// The plan's places against rows that are sorted one by one.
void Check(const Counts& counts, int ranks, int experts) {
  const ExchangePlan plan{counts.data(), ranks, experts};
  std::vector<Row> rows = AllRows(plan);
  std::vector<std::int64_t> next(static_cast<std::size_t>(ranks));
  for (const Row& row : rows) {
    EXPECT_EQ(plan.RowAtSource(row.source, row.expert) + row.index,
              next[static_cast<std::size_t>(row.source)]++);
  }
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::tuple(a.expert, a.source) < std::tuple(b.expert, b.source);
  });
  std::fill(next.begin(), next.end(), 0);
  for (const Row& row : rows) {
    EXPECT_EQ(plan.RowAtOwner(row.source, row.expert) + row.index,
              next[static_cast<std::size_t>(plan.Owner(row.expert))]++);
  }
  for (int d = 0; d < ranks; ++d) {
    EXPECT_EQ(plan.Received(d), next[static_cast<std::size_t>(d)]) << "rank " << d;
  }
  EXPECT_EQ(plan.MostReceived(), *std::max_element(next.begin(), next.end()));
}

TEST(ExchangePlan, PutsEveryRowWhereSortingPutsIt) {
  for (const auto& [ranks, experts] : {std::pair{1, 3}, {2, 8}, {4, 4}, {3, 12}, {8, 16}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << experts << " experts");
    const auto n = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(experts);
    Check(Counts(n, 0), ranks, experts);
    Check(Counts(n, 3), ranks, experts);
    Counts one(n, 0);  // all rows to one expert of the last rank
    for (int s = 0; s < ranks; ++s) {
      one[static_cast<std::size_t>(s * experts + experts - 1)] = 7 + s;
    }
    Check(one, ranks, experts);
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const RandomStream random(seed, "counts");
      Counts ragged(n);
      for (std::size_t i = 0; i < n; ++i) {
        ragged[i] = random.Below(i, 3) == 0 ? 0 : static_cast<std::int64_t>(random.Below(n + i, 9));
      }
      Check(ragged, ranks, experts);
    }
  }
}

TEST(BufferRows, AreAFactorOfAnEvenShareAndNoMoreThanThereAre) {
  EXPECT_EQ(BufferRows(1.5, 8192, 2, 2), 24576);
  EXPECT_EQ(BufferRows(1.5, 3, 1, 4), 5);       // rounded up
  EXPECT_EQ(BufferRows(4, 8192, 2, 2), 32768);  // all rows of both ranks
  EXPECT_EQ(BufferRows(1e18, 8192, 2, 2), 32768);
  EXPECT_EQ(BufferRows(1.5, 0, 2, 2), 1);  // never an empty buffer
}

// A step that overflows is made again with buffers in which it fits, and one that has all rows of
// all ranks cannot overflow: growing ends.
TEST(BufferRows, GrowUntilTheStepFits) {
  for (const std::int64_t needed : {1, 5, 8, 4097, 16384}) {
    const std::int64_t rows = BufferRows(GrownFactor(needed, 2048 * 4), 2048, 4, 2);
    EXPECT_GE(rows, needed);
    EXPECT_LE(rows, 2048 * 4 * 2);
  }
}

}  // namespace
}  // namespace cistron::parallel
