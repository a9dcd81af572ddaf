// What the host makes of a step's numbers, and of buffers of rows in checkpoints.
#include "cistron/train/training_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "cistron/base/error.h"
#include "cistron/comm/inproc.h"
#include "cistron/model/tiny_mixtral.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/training_state.h"

namespace cistron::train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A step's block as the device leaves it: finite, with a loss of 2.
struct Block {
  model::MixtralConfig config = model::TinyConfig();
  StepSums step{ops::Context(), config};

  Block() {
    FillZero(step.block);
    *step.sums.weighted_nll.data<double>() = 20;
  }
  void SetStatus(double status, std::int64_t needed) {
    *step.sums.overflow.data<double>() = status;
    *step.rows_needed.data<std::int64_t>() = needed;
  }
  void SetNonFiniteTokens(std::int64_t layer, std::int64_t tokens) {
    step.sums.nonfinite_tokens.data<std::int64_t>()[layer] = tokens;
  }
  StepResult Read(bool& finite) const {
    return ReadStep(step.block, config, {.weight_sum = 10}, finite);
  }
};

TEST(ReadStep, AFiniteStepCounts) {
  const Block block;
  bool finite = false;
  const StepResult result = block.Read(finite);
  EXPECT_TRUE(finite);
  EXPECT_FALSE(result.overflow);
  EXPECT_EQ(result.loss, 2);
}

TEST(ReadStep, RowsThatDoNotFitAreMadeAgain) {
  Block block;
  block.SetStatus(kInfinity, 300);
  bool finite = true;
  const StepResult result = block.Read(finite);
  EXPECT_FALSE(finite);
  EXPECT_TRUE(result.overflow);
  EXPECT_EQ(result.rows_needed, 300);
}

// All tokens whose router logits are NaN choose the same experts, so the step overflows; larger
// buffers would not help.
TEST(ReadStep, RouterLogitsThatAreNotFiniteAreNoReasonForLargerBuffers) {
  Block block;
  block.SetStatus(kInfinity, 300);
  block.SetNonFiniteTokens(1, 32);
  bool finite = true;
  EXPECT_FALSE(block.Read(finite).overflow);
  EXPECT_FALSE(finite);
}

TEST(ReadStep, NorIsALossThatIsNotFinite) {
  for (const double loss : {kNaN, kInfinity, -kInfinity}) {
    Block block;
    block.SetStatus(kInfinity, 300);
    *block.step.sums.weighted_nll.data<double>() = loss;
    bool finite = true;
    EXPECT_FALSE(block.Read(finite).overflow) << loss;
    EXPECT_FALSE(finite);
  }
}

// Every rank reads the same sum; only those of one group know why.
TEST(ReadStep, ARankThatWaitedInVainIsKnownToAll) {
  for (const std::int64_t needed : {-1, 0, 300}) {
    Block block;
    block.SetStatus(kNaN, needed);
    block.SetNonFiniteTokens(0, 4);  // what was not received may be anything
    bool finite = true;
    const StepResult result = block.Read(finite);
    EXPECT_TRUE(result.overflow);
    EXPECT_EQ(result.rows_needed, -1);
    model::LocalMixtral m(ops::Context(), block.config, DType::kF32);
    try {
      PrepareAgain(m, 7, result);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_THAT(error.message(), ::testing::HasSubstr("step 7: rows of experts: a rank waited"));
    }
  }
}

// A run that is resumed has the buffers of the one that went on, under any layout.
TEST(TrainingState, KeepsTheSizeOfBuffersThatRowsHaveNeeded) {
  const auto root = std::filesystem::path(::testing::TempDir()) /
                    ("cistron_buffer_factor_" + std::to_string(getpid()));
  const auto on = [](comm::Communicator& world, std::int64_t dp, std::int64_t ep, double factor,
                     const auto& work) {
    const model::MixtralConfig config = model::TinyConfig();
    const ops::Context ctx;
    const parallel::Mesh mesh(world, dp, ep, config.num_local_experts);
    model::LocalMixtral m(ctx, config, DType::kF32, true, &mesh,
                          {.expert_exchange = {.buffer_factor = factor}});
    m.store.Initialize(model::kSeed, 0.2);
    optim::AdamWOptimizer optimizer(ctx, m.store, {}, m.statistics.get());
    work(m, optimizer);
  };
  constexpr double kGrown = 2.0 / 3 + 1.5;  // no short decimal
  std::filesystem::path saved;
  comm::RunRanks(2, [&](comm::Communicator& world) {
    on(world, 1, 2, 1.5, [&](model::LocalMixtral& m, optim::AdamWOptimizer& optimizer) {
      m.expert_ranks->RaiseBufferFactor(kGrown);
      const auto path = WriteSnapshot(root, TakeSnapshot(m, optimizer, {}, {}, {}), world);
      if (world.rank() == 0) saved = path;
    });
  });
  const auto restored = [&](double factor, std::int64_t dp, std::int64_t ep) {
    std::vector<double> factors(static_cast<std::size_t>(dp * ep));
    comm::RunRanks(static_cast<int>(dp * ep), [&](comm::Communicator& world) {
      on(world, dp, ep, factor, [&](model::LocalMixtral& m, optim::AdamWOptimizer& optimizer) {
        quant::ScalingStates scaling;
        RestoreTrainingState(saved, m, optimizer, scaling);
        factors[static_cast<std::size_t>(world.rank())] = m.expert_ranks->buffer_factor();
      });
    });
    return factors;
  };
  EXPECT_THAT(restored(1.5, 1, 2), ::testing::Each(kGrown));
  EXPECT_THAT(restored(1.5, 2, 2), ::testing::Each(kGrown));
  EXPECT_THAT(restored(3, 1, 2), ::testing::Each(3));  // what a configuration asks for beyond it
  std::filesystem::remove_all(root);
}

// Ranks whose group has grown, here in name, beside others that have no buffers: rank 0, whose
// factor a checkpoint keeps, is one of these.
TEST(PrepareAgain, RaisesTheFactorOfBuffersOnEveryRank) {
  constexpr double kGrown = 2.0 / 3 + 1.5;
  std::vector<double> factors(4);
  comm::RunRanks(4, [&](comm::Communicator& world) {
    const model::MixtralConfig config = model::TinyConfig();
    const parallel::Mesh mesh(world, 2, 2, config.num_local_experts);
    model::LocalMixtral m(ops::Context(), config, DType::kF32, true, &mesh,
                          {.expert_exchange = {.buffer_factor = 1.5}});
    if (world.rank() >= 2) m.expert_ranks->RaiseBufferFactor(kGrown);
    StepResult result;
    result.overflow = true;
    result.rows_needed = 300;
    PrepareAgain(m, 7, result);
    factors[static_cast<std::size_t>(world.rank())] = m.expert_ranks->buffer_factor();
  });
  EXPECT_THAT(factors, ::testing::Each(kGrown));
}

}  // namespace
}  // namespace cistron::train
