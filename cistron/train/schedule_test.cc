// The learning rate against values made by other software, and its edges.
#include "cistron/train/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cistron/base/error.h"
#include "cistron/check/bounds.h"
#include "cistron/io/safetensors.h"

namespace cistron::train {
namespace {

void CompareWithGolden(const std::string& name, const Schedule& schedule) {
  const io::SafetensorsFile file(std::string(CISTRON_SOURCE_DIR) +
                                 "/tests/golden/numerics2.safetensors");
  const Tensor golden = file.Read(name);
  const auto rates = golden.span<double>();
  ASSERT_GT(rates.size(), 0u);
  // The cosine, its argument and four operations are each rounded once or nearly so.
  const double bound = check::Gamma(8, DType::kF64) * schedule.peak;
  for (std::size_t i = 0; i < rates.size(); ++i) {
    EXPECT_NEAR(LearningRate(schedule, static_cast<std::int64_t>(i) + 1), rates[i], bound)
        << name << ", update " << i + 1;
  }
}

TEST(Schedule, GoldenWithoutWarmUp) {
  CompareWithGolden("schedule.warmup0.decay10.floor0.0.peak2.0", {2.0, 0, 10, 0.0});
}
TEST(Schedule, GoldenWithWarmUpAndFloor) {
  CompareWithGolden("schedule.warmup4.decay20.floor0.1.peak0.001", {0.001, 4, 20, 0.1});
}
TEST(Schedule, GoldenWarmUpEndsWithTheDecay) {
  CompareWithGolden("schedule.warmup5.decay5.floor0.5.peak1.0", {1.0, 5, 5, 0.5});
}

TEST(Schedule, FirstCaseThatAppliesWins) {
  // t = W = D: the warm-up's last update has the peak rate, the next the floor.
  const Schedule s{1.0, 5, 5, 0.5};
  EXPECT_EQ(LearningRate(s, 5), 1.0);
  EXPECT_EQ(LearningRate(s, 6), 0.5);
  EXPECT_EQ(LearningRate({3.0, 0, 0, 0.25}, 1), 0.75);
}

TEST(Schedule, RefusesWhatIsNoSchedule) {
  EXPECT_THROW(LearningRate({1.0, 6, 5, 0.0}, 1), Error);
  EXPECT_THROW(LearningRate({1.0, 0, 5, 0.0}, 0), Error);
}

}  // namespace
}  // namespace cistron::train
