// Many ranks train what one rank trains: losses, gradient norms, weights and held-out loss for
// every layout, within the bound of sums in another order; checkpoints move between layouts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>

#include "cistron/check/compare.h"
#include "cistron/comm/inproc.h"
#include "cistron/model/hugging_face.h"
#include "cistron/train/model_source.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

struct Layout {
  std::int64_t dp, ep;
  bool sharded = false;

  std::vector<std::string> Keys() const {
    return {fmt::format("parallel.dp={}", dp), fmt::format("parallel.ep={}", ep),
            fmt::format("parallel.shard={}", sharded ? "full" : "none")};
  }
  std::string Name() const { return fmt::format("dp{}ep{}{}", dp, ep, sharded ? "sharded" : ""); }
};

void TrainOn(const TinyRun& tiny, const std::string& output, const Layout& layout,
             std::vector<std::string> more = {}) {
  for (const std::string& key : layout.Keys()) more.push_back(key);
  tiny.TrainOnRanks(output, more);
}

// Layouts add the same fp32 terms in another order: an element of a gradient is a sum over 128
// tokens, and ten updates carry what it differs by.
void ExpectClose(double got, double expected, const std::string& what) {
  constexpr double kUnit = 0x1p-24;
  EXPECT_LE(std::abs(got - expected), 128 * kUnit * std::abs(expected)) << what;
}

TEST(Layouts, EveryLayoutTrainsWhatOneRankTrains) {
  TinyRun tiny("layouts");
  TrainOn(tiny, "one", {1, 1});
  const auto one = tiny.Metrics("one");
  for (const Layout layout :
       {Layout{1, 2}, Layout{2, 1}, Layout{2, 2}, Layout{1, 4}, Layout{4, 1}, Layout{1, 2, true},
        Layout{2, 1, true}, Layout{2, 2, true}, Layout{4, 1, true}}) {
    TrainOn(tiny, layout.Name(), layout);
    const auto many = tiny.Metrics(layout.Name());
    ASSERT_EQ(many.size(), one.size());
    for (std::size_t i = 0; i < one.size(); ++i) {
      const std::string where = fmt::format("{} step {}", layout.Name(), i + 1);
      ExpectClose(many[i].loss, one[i].loss, where);
      ExpectClose(many[i].grad_norm, one[i].grad_norm, where);
      ExpectClose(many[i].aux_loss, one[i].aux_loss, where);
      EXPECT_EQ(many[i].expert_load, one[i].expert_load) << where;
      ASSERT_EQ(many[i].heldout.has_value(), one[i].heldout.has_value()) << where;
      if (one[i].heldout) ExpectClose(many[i].heldout->loss, one[i].heldout->loss, where);
    }
  }
}

// Files of one name differ, as on machines that do not share them: here a thread's own working
// directory is its machine.
TEST(Layouts, RanksThatReadOtherDataAreRefused) {
  TinyRun tiny("other_data");
  for (const char* machine : {"0", "1"}) {
    fs::create_directory(tiny.path(machine));
    fs::copy_file(tiny.path("tiny.fa"), tiny.path(machine) / "tiny.fa");
  }
  const LoadedConfig loaded =
      tiny.Load("run", {"data.train=tiny.fa", "parallel.ep=2", "train.steps=2"});
  const auto train = [&] {
    comm::RunRanks(2, [&](comm::Communicator& ranks) {
      ASSERT_EQ(unshare(CLONE_FS), 0);
      fs::current_path(tiny.path(std::to_string(ranks.rank())));
      TrainHooks hooks;
      const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out{std::tmpfile(), &std::fclose};
      hooks.out = out.get();
      Train(loaded, hooks, &ranks);
    });
  };
  EXPECT_NO_THROW(train());
  fs::remove_all(tiny.path("run"));
  std::ofstream(tiny.path("1") / "tiny.fa", std::ios::app) << ">third\nACGTACGT\n";
  EXPECT_THAT(train, ::testing::ThrowsMessage<Error>(
                         ::testing::HasSubstr("rank 1 reads other data than rank 0")));
  EXPECT_FALSE(fs::exists(tiny.path("run")));
}

