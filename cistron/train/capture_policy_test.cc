#include "cistron/train/capture_policy.h"

#include <gtest/gtest.h>

namespace cistron::train {
namespace {

using Action = CapturePolicy::Action;

TEST(CapturePolicy, ALayoutThatStaysIsCapturedOnceAndReplayed) {
  CapturePolicy policy;
  EXPECT_EQ(policy.Next({1, 2}, false), Action::kQueue);
  EXPECT_EQ(policy.Next({1, 2}, false), Action::kCapture);
  policy.CountCapture();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(policy.Next({1, 2}, true), Action::kReplay);
  EXPECT_FALSE(policy.changes());
  EXPECT_EQ(policy.captures(), 1);
}

// The graph of another layout does not serve; the next capture needs two steps again.
TEST(CapturePolicy, AnotherLayoutIsQueued) {
  CapturePolicy policy;
  policy.Next({1}, false);
  policy.Next({1}, false);
  policy.CountCapture();
  EXPECT_EQ(policy.Next({2}, true), Action::kQueue);
  EXPECT_EQ(policy.Next({1}, false), Action::kQueue);
  EXPECT_EQ(policy.Next({1}, false), Action::kCapture);
}

TEST(CapturePolicy, LayoutsThatDifferInEveryStepAreTold) {
  CapturePolicy policy;
  for (int i = 0; i < CapturePolicy::kToldChanges; ++i) {
    EXPECT_FALSE(policy.changes()) << i;
    EXPECT_EQ(policy.Next({i}, false), Action::kQueue);
  }
  EXPECT_TRUE(policy.changes());
  policy.Next({CapturePolicy::kToldChanges - 1}, false);
  EXPECT_FALSE(policy.changes());
}

TEST(CapturePolicy, CapturesEnd) {
  CapturePolicy policy;
  for (int i = 0; i < CapturePolicy::kMostCaptures; ++i) {
    EXPECT_FALSE(policy.exhausted());
    EXPECT_EQ(policy.Next({i}, false), Action::kQueue);
    EXPECT_EQ(policy.Next({i}, false), Action::kCapture);
    policy.CountCapture();
  }
  EXPECT_TRUE(policy.exhausted());
  policy.Next({-1}, false);
  EXPECT_EQ(policy.Next({-1}, false), Action::kQueue);
}

}  // namespace
}  // namespace cistron::train
