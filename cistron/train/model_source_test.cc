// Models on disk: what is found, what is refused, and that nothing gets lost on the way.
#include "cistron/train/model_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cistron/base/error.h"
#include "cistron/check/compare.h"
#include "cistron/train/tiny_run.h"
#include "cistron/train/training_state.h"

namespace cistron::train {
namespace {

using ::testing::HasSubstr;

class ModelSourceTest : public ::testing::Test {
 protected:
  model::MixtralConfig Config() const {
    model::MixtralConfig config = tiny_.Load("run").config.model;
    return config;
  }
  model::HuggingFaceModel Model() const {
    model::LocalMixtral m(ops::Context(), Config(), DType::kF32);
    m.store.Initialize(3, 0.1);
    model::HuggingFaceModel result{Config(), "float32", {}};
    for (const io::NamedTensor& t : ExportWeights(m.store)) {
      result.tensors.push_back({t.name, t.tensor.Clone()});
    }
    return result;
  }
  static std::string ErrorOf(const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& error) {
      return error.message();
    }
    return "no error";
  }
  std::string Path(const std::string& name) const { return tiny_.path(name).string(); }

  TinyRun tiny_{"model_source"};
};

void ExpectSameTensors(const model::HuggingFaceModel& got,
                       const model::HuggingFaceModel& expected) {
  ASSERT_EQ(got.tensors.size(), expected.tensors.size());
  for (std::size_t i = 0; i < got.tensors.size(); ++i) {
    ASSERT_EQ(got.tensors[i].name, expected.tensors[i].name);
    const auto same = check::CompareBitwise(got.tensors[i].name, got.tensors[i].tensor,
                                            expected.tensors[i].tensor);
    EXPECT_TRUE(same) << same.message;
  }
}

TEST_F(ModelSourceTest, CheckpointAndBothHuggingFaceLayoutsHoldTheSame) {
  const model::HuggingFaceModel m = Model();
  const auto checkpoint = SaveWeights(Path("checkpoint"), m);
  ExpectSameTensors(ReadModel(FindModel(checkpoint)), m);
  ExpectSameTensors(ReadModel(FindModel(Path("checkpoint"))), m);  // the folder of checkpoints
  for (const auto layout : {model::ExpertLayout::kPublished, model::ExpertLayout::kStacked}) {
    const std::string path = Path(fmt::format("hf{}", static_cast<int>(layout)));
    model::SaveHuggingFace(path, m.config, m.tensors, {.layout = layout});
    ExpectSameTensors(ReadModel(FindModel(path)), m);
  }
}

// Trap convert-drops-experts: a tensor that the model does not have, or lacks, is an error that
// names it; conversion never skips one.
TEST_F(ModelSourceTest, ConvertDropsExperts) {
  model::HuggingFaceModel m = Model();
  const io::NamedTensor last = m.tensors.back();
  m.tensors.pop_back();
  EXPECT_THAT(ErrorOf([&] { ReadModel(FindModel(SaveWeights(Path("lacks"), m))); }),
              HasSubstr("lacks the tensor weight/" + last.name));
  m.tensors.push_back(last);
  m.tensors.push_back({"model.layers.0.mlp.experts.extra_proj", last.tensor});
  EXPECT_THAT(ErrorOf([&] { ReadModel(FindModel(SaveWeights(Path("more"), m))); }),
              HasSubstr("extra_proj"));
  m.tensors.pop_back();
  // One expert fewer than the configuration says.
  for (io::NamedTensor& t : m.tensors) {
    if (t.name == "model.layers.1.mlp.experts.down_proj") {
      t.tensor = t.tensor.Slice(0, 0, t.tensor.dim(0) - 1);
    }
  }
  EXPECT_THAT(ErrorOf([&] { ReadModel(FindModel(SaveWeights(Path("fewer"), m))); }),
              HasSubstr("model.layers.1.mlp.experts.down_proj has shape [3, 16, 24]"));
}

TEST_F(ModelSourceTest, MastersOfABf16RunAreWhatIsRead) {
  tiny_.Train("run", {"precision=bf16"});
  const auto newest = io::NewestGoodCheckpoint(RunPaths{tiny_.path("run")}.checkpoints()).value();
  const model::HuggingFaceModel m = ReadModel(FindModel(newest));
  EXPECT_EQ(m.dtype, "bfloat16");
  const io::CheckpointReader reader(newest);
  for (const io::NamedTensor& t : m.tensors) {
    EXPECT_EQ(t.tensor.dtype(), DType::kF32);
    const auto same = check::CompareBitwise(t.name, t.tensor, reader.Read("master/" + t.name));
    EXPECT_TRUE(same) << same.message;
  }
  // Trap masters-from-quantised: a run that starts from them holds the exact values.
  tiny_.Train("next", {"precision=bf16", "optim.lr=0", "init.from=" + newest.string()});
  const auto next = tiny_.Newest("next");
  for (const io::NamedTensor& t : m.tensors) {
    const auto same = check::CompareBitwise(t.name, next.Read("master/" + t.name), t.tensor);
    EXPECT_TRUE(same) << same.message;
  }
}

// States of delayed scaling in a checkpoint are the run's; its weights are read without them.
TEST_F(ModelSourceTest, CheckpointsOfDelayedScalingAreRead) {
  tiny_.Train("delayed", {"precision=fp8_delayed", "train.steps=3"});
  const auto newest =
      io::NewestGoodCheckpoint(RunPaths{tiny_.path("delayed")}.checkpoints()).value();
  const io::CheckpointReader reader(newest);
  const auto names = reader.names();
  ASSERT_TRUE(std::any_of(names.begin(), names.end(),
                          [](const std::string& n) { return n.starts_with(kScalingPrefix); }));
  // What `convert` reads and writes.
  const model::HuggingFaceModel m = ReadModel(FindModel(newest));
  EXPECT_EQ(m.tensors.size(), model::MixtralParameters(m.config).size());
  for (const io::NamedTensor& t : m.tensors) {
    const auto same = check::CompareBitwise(t.name, t.tensor, reader.Read("master/" + t.name));
    EXPECT_TRUE(same) << same.message;
  }
  model::SaveHuggingFace(Path("delayed_hf"), m.config, m.tensors, {});
  ExpectSameTensors(ReadModel(FindModel(Path("delayed_hf"))), m);
  // What `eval` and `score` read.
  EXPECT_NO_THROW(LoadModel(ops::Context(), newest, DType::kF32));
  // A run of another recipe starts from it.
  tiny_.Train("after_delayed",
              {"precision=bf16", "optim.lr=0", "train.steps=2", "init.from=" + newest.string()});
  const auto next = tiny_.Newest("after_delayed");
  for (const io::NamedTensor& t : m.tensors) {
    const auto same = check::CompareBitwise(t.name, next.Read("master/" + t.name), t.tensor);
    EXPECT_TRUE(same) << same.message;
  }
}

TEST_F(ModelSourceTest, ARunStandsForItsFinalModelElseItsNewestCheckpoint) {
  tiny_.Train("run", {}, 5);
  EXPECT_EQ(FindModel(Path("run")).path.filename(), "step-00000005");
  tiny_.Train("run");
  EXPECT_EQ(FindModel(Path("run")).path, tiny_.path("run") / "final");
}

TEST_F(ModelSourceTest, AnotherModelIsRefused) {
  model::SaveHuggingFace(Path("hf"), Config(), Model().tensors, {});
  model::MixtralConfig wider = Config();
  wider.intermediate_size = 32;
  model::LocalMixtral m(ops::Context(), wider, DType::kF32);
  EXPECT_THAT(ErrorOf([&] { LoadWeights(FindModel(Path("hf")), m.store); }), HasSubstr("shape"));
  EXPECT_THAT(ErrorOf([&] { FindModel(Path("nothing")); }), HasSubstr("no such directory"));
  std::filesystem::create_directories(Path("bare"));
  EXPECT_THAT(ErrorOf([&] { FindModel(Path("bare")); }), HasSubstr("config.json"));
}

}  // namespace
}  // namespace cistron::train