// Trap reshard-loses-state: what one layout saved, another goes on with.
TEST(Layouts, ARunResumesUnderAnotherLayout) {
  TinyRun tiny("reshard");
  TrainOn(tiny, "whole", {1, 1});
  const auto whole = tiny.Metrics("whole");
  TrainOn(tiny, "moved", {2, 2}, {"train.steps=4", "optim.decay_end=10"});
  TrainOn(tiny, "moved", {4, 1, true},
          {"train.steps=6", "optim.decay_end=10", "run.on_exists=resume"});
  TrainOn(tiny, "moved", {1, 4}, {"train.steps=7", "optim.decay_end=10", "run.on_exists=resume"});
  TrainOn(tiny, "moved", {2, 2, true},
          {"train.steps=9", "optim.decay_end=10", "run.on_exists=resume"});
  TrainOn(tiny, "moved", {1, 1}, {"run.on_exists=resume"});
  const auto moved = tiny.Metrics("moved");
  ASSERT_EQ(moved.size(), whole.size());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    ExpectClose(moved[i].loss, whole[i].loss, fmt::format("step {}", i + 1));
    ExpectClose(moved[i].grad_norm, whole[i].grad_norm, fmt::format("step {}", i + 1));
  }
}

// The scales too: of experts, which lie on other ranks than before.
TEST(Layouts, DelayedScalingResumesUnderAnotherLayout) {
  TinyRun tiny("reshard-delayed");
  const std::vector<std::string> delayed = {"precision=fp8_delayed", "recipe.amax_history_len=4"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), delayed.begin(), delayed.end());
    return more;
  };
  TrainOn(tiny, "whole", {1, 1}, with({}));
  TrainOn(tiny, "moved", {2, 2}, with({"train.steps=5", "optim.decay_end=10"}));
  TrainOn(tiny, "moved", {1, 4}, with({"run.on_exists=resume"}));
  const auto whole = tiny.Metrics("whole"), moved = tiny.Metrics("moved");
  ASSERT_EQ(moved.size(), whole.size());
  // Codes of neighbouring values differ by an eighth; a scale that was lost would be one, and show.
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NEAR(moved[i].loss, whole[i].loss, 0.01 * whole[i].loss) << "step " << i + 1;
  }
}

// Trap export-one-rank: the model of many ranks is that which one rank exports from the same
// checkpoint, file by file, with every expert.
TEST(Layouts, ExportOneRank) {
  TinyRun tiny("export");
  for (const Layout layout : {Layout{1, 4}, Layout{2, 2}, Layout{2, 1}}) {
    const RunPaths run{tiny.path(layout.Name())};
    TrainOn(tiny, layout.Name(), layout, {"train.steps=3"});
    const LoadedConfig loaded = tiny.Load(layout.Name(), {"train.steps=3"});
    const model::MixtralConfig& config = loaded.config.model;
    model::LocalMixtral one(ops::Context(), config, DType::kF32);
    LoadWeights(FindModel(*io::NewestGoodCheckpoint(run.checkpoints())), one.store);
    const model::HuggingFaceModel exported = model::LoadHuggingFace(run.final_model());
    ASSERT_EQ(exported.tensors.size(), one.store.parameters().size());
    for (const io::NamedTensor& t : exported.tensors) {
      const auto* p = one.store.Find(t.name);
      ASSERT_NE(p, nullptr) << t.name;
      EXPECT_TRUE(check::CompareBitwise(t.name, t.tensor, p->master).ok) << t.name;
      if (!p->spec.is_expert) continue;
      EXPECT_EQ(t.tensor.dim(0), config.num_local_experts) << t.name;
      for (std::int64_t e = 1; e < t.tensor.dim(0); ++e) {
        EXPECT_FALSE(check::CompareBitwise("", t.tensor.Select(e), t.tensor.Select(0)).ok);
      }
    }
  }
}

}  // namespace
}  // namespace cistron::train
