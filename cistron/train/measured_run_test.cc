// What a run tells for comparison with another: a checksum of its weights, also where they are not
// kept, its exchanges among the ops of a profile, the memory of the rank that took most.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "cistron/comm/inproc.h"
#include "cistron/io/file.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/bench_step.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Checksum(const TinyRun& tiny, const std::string& output) {
  return ReadSummary(RunPaths{tiny.path(output)}.results()).value().weights_checksum;
}

TEST(MeasuredRun, TheChecksumIsThatOfTheWeights) {
  TinyRun tiny("checksum");
  tiny.Train("first");
  tiny.Train("again");
  EXPECT_EQ(Checksum(tiny, "first").size(), 16u);
  EXPECT_EQ(Checksum(tiny, "again"), Checksum(tiny, "first"));
  tiny.Train("stopped", {}, 4);
  tiny.Train("stopped");
  EXPECT_EQ(Checksum(tiny, "stopped"), Checksum(tiny, "first"));
  // The smallest change: a rate that is off in its last bits.
  tiny.Train("other", {"optim.lr=0.01000001"});
  tiny.Train("seed", {"seed=2"});
  const std::set<std::string> different = {Checksum(tiny, "first"), Checksum(tiny, "other"),
                                           Checksum(tiny, "seed")};
  EXPECT_EQ(different.size(), 3u);
}

TEST(MeasuredRun, TheChecksumOfRanksIsTheSameInEveryRun) {
  TinyRun tiny("checksum-ranks");
  for (const char* shard : {"parallel.shard=none", "parallel.shard=full"}) {
    const std::vector<std::string> keys = {"parallel.dp=2", "parallel.ep=2", shard};
    tiny.TrainOnRanks(std::string("a") + shard, keys);
    tiny.TrainOnRanks(std::string("b") + shard, keys);
    EXPECT_EQ(Checksum(tiny, std::string("a") + shard), Checksum(tiny, std::string("b") + shard));
    std::vector<std::string> other = keys;
    other.push_back("seed=2");
    tiny.TrainOnRanks(std::string("c") + shard, other);
    EXPECT_NE(Checksum(tiny, std::string("a") + shard), Checksum(tiny, std::string("c") + shard));
  }
}

TEST(MeasuredRun, WithoutASaveAtItsEndARunLeavesFiguresAlone) {
  TinyRun tiny("at-end");
  tiny.Train("kept", {"checkpoint.every=0"});
  const auto outcome = tiny.Train("measured", {"checkpoint.every=0", "checkpoint.at_end=false"});
  EXPECT_TRUE(outcome.finished);
  EXPECT_THAT(tiny.printed(), HasSubstr("the model is not kept (checkpoint.at_end=false)"));
  const RunPaths run{tiny.path("measured")};
  EXPECT_FALSE(std::filesystem::exists(run.final_model()));
  EXPECT_FALSE(io::HasCheckpointDirectories(run.checkpoints()));
  EXPECT_EQ(Checksum(tiny, "measured"), Checksum(tiny, "kept"));
  EXPECT_EQ(tiny.Metrics("measured").size(), 10u);
  // Nothing to go on from: the same command measures again.
  tiny.Train("measured", {"checkpoint.every=0", "checkpoint.at_end=false"});
  EXPECT_EQ(Checksum(tiny, "measured"), Checksum(tiny, "kept"));
  // A stop saves all the same.
  EXPECT_FALSE(
      tiny.Train("stopped", {"checkpoint.every=0", "checkpoint.at_end=false"}, 4).finished);
  EXPECT_EQ(tiny.Newest("stopped").step(), 4);
  // On ranks, whose model comes from the checkpoint.
  tiny.TrainOnRanks("ranks", {"checkpoint.every=0", "checkpoint.at_end=false", "parallel.ep=2"});
  EXPECT_FALSE(std::filesystem::exists(RunPaths{tiny.path("ranks")}.final_model()));
  EXPECT_FALSE(io::HasCheckpointDirectories(RunPaths{tiny.path("ranks")}.checkpoints()));
}

