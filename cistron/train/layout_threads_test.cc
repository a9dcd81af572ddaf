// Ranks as threads with everything that goes on at once between them (token rows, weights gathered
// ahead, gradients reduced behind, sums, amax, a checkpoint that all of them write): small, for
// ThreadSanitizer. Each rank computes with one thread, since oneDNN's OpenMP runtime does not tell
// ThreadSanitizer of its barriers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cistron/base/threads.h"
#include "cistron/check/compare.h"
#include "cistron/io/checkpoint.h"
#include "cistron/testing/poison.h"
#include "cistron/train/layout_case.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

class LayoutThreads : public ::testing::Test {
 protected:
  LayoutThreads() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    SetNumThreads(1);
  }
  ~LayoutThreads() override {
    SetNumThreads(threads_);
    fs::remove_all(folder_);
  }

  const fs::path folder_ =
      fs::path(::testing::TempDir()) / fmt::format("layout-threads-{}", getpid());

 private:
  int threads_ = NumThreads();
};

LayoutCase Small() {
  LayoutCase c;
  c.config = TableConfig();
  c.steps = 2;
  c.rows = 8;
  return c;
}

// Two runs, since what races may still agree with itself once.
void ExpectSteady(const LayoutCase& c, const Layout& layout) {
  SCOPED_TRACE(layout.Name());
  const LayoutRun first = TrainLayout(c, layout), second = TrainLayout(c, layout);
  EXPECT_EQ(first.differences, std::vector<std::string>());
  const std::map<std::string, Tensor> again = QuantitiesOf(second);
  for (const auto& [name, t] : QuantitiesOf(first)) {
    EXPECT_TRUE(testing::Agrees(check::CompareBitwise(name, again.at(name), t)));
  }
}

TEST_F(LayoutThreads, ReplicatedAndSharded) {
  for (const Layout& layout : {Layout{1, 4, 0}, Layout{2, 2, 1, true}, Layout{4, 1, 1, true}}) {
    ExpectSteady(Small(), layout);
  }
}

TEST_F(LayoutThreads, RecomputedInEightBits) {
  LayoutCase c = Small();
  c.dtype = DType::kBF16;
  c.recompute = model::Recompute::kMoe;
  c.quantized_rows = true;
  c.recipe = quant::MXFP8BlockScaling{};
  ExpectSteady(c, {2, 2, 1, true});
  c.recipe = quant::Float8CurrentScaling{};
  ExpectSteady(c, {2, 2, 1});
}

TEST_F(LayoutThreads, SavedByAllAndResumedByOthers) {
  LayoutCase c = Small();
  c.save_to = folder_;
  TrainLayout(c, {2, 2, 0, true});
  c.save_to.clear();
  c.restore_from = io::NewestGoodCheckpoint(folder_).value();
  c.steps = 3;
  EXPECT_EQ(TrainLayout(c, {1, 4, 0}).differences, std::vector<std::string>());
}

}  // namespace
}  // namespace cistron::train
