// Two runs that must have computed the same, bit for bit.
#pragma once

#include <gtest/gtest.h>

#include "cistron/check/compare.h"
#include "cistron/train/tiny_run.h"

namespace cistron::testing {

// The state in the newest checkpoint, and the loss and gradient norm of every step.
inline void ExpectSameRun(const train::TinyRun& tiny, const std::string& got,
                          const std::string& expected) {
  const auto a = tiny.Newest(got), b = tiny.Newest(expected);
  EXPECT_EQ(a.step(), b.step());
  ASSERT_EQ(a.names(), b.names());
  for (const std::string& name : b.names()) {
    const auto same = check::CompareBitwise(name, a.Read(name), b.Read(name));
    EXPECT_TRUE(same) << same.message;
  }
  const auto x = tiny.Metrics(got), y = tiny.Metrics(expected);
  ASSERT_EQ(x.size(), y.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(x[i].step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(x[i].loss, y[i].loss);
    EXPECT_EQ(x[i].grad_norm, y[i].grad_norm);
  }
}

}  // namespace cistron::testing
