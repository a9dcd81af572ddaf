#include "cistron/io/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace cistron::io {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Explain(const Shape& global, const std::vector<Box>& boxes) {
  return ExplainCover(global, boxes);
}

TEST(Box, Covers) {
  EXPECT_THAT(Explain({}, {{{}, {}}}), IsEmpty());
  EXPECT_THAT(Explain({4}, {{{0}, {4}}}), IsEmpty());
  EXPECT_THAT(Explain({4}, {{{3}, {1}}, {{0}, {3}}}), IsEmpty());
  EXPECT_THAT(Explain({4}, {{{0}, {4}}, {{2}, {0}}}), IsEmpty());  // an empty box holds nothing
  EXPECT_THAT(Explain({0, 5}, {}), IsEmpty());
  // A pinwheel: no cut through it is whole.
  EXPECT_THAT(Explain({3, 3}, {{{0, 0}, {1, 2}},
                               {{0, 2}, {2, 1}},
                               {{2, 1}, {1, 2}},
                               {{1, 0}, {2, 1}},
                               {{1, 1}, {1, 1}}}),
              IsEmpty());
}

TEST(Box, GapsNameTheFirstElement) {
  EXPECT_THAT(Explain({}, {}), HasSubstr("1 of 1"));
  EXPECT_THAT(Explain({4}, {}), AllOf(HasSubstr("4 of 4"), HasSubstr("[0]")));
  EXPECT_THAT(Explain({4}, {{{0}, {2}}, {{3}, {1}}}), AllOf(HasSubstr("1 of 4"), HasSubstr("[2]")));
  EXPECT_THAT(
      Explain({3, 3}, {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}}),
      HasSubstr("[1, 1]"));
  EXPECT_THAT(Explain({2, 2, 2}, {{{0, 0, 0}, {2, 2, 1}}, {{0, 0, 1}, {1, 2, 1}}}),
              AllOf(HasSubstr("2 of 8"), HasSubstr("[1, 0, 1]")));
}

TEST(Box, OverlapsAndOutside) {
  EXPECT_THAT(Explain({4}, {{{0}, {3}}, {{2}, {2}}}), HasSubstr("overlap"));
  // The volumes add up, but one part is held twice and one not at all.
  EXPECT_THAT(Explain({4}, {{{0}, {2}}, {{0}, {2}}}), HasSubstr("overlap"));
  EXPECT_THAT(Explain({4}, {{{1}, {4}}}), HasSubstr("outside"));
  Box negative = {{0}, {4}};
  negative.start[0] = -1;  // the constructor of Shape refuses it
  EXPECT_THAT(Explain({4}, {negative}), HasSubstr("outside"));
  EXPECT_THAT(Explain({4}, {{{5}, {0}}}), HasSubstr("outside"));
  EXPECT_THAT(Explain({4}, {{{0, 0}, {4, 1}}}), HasSubstr("outside"));
  EXPECT_THAT(Explain({4}, {{{INT64_MAX}, {INT64_MAX}}}), HasSubstr("outside"));
}

TEST(Box, CopiesWhatBothHold) {
  // Global [3, 4]; source is rows 1–2, columns 0–2; target rows 0–1, columns 1–3.
  const std::vector<char> source = {10, 11, 12, 20, 21, 22};
  std::vector<char> target(6, -1);
  CopyIntersection({{1, 0}, {2, 3}}, reinterpret_cast<const std::byte*>(source.data()),
                   {{0, 1}, {2, 3}}, reinterpret_cast<std::byte*>(target.data()), 1);
  EXPECT_EQ(target, (std::vector<char>{-1, -1, -1, 11, 12, -1}));
}

}  // namespace
}  // namespace cistron::io
