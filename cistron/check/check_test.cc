#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cistron/check/compare.h"

namespace cistron::check {
namespace {

Tensor Of(const std::vector<float>& v) {
  return Tensor::FromSpan<float>({static_cast<std::int64_t>(v.size())}, v);
}

TEST(Compare, NanMatchesOnlyNan) {
  EXPECT_FALSE(Compare("x", Of({NAN}), Of({1.0f}), 1e9));
  EXPECT_FALSE(Compare("x", Of({1.0f}), Of({NAN}), 1e9));
  EXPECT_TRUE(Compare("x", Of({NAN}), Of({NAN}), 0));
}

}  // namespace
}  // namespace cistron::check