// Every choice of an expert is a draw with probability 1/E; a token's are not independent of each
// other, which makes shares spread less than those of independent ones.
TEST(MeasuredRun, ForcedBalanceIsEvenAndTheSameOnEveryLayout) {
  TinyRun tiny("balance");
  const std::vector<std::string> even = {"model.moe_router_force_load_balancing=true"};
  tiny.Train("one", even);
  tiny.Train("again", even);
  tiny.Train("own");
  const auto one = tiny.Metrics("one"), own = tiny.Metrics("own");
  const double choices = 128 * 2, experts = 4;  // tokens of a step, of which each chooses two
  const double five_sigma = 5 * std::sqrt((1 / experts) * (1 - 1 / experts) / choices);
  double worst = 0, worst_own = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    for (std::size_t l = 0; l < one[i].expert_load.size(); ++l) {
      EXPECT_NE(one[i].expert_load[l], own[i].expert_load[l]) << "step " << i + 1;
      if (l > 0) {
        EXPECT_NE(one[i].expert_load[l], one[i].expert_load[0]) << "layers draw alike";
      }
      for (const double share : one[i].expert_load[l]) {
        worst = std::max(worst, std::abs(share - 1 / experts));
      }
      for (const double share : own[i].expert_load[l]) {
        worst_own = std::max(worst_own, std::abs(share - 1 / experts));
      }
    }
    if (i > 0) {
      EXPECT_NE(one[i].expert_load, one[0].expert_load) << "steps draw alike";
    }
  }
  EXPECT_LE(worst, five_sigma);
  EXPECT_GT(worst_own, five_sigma) << "the bound tells nothing";
  EXPECT_EQ(Checksum(tiny, "one"), Checksum(tiny, "again"));
  // The gate learns from the choices that were made for it, and recomputation makes them again.
  tiny.Train("recompute", {even[0], "recompute=layer"});
  EXPECT_EQ(Checksum(tiny, "recompute"), Checksum(tiny, "one"));
  tiny.TrainOnRanks("ranks", {even[0], "parallel.dp=2", "parallel.ep=2"});
  const auto ranks = tiny.Metrics("ranks");
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(ranks[i].expert_load, one[i].expert_load) << "step " << i + 1;
    // As in layouts_test.cc.
    EXPECT_LE(std::abs(ranks[i].loss - one[i].loss), 128 * 0x1p-24 * one[i].loss);
    EXPECT_LE(std::abs(ranks[i].grad_norm - one[i].grad_norm), 128 * 0x1p-24 * one[i].grad_norm);
  }
}

TEST(MeasuredRun, ExchangesAreOpsOfTheProfile) {
  TinyRun tiny("exchanges");
  const auto profile = [&](const std::string& output, std::vector<std::string> more) {
    more.insert(more.end(), {"train.steps=3", "profile=steps:2-3"});
    tiny.TrainOnRanks(output, more);
    return io::ReadFile(RunPaths{tiny.path(output)}.profile());
  };
  EXPECT_THAT(profile("ep", {"parallel.ep=2"}),
              ::testing::ContainsRegex("all_to_all +inproc +[0-9]"));
  EXPECT_THAT(profile("dp", {"parallel.dp=2"}),
              AllOf(HasSubstr("gemm"), Not(HasSubstr("all_to_all"))));
}

// Steps that are measured are steps of training: the norm of all ranks' gradients clips them.
TEST(MeasuredRun, ABenchOfRanksTrainsWhatOneTrains) {
  BenchShape shape = NamedBenchShape("dna_128");
  shape.model.num_hidden_layers = 2;
  shape.sequence = 64;
  shape.batch = 4;
  const BenchOptions options{.steps = 5, .warmup = 2};
  const double one = BenchTrainStep(ops::Context(), shape, options).loss;
  // An element of a gradient is a sum over the tokens of the batch.
  const double bound = 256 * 0x1p-24 * one;
  double two = 0;
  comm::RunRanks(2, [&](comm::Communicator& ranks) {
    const parallel::Mesh mesh(ranks, 1, 2, shape.model.num_local_experts);
    BenchShape half = shape;
    half.batch /= 2;
    BenchOptions on_mesh = options;
    on_mesh.mesh = &mesh;
    const double loss = BenchTrainStep(ops::Context(), half, on_mesh).loss;
    if (ranks.rank() == 0) two = loss;
  });
  EXPECT_NEAR(two, one, bound);
}

}  // namespace
}  // namespace cistron::train
