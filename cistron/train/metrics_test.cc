#include "cistron/train/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "cistron/base/error.h"
#include "cistron/io/file.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() : folder_(fs::temp_directory_path() / fmt::format("cistron-metrics-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~MetricsTest() override { fs::remove_all(folder_); }
  fs::path file() const { return folder_ / "metrics.jsonl"; }

  static StepMetrics Step(std::int64_t step) {
    StepMetrics m;
    m.step = step;
    m.tokens_seen = step * 128;
    m.loss = 1.0 / static_cast<double>(step);
    m.aux_loss = 2.1;
    m.grad_norm = 0.1;
    m.lr = 1e-3;
    SetExpertLoad({{3, 1}, {2, 2}}, m);
    return m;
  }

 private:
  fs::path folder_;
};

TEST_F(MetricsTest, LinesReadBackExactly) {
  StepMetrics m = Step(3);
  m.mfu = 1.0 / 3;
  m.heldout = HeldoutMetrics{1.25, 1.25 / std::log(2.0), 77};
  EXPECT_EQ(ToJson(m).find("z_loss"), std::string::npos);  // not trained
  m.layer_aux_loss = {1.0 / 3, 1.5};
  m.z_loss = {0.7, 1e-30};
  const StepMetrics again = ParseStepMetrics(ToJson(m), "test");
  EXPECT_EQ(again.loss, m.loss);
  EXPECT_EQ(again.mfu, m.mfu);
  EXPECT_EQ(again.layer_aux_loss, m.layer_aux_loss);
  EXPECT_EQ(again.z_loss, m.z_loss);
  EXPECT_EQ(again.expert_load, m.expert_load);
  EXPECT_EQ(again.heldout->bits_per_base, m.heldout->bits_per_base);
  EXPECT_EQ(ToJson(again), ToJson(m));
  EXPECT_FALSE(ParseStepMetrics(ToJson(Step(1)), "test").heldout);
}

TEST_F(MetricsTest, LoadAndItsEntropy) {
  StepMetrics m;
  SetExpertLoad({{3, 1, 0, 0}, {2, 2, 2, 2}, {0, 0, 0, 0}}, m);
  EXPECT_EQ(m.expert_load[0], (std::vector<double>{0.75, 0.25, 0, 0}));
  const double entropy = -0.75 * std::log(0.75) - 0.25 * std::log(0.25);
  EXPECT_DOUBLE_EQ(m.load_entropy[0], entropy / std::log(4.0));
  EXPECT_DOUBLE_EQ(m.load_entropy[1], 1.0);
  EXPECT_EQ(m.load_entropy[2], 0.0);  // nothing was routed
  SetExpertLoad({{5}}, m);
  EXPECT_EQ(m.load_entropy[0], 1.0);  // one expert is as even as it can be
}

TEST_F(MetricsTest, WriterContinuesAfterAStepAndDropsWhatFollows) {
  {
    MetricsWriter writer(file(), 0);
    for (int step = 1; step <= 5; ++step) writer.Write(Step(step));
  }
  std::ofstream(file(), std::ios::app) << "{\"step\": 6, \"lo";  // a crash in mid-line
  EXPECT_EQ(ReadMetrics(file()).size(), 5u);
  {
    MetricsWriter writer(file(), 3);
    writer.Write(Step(4));
  }
  const auto metrics = ReadMetrics(file());
  ASSERT_EQ(metrics.size(), 4u);
  for (std::size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(metrics[i].step, static_cast<std::int64_t>(i) + 1);
  }
  { const MetricsWriter from_the_start(file(), 0); }
  EXPECT_TRUE(ReadMetrics(file()).empty());
}

TEST_F(MetricsTest, HeldoutFieldsAreAddedToTheLastLine) {
  const auto add = [](MetricsWriter& writer, int step) {
    StepMetrics m = Step(step);
    m.heldout = HeldoutMetrics{1.5, 2.1, 9};
    writer.AddHeldout(m);
  };
  const auto bare = [](int step) {
    StepMetrics m = Step(step);
    m.heldout.reset();
    return m;
  };
  {
    MetricsWriter writer(file(), 0);
    for (int step = 1; step <= 3; ++step) {
      writer.Write(bare(step));
      if (step == 2) add(writer, 2);
    }
    add(writer, 2);  // no longer the last
  }
  MetricsWriter writer(file(), 3);
  ASSERT_TRUE(writer.last());
  EXPECT_EQ(writer.last()->step, 3);
  add(writer, 3);
  writer.Write(bare(4));
  const auto metrics = ReadMetrics(file());
  ASSERT_EQ(metrics.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(metrics[i].step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(metrics[i].heldout.has_value(), i == 1 || i == 2);
  }
}

TEST_F(MetricsTest, DamagedLineIsAnErrorWithItsNumber) {
  std::ofstream(file()) << ToJson(Step(1)) << "\n{\"step\": 2}\n";
  try {
    ReadMetrics(file());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("metrics.jsonl:2"));
  }
}

TEST_F(MetricsTest, SummaryReadsBack) {
  EXPECT_FALSE(ReadSummary(file()));
  RunSummary summary{10, 1280, 5, 4, 2.5, "0123456789abcdef", HeldoutMetrics{1.5, 2.1, 9}};
  WriteSummary(file(), summary);
  const auto again = ReadSummary(file());
  ASSERT_TRUE(again);
  EXPECT_EQ(again->steps, 10);
  EXPECT_EQ(again->heldout->bits_per_base, 2.1);
  EXPECT_EQ(again->weights_checksum, "0123456789abcdef");
  std::ofstream(file()) << "{}";
  EXPECT_THROW(ReadSummary(file()), Error);
}

TEST(Metrics, IdleExpertsAreCountedOverTheLastSteps) {
  EXPECT_EQ(CountIdleExperts({}).all, 0);
  // Two layers of four experts: 1% of a layer's assignments is the limit.
  const ExpertLoad even = {{0.25, 0.25, 0.25, 0.25}, {0.25, 0.25, 0.25, 0.25}};
  const ExpertLoad uneven = {{0.5, 0.48, 0.011, 0.009}, {0.5, 0.5, 0, 0}};
  std::vector<ExpertLoad> steps(50, even);
  EXPECT_EQ(CountIdleExperts(steps).idle, 0);
  EXPECT_EQ(Describe(CountIdleExperts(steps)),
            "none of 8 experts is idle: each gets at least 1% of its layer's assignments (last 50 "
            "steps)");
  steps.insert(steps.end(), kIdleSteps, uneven);
  const IdleExperts idle = CountIdleExperts(steps);
  EXPECT_EQ(idle.idle, 3);
  EXPECT_EQ(idle.all, 8);
  EXPECT_EQ(Describe(idle),
            "3 of 8 experts are idle: each gets less than 1% of its layer's assignments (last 100 "
            "steps)");
}

}  // namespace
}  // namespace cistron::train
