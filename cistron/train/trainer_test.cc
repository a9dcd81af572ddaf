// Whole runs of a tiny model: resuming, accumulation, warm starts, refusals.
#include "cistron/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>

#include "cistron/base/error.h"
#include "cistron/check/compare.h"
#include "cistron/io/file.h"
#include "cistron/model/hugging_face.h"
#include "cistron/train/model_source.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

template <class F>
std::string ErrorOf(F&& f, ErrorCode code) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.message();
    return error.message();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// Every tensor and the state of two checkpoints, bit for bit.
void ExpectSameCheckpoint(const io::CheckpointReader& got, const io::CheckpointReader& expected) {
  EXPECT_EQ(got.step(), expected.step());
  ASSERT_EQ(got.names(), expected.names());
  for (const std::string& name : expected.names()) {
    const auto same = check::CompareBitwise(name, got.Read(name), expected.Read(name));
    EXPECT_TRUE(same) << same.message;
  }
}

// What the run computed, step by step; times and memory are not part of it.
void ExpectSameMetrics(const std::vector<StepMetrics>& got,
                       const std::vector<StepMetrics>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(got[i].step, expected[i].step);
    EXPECT_EQ(got[i].loss, expected[i].loss);
    EXPECT_EQ(got[i].aux_loss, expected[i].aux_loss);
    EXPECT_EQ(got[i].layer_aux_loss, expected[i].layer_aux_loss);
    EXPECT_EQ(got[i].z_loss, expected[i].z_loss);
    EXPECT_EQ(got[i].grad_norm, expected[i].grad_norm);
    EXPECT_EQ(got[i].lr, expected[i].lr);
    EXPECT_EQ(got[i].expert_load, expected[i].expert_load);
    ASSERT_EQ(got[i].heldout.has_value(), expected[i].heldout.has_value());
    if (got[i].heldout) {
      EXPECT_EQ(got[i].heldout->loss, expected[i].heldout->loss);
      EXPECT_EQ(got[i].heldout->bases, expected[i].heldout->bases);
    }
  }
}

void ResumeAtEveryStep(const std::string& precision) {
  TinyRun tiny("resume-" + precision);
  const std::vector<std::string> keys = {"precision=" + precision};
  ASSERT_TRUE(tiny.Train("whole", keys).finished);
  const auto expected = tiny.Metrics("whole");
  ASSERT_EQ(expected.size(), 10u);
  for (int stop = 1; stop < 10; ++stop) {
    SCOPED_TRACE(stop);
    const std::string run = fmt::format("stopped{}", stop);
    const TrainOutcome outcome = tiny.Train(run, keys, stop);
    EXPECT_FALSE(outcome.finished);
    EXPECT_EQ(outcome.steps, stop);
    EXPECT_THAT(tiny.printed(), HasSubstr("as asked"));
    ASSERT_TRUE(tiny.Train(run, keys).finished);
    ExpectSameMetrics(tiny.Metrics(run), expected);
    ExpectSameCheckpoint(tiny.Newest(run), tiny.Newest("whole"));
  }
}
TEST(Resume, EqualsAnUninterruptedRunAtEveryStepFp32) {
  ResumeAtEveryStep("fp32");
}
TEST(Resume, EqualsAnUninterruptedRunAtEveryStepBf16) {
  ResumeAtEveryStep("bf16");
}
TEST(Resume, EqualsAnUninterruptedRunAtEveryStepMxfp8) {
  ResumeAtEveryStep("mxfp8");
}
// Trap fp8-resume: scales and amax histories are state: the run would go on from scales of 1
// without them.
TEST(Resume, Fp8ResumeEqualsAnUninterruptedRunAtEveryStep) {
  ResumeAtEveryStep("fp8_delayed");
}

// Trap stream-restarts: the data position is state. Without it the second half would read the
// first batches again, whose losses are known.
TEST(Resume, StreamRestarts) {
  TinyRun tiny("stream");
  const std::vector<std::string> frozen = {"optim.lr=0"};  // losses tell the batches apart
  tiny.Train("whole", frozen);
  const auto whole = tiny.Metrics("whole");
  EXPECT_NE(whole[0].loss, whole[5].loss);
  tiny.Train("stopped", frozen, 5);
  tiny.Train("stopped", frozen);
  EXPECT_EQ(tiny.Metrics("stopped")[5].loss, whole[5].loss);
}

// A process that was killed leaves metrics beyond its last checkpoint, and half a line.
TEST(Resume, MetricsHoldNoStepTwice) {
  TinyRun tiny("metrics");
  tiny.Train("whole");
  tiny.Train("killed", {}, 4);
  const RunPaths killed{tiny.path("killed")};
  fs::remove_all(killed.checkpoints() / "step-00000004");  // step 3 is the newest now
  std::ofstream(killed.metrics(), std::ios::app) << "{\"step\": 5, \"lo";
  tiny.Train("killed");
  ExpectSameMetrics(tiny.Metrics("killed"), tiny.Metrics("whole"));
}

TEST(Resume, AFinishedRunIsLeftAlone) {
  TinyRun tiny("finished");
  const auto first = tiny.Train("run");
  const auto again = tiny.Train("run");
  EXPECT_THAT(tiny.printed(), HasSubstr("complete; nothing was done"));
  EXPECT_TRUE(again.finished);
  EXPECT_EQ(again.heldout->loss, first.heldout->loss);
}

TEST(Resume, KilledBeforeItsEndIsFinished) {
  TinyRun tiny("unfinished");
  tiny.Train("run");
  const RunPaths run{tiny.path("run")};
  fs::remove(run.results());
  fs::remove_all(run.final_model());
  ASSERT_TRUE(tiny.Train("run").finished);
  EXPECT_TRUE(fs::exists(run.final_model() / "config.json"));
  EXPECT_TRUE(ReadSummary(run.results())->heldout);
}

TEST(Resume, ADamagedCheckpointIsPassedOver) {
  TinyRun tiny("damaged");
  tiny.Train("whole");
  tiny.Train("run", {}, 7);
  const auto newest = RunPaths{tiny.path("run")}.checkpoints() / "step-00000007";
  for (const auto& file : fs::directory_iterator(newest)) {
    if (file.path().extension() != ".safetensors") continue;
    std::fstream f(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    f.seekg(-8, std::ios::end);
    const char flipped = static_cast<char>(f.get() ^ 1);
    f.seekp(-8, std::ios::end);
    f.put(flipped);
  }
  tiny.Train("run");
  EXPECT_THAT(tiny.printed(), HasSubstr("step-00000006"));
  ExpectSameCheckpoint(tiny.Newest("run"), tiny.Newest("whole"));
}

TEST(Resume, CheckpointsThatAreAllDamagedAreNotAnEmptyRun) {
  TinyRun tiny("lost");
  tiny.Train("run", {}, 4);
  const auto checkpoints = RunPaths{tiny.path("run")}.checkpoints();
  for (const auto& entry : fs::directory_iterator(checkpoints)) {
    fs::remove(entry.path() / "manifest.json");
  }
  EXPECT_THAT(ErrorOf([&] { tiny.Train("run"); }, ErrorCode::kBadInput),
              AllOf(HasSubstr(checkpoints.string()), HasSubstr("run.on_exists=new")));
  EXPECT_EQ(tiny.Metrics("run").size(), 4u);
  EXPECT_TRUE(tiny.Train("run", {"run.on_exists=new"}).finished);
}

TEST(Resume, AStopInAnEvaluationComesAfterTheCheckpointAndTheEvaluationIsMadeUpFor) {
  TinyRun tiny("evaluation");
  tiny.Train("whole");
  const RunPaths run{tiny.path("run")};
  const auto stop_when = [&](std::function<bool()> condition) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> sink(std::tmpfile(), std::fclose);
    return Train(tiny.Load("run"),
                 {.stop_requested = std::move(condition), .after_step = {}, .out = sink.get()});
  };
  // Step 8 evaluates and has no checkpoint of its own: asked once after the step, then by the
  // evaluation.
  int asked = 0;
  TrainOutcome outcome = stop_when([&] {
    const auto lines = tiny.Metrics("run");
    return !lines.empty() && lines.back().step == 8 && ++asked > 1;
  });
  EXPECT_EQ(outcome.steps, 8);
  EXPECT_EQ(tiny.Newest("run").step(), 8);
  EXPECT_FALSE(tiny.Metrics("run")[7].heldout);
  // The last step: a stop as soon as its checkpoint is there.
  outcome = stop_when([&] { return fs::exists(run.checkpoints() / "step-00000010"); });
  EXPECT_EQ(outcome.steps, 10);
  EXPECT_FALSE(outcome.finished);
  EXPECT_FALSE(fs::exists(run.results()));
  outcome = tiny.Train("run");
  EXPECT_TRUE(outcome.finished);
  EXPECT_TRUE(outcome.heldout);
  ExpectSameMetrics(tiny.Metrics("run"), tiny.Metrics("whole"));
}

TEST(Resume, ChangedDataIsNoticed) {
  TinyRun tiny("changed");
  tiny.Train("run", {}, 5);
  std::ofstream(tiny.path("tiny.fa"), std::ios::app) << "ACGTACGTAC\n";
  EXPECT_THAT(ErrorOf([&] { tiny.Train("run"); }, ErrorCode::kBadInput), HasSubstr("data.train"));
  EXPECT_TRUE(tiny.Train("run", {"run.on_exists=resume"}).finished);
}

// Every layout goes on, and says that it is another.
TEST(Resume, AnotherLayoutIsTold) {
  TinyRun tiny("layout");
  const std::string told =
      "resuming under another layout of ranks: parallel.dp=1 parallel.ep=1 "
      "parallel.shard=none, was parallel.dp=1 parallel.ep=2 "
      "parallel.shard=none\n";
  tiny.TrainOnRanks("run", {"train.steps=4", "parallel.ep=2"});
  tiny.Train("run", {"train.steps=4"});
  EXPECT_THAT(tiny.printed(), HasSubstr(told));
  EXPECT_THAT(tiny.printed(), HasSubstr("this run is complete"));
  tiny.Train("run", {"train.steps=4"});
  EXPECT_THAT(tiny.printed(), Not(HasSubstr("layout of ranks")));
  // With other micro-steps losses over them are others.
  const std::string micro = "batch.micro_tokens=32";
  tiny.TrainOnRanks("cut", {"train.steps=4", "parallel.ep=2", micro});
  tiny.Train("cut", {"train.steps=4", micro});
  EXPECT_THAT(tiny.printed(), HasSubstr("losses of aux_scope=batch are taken over other"));
  // Beside keys that change.
  tiny.TrainOnRanks("other", {"train.steps=4", "parallel.ep=2"});
  tiny.Train("other", {"train.steps=5", "run.on_exists=resume"});
  EXPECT_THAT(tiny.printed(), HasSubstr("train.steps: 4 in the saved run, 5 now\n" + told));
}

// What was not asked for has no lack of effect.
TEST(Data, ReverseComplementThatWasSetIsToldWhereNothingHasOne) {
  TinyRun tiny("strands");
  const std::vector<std::string> keys = {"data.alphabet=protein", "train.steps=2"};
  tiny.Train("default", keys);
  EXPECT_THAT(tiny.printed(), Not(HasSubstr("reverse_complement")));
  tiny.Train("set", {keys[0], keys[1], "data.reverse_complement=0.25"});
  EXPECT_THAT(tiny.printed(), HasSubstr("data.reverse_complement=0.25 has no effect: protein has "
                                        "no other strand"));
}

// Data is compared by content: a run whose folder and data have moved goes on as it would have.
TEST(Resume, AMovedRunGoesOn) {
  TinyRun tiny("moved");
  tiny.Train("whole");
  tiny.Train("run", {}, 5);
  fs::create_directories(tiny.path("elsewhere"));
  fs::rename(tiny.path("run"), tiny.path("elsewhere") / "run");
  fs::rename(tiny.path("tiny.fa"), tiny.path("elsewhere") / "letters.fa");
  const std::string data = "data.train=" + (tiny.path("elsewhere") / "letters.fa").string();
  EXPECT_TRUE(tiny.Train("elsewhere/run", {data}).finished);
  EXPECT_THAT(tiny.printed(), HasSubstr("resuming from"));
  ExpectSameMetrics(tiny.Metrics("elsewhere/run"), tiny.Metrics("whole"));
  ExpectSameCheckpoint(tiny.Newest("elsewhere/run"), tiny.Newest("whole"));

  tiny.Train("elsewhere/other", {data}, 5);
  std::ofstream(tiny.path("other.fa")) << ">other\n" << std::string(4000, 'A') << "\n";
  EXPECT_THAT(
      ErrorOf(
          [&] { tiny.Train("elsewhere/other", {"data.train=" + tiny.path("other.fa").string()}); },
          ErrorCode::kBadInput),
      HasSubstr("the data is not what the run was trained on"));
}

// Loss and gradient of a batch do not depend on how it is cut, when no statistic of the auxiliary
// loss spans the cut. The bound: each gradient is a sum in fp32, in another order.
void AccumulationEqualsOneBatch(const std::vector<std::string>& keys) {
  TinyRun tiny("accumulation");
  auto split = keys;
  split.push_back("batch.micro_tokens=32");
  tiny.Train("whole", keys);
  tiny.Train("split", split);
  const auto whole = tiny.Metrics("whole"), parts = tiny.Metrics("split");
  ASSERT_EQ(whole.size(), parts.size());
  EXPECT_NEAR(parts[0].loss, whole[0].loss, 1e-6 * whole[0].loss);
  EXPECT_NEAR(parts[0].aux_loss, whole[0].aux_loss, 1e-6 * whole[0].aux_loss);
  EXPECT_NEAR(parts[0].grad_norm, whole[0].grad_norm, 1e-5 * whole[0].grad_norm);
  // Later steps also carry what AdamW makes of those roundings.
  EXPECT_NEAR(parts[9].loss, whole[9].loss, 1e-3 * whole[9].loss);
}
TEST(Accumulation, EqualsOneBatchWithoutAuxiliaryLoss) {
  AccumulationEqualsOneBatch(
      {"model.output_router_logits=false", "model.router_aux_loss_coef=0", "aux_scope=sequence"});
}
TEST(Accumulation, EqualsOneBatchWithSequenceScope) {
  AccumulationEqualsOneBatch({"model.router_aux_loss_coef=1", "aux_scope=sequence"});
}

// Trap aux-loss-absent: whether it is trained is said, and it is logged apart.
TEST(AuxiliaryLoss, AuxLossAbsent) {
  TinyRun tiny("aux");
  tiny.Train("with", {"model.router_aux_loss_coef=1"});
  EXPECT_THAT(tiny.printed(), HasSubstr("part of the training loss; metrics show it apart"));
  tiny.Train("without", {"model.output_router_logits=false", "model.router_aux_loss_coef=0"});
  EXPECT_THAT(tiny.printed(), HasSubstr("auxiliary loss: not part of the training loss"));
  const auto with = tiny.Metrics("with"), without = tiny.Metrics("without");
  EXPECT_EQ(with[0].loss, without[0].loss);  // the cross-entropy alone, whatever is trained
  EXPECT_GE(with[0].aux_loss, 1.0);
  EXPECT_NE(with[0].grad_norm, without[0].grad_norm);
}

// Sigmoid scores with groups, a bias that moves, jitter, a shared expert and both own losses.
const std::vector<std::string> kRouterOptions = {"model.num_local_experts=8",
                                                 "model.scoring_func=sigmoid",
                                                 "model.n_group=4",
                                                 "model.topk_group=2",
                                                 "model.routed_scaling_factor=1.5",
                                                 "model.moe_router_enable_expert_bias=true",
                                                 "model.moe_router_bias_update_rate=0.01",
                                                 "model.router_jitter_noise=0.1",
                                                 "model.moe_aux_loss_coeff=0.01",
                                                 "model.moe_z_loss_coeff=0.001",
                                                 "model.n_shared_experts=1",
                                                 "aux_scope=sequence"};

// The bias is state and the jitter a function of seed, step and place: a run that stops and goes on
// is the run that did not, bit for bit.
TEST(RouterOptions, ResumeIsBitwise) {
  TinyRun tiny("router-resume");
  ASSERT_TRUE(tiny.Train("whole", kRouterOptions).finished);
  EXPECT_THAT(tiny.printed(), AllOf(HasSubstr("0.001 times the router z-loss"),
                                    HasSubstr("Mixtral has no scoring_func = sigmoid"),
                                    HasSubstr("n_shared_experts = 1")));
  const RunPaths paths{tiny.path("whole")};
  EXPECT_FALSE(fs::exists(paths.final_model()));
  const auto expected = tiny.Metrics("whole");
  ASSERT_EQ(expected.size(), 10u);
  for (const int stop : {1, 5, 9}) {
    const std::string run = fmt::format("stopped{}", stop);
    EXPECT_FALSE(tiny.Train(run, kRouterOptions, stop).finished);
    ASSERT_TRUE(tiny.Train(run, kRouterOptions).finished);
    ExpectSameMetrics(tiny.Metrics(run), expected);
    ExpectSameCheckpoint(tiny.Newest(run), tiny.Newest("whole"));
  }
  const std::string bias = "buffer/model.layers.1.mlp.gate.e_score_correction_bias";
  const Tensor moved = tiny.Newest("whole").Read(bias);
  double largest = 0;
  for (const float b : moved.span<float>()) largest = std::max(largest, std::abs(double{b}));
  EXPECT_GT(largest, 0);
  EXPECT_LE(largest, 10 * 0.01 * 1.000001);
  // Its checkpoint is the model that eval and init.from read, bias included.
  const model::HuggingFaceModel m = ReadModel(FindModel(tiny.path("whole")));
  EXPECT_EQ(m.tensors.back().name, "model.layers.1.mlp.gate.e_score_correction_bias");
  tiny.Train("warm", {"init.from=" + tiny.path("whole").string(), "optim.lr=0",
                      "model.num_local_experts=8", "model.moe_router_bias_update_rate=0"});
  const auto same = check::CompareBitwise("bias", tiny.Newest("warm").Read(bias), moved);
  EXPECT_TRUE(same) << same.message;
}

// The shared expert quantises as the experts do; delayed scaling keeps a state of it.
TEST(RouterOptions, TrainInEveryRecipe) {
  TinyRun tiny("router-recipes");
  for (const char* precision : {"bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"}) {
    SCOPED_TRACE(precision);
    auto keys = kRouterOptions;
    keys.push_back(fmt::format("precision={}", precision));
    ASSERT_TRUE(tiny.Train(precision, keys).finished);
    const auto whole = tiny.Metrics(precision);
    EXPECT_LT(whole.back().loss, whole.front().loss);
    const std::string stopped = std::string(precision) + "-stopped";
    tiny.Train(stopped, keys, 4);
    tiny.Train(stopped, keys);
    ExpectSameMetrics(tiny.Metrics(stopped), whole);
    ExpectSameCheckpoint(tiny.Newest(stopped), tiny.Newest(precision));
  }
}

TEST(RouterOptions, AccumulationEqualsOneBatchWithSequenceScope) {
  AccumulationEqualsOneBatch(kRouterOptions);
}

TEST(RouterOptions, MetricsShowWhatIsTrained) {
  TinyRun tiny("router-metrics");
  tiny.Train("with", kRouterOptions, 2);
  tiny.Train("without", {}, 2);
  for (const StepMetrics& m : tiny.Metrics("with")) {
    ASSERT_EQ(m.layer_aux_loss.size(), 2u);
    ASSERT_EQ(m.z_loss.size(), 2u);
    for (const double aux : m.layer_aux_loss) EXPECT_NEAR(aux, 1, 0.5);
    for (const double z : m.z_loss) EXPECT_GT(z, 0);
  }
  for (const StepMetrics& m : tiny.Metrics("without")) {
    EXPECT_TRUE(m.layer_aux_loss.empty() && m.z_loss.empty());
  }
}

// Trap nan-logits: the error says which layer's router, and how many tokens.
TEST(RouterOptions, NanLogitsAreNamed) {
  TinyRun tiny("router-nan");
  const TrainOutcome first = tiny.Train("first");
  model::HuggingFaceModel m = model::LoadHuggingFace(first.paths.final_model());
  for (const io::NamedTensor& t : m.tensors) {
    if (t.name != "model.layers.1.mlp.gate.weight") continue;
    for (float& w : t.tensor.span<float>()) w = w > 0 ? 3e38f : -3e38f;  // products overflow
  }
  model::SaveHuggingFace(tiny.path("poisoned"), m.config, m.tensors, {});
  const std::string message =
      ErrorOf([&] { tiny.Train("second", {"init.from=" + tiny.path("poisoned").string()}); },
              ErrorCode::kNumericalFailure);
  EXPECT_THAT(message, AllOf(HasSubstr("the router logits of layer 1 ("),
                             HasSubstr(" tokens, the first at position ")));
}

TEST(WarmStart, FromHuggingFaceDirectoryAndFromCheckpointAreTheSame) {
  TinyRun tiny("warm");
  const TrainOutcome first = tiny.Train("first");
  const std::string final_model = first.paths.final_model().string();
  const std::string checkpoint = (first.paths.checkpoints() / "step-00000010").string();
  // The preset's hidden size differs: the weights decide.
  tiny.Train("from_hf", {"init.from=" + final_model, "optim.lr=0"});
  tiny.Train("from_checkpoint", {"init.from=" + checkpoint, "optim.lr=0"});
  for (const char* run : {"from_hf", "from_checkpoint"}) {
    SCOPED_TRACE(run);
    const auto got = tiny.Newest(run), expected = tiny.Newest("first");
    for (const std::string& name : expected.names()) {
      if (!name.starts_with("weight/")) continue;
      const auto same = check::CompareBitwise(name, got.Read(name), expected.Read(name));
      EXPECT_TRUE(same) << same.message;
    }
  }
  EXPECT_LT(tiny.Metrics("from_hf")[0].loss, tiny.Metrics("first")[0].loss);
}

TEST(WarmStart, TheArchitectureComesWithTheWeights) {
  TinyRun tiny("architecture");
  const std::string source = tiny.Train("first").paths.final_model().string();
  LoadedConfig loaded = ParseRunConfig("model:\n  hidden_size: 64\n", "preset.yaml",
                                       {"init.from=" + source, "model.router_aux_loss_coef=0.5"});
  ResolveInit(loaded);
  EXPECT_EQ(loaded.config.model.hidden_size, 16);
  EXPECT_EQ(loaded.config.model.router_aux_loss_coef, 0.5);
  LoadedConfig conflict = ParseRunConfig("", "", {"init.from=" + source, "model.hidden_size=64"});
  ResolveInit(conflict);
  EXPECT_THAT(ErrorOf([&] { CheckStep(conflict); }, ErrorCode::kBadInput),
              AllOf(HasSubstr("model.hidden_size"), HasSubstr("64"), HasSubstr("16")));
}

TEST(OnExists, FailRefusesAndNewKeepsTheOldRun) {
  TinyRun tiny("exists");
  tiny.Train("run");
  EXPECT_THAT(
      ErrorOf([&] { tiny.Train("run", {"run.on_exists=fail"}); }, ErrorCode::kAlreadyExists),
      HasSubstr("run.on_exists=fail"));
  ASSERT_TRUE(tiny.Train("run", {"run.on_exists=new", "seed=5"}).finished);
  EXPECT_THAT(tiny.printed(), HasSubstr("run.1"));
  EXPECT_EQ(tiny.Metrics("run.1").size(), 10u);
  EXPECT_NE(tiny.Metrics("run.1")[0].loss, tiny.Metrics("run")[0].loss);
}

TEST(OnExists, AutoShowsTheKeysThatDiffer) {
  TinyRun tiny("auto");
  tiny.Train("run", {}, 4);
  EXPECT_THAT(ErrorOf(
                  [&] {
                    tiny.Train("run", {"optim.lr=0.5", "seed=9"});
                  },
                  ErrorCode::kAlreadyExists),
              AllOf(HasSubstr("optim.lr: 0.01 in the saved run, 0.5 now"), HasSubstr("seed")));
  // Keys that decide nothing may differ.
  EXPECT_TRUE(tiny.Train("run", {"checkpoint.keep=1", "log.every=1"}).finished);
}

TEST(OnExists, ResumeMayTuneButNotChangeWhatTheStateMeans) {
  TinyRun tiny("tune");
  tiny.Train("run", {}, 4);
  EXPECT_THAT(ErrorOf(
                  [&] {
                    tiny.Train("run", {"run.on_exists=resume", "model.hidden_size=32"});
                  },
                  ErrorCode::kAlreadyExists),
              AllOf(HasSubstr("model.hidden_size"), Not(HasSubstr("init.from"))));
  // Weights outlive a recipe: another one starts a new run from them.
  EXPECT_THAT(ErrorOf([&] { tiny.Train("run", {"precision=mxfp8"}); }, ErrorCode::kAlreadyExists),
              AllOf(HasSubstr("precision: fp32 in the saved run, mxfp8 now"),
                    HasSubstr("another output with init.from=" +
                              (tiny.path("run") / "checkpoints" / "step-00000004").string())));
  ASSERT_TRUE(tiny.Train("run", {"run.on_exists=resume", "train.steps=12"}).finished);
  EXPECT_THAT(tiny.printed(), HasSubstr("train.steps: 10 in the saved run, 12 now"));
  EXPECT_EQ(tiny.Metrics("run").size(), 12u);
}

// Every op of a training step runs its best implementation, in both precisions.
TEST(Strict, ATrainingRunHasNoSlowPath) {
  TinyRun tiny("strict");
  EXPECT_TRUE(tiny.Train("fp32", {"strict=true", "train.steps=2"}).finished);
  EXPECT_TRUE(tiny.Train("bf16", {"strict=true", "precision=bf16", "train.steps=2"}).finished);
}

TEST(OnExists, AFolderOfSomethingElseIsRefused) {
  TinyRun tiny("other");
  fs::create_directories(tiny.path("letters"));
  std::ofstream(tiny.path("letters") / "thesis.txt") << "do not lose me\n";
  EXPECT_THAT(
      ErrorOf([&] { tiny.Train("letters", {"run.on_exists=new"}); }, ErrorCode::kAlreadyExists),
      HasSubstr("not a run"));
  EXPECT_TRUE(fs::exists(tiny.path("letters") / "thesis.txt"));
  EXPECT_THAT(ErrorOf([&] { tiny.Train("tiny.fa"); }, ErrorCode::kAlreadyExists),
              HasSubstr("not a directory"));
}

TEST(NonFinite, StopsBeforeTheUpdateAndKeepsTheLastGoodCheckpoint) {
  TinyRun tiny("blowup");
  tiny.Train("run", {}, 4);  // checkpoints 3 and 4
  // The rate of update 5 throws the weights far away; the loss of step 6 is not finite.
  const std::string message = ErrorOf(
      [&] {
        tiny.Train("run", {"run.on_exists=resume", "optim.lr=1e30", "optim.floor_ratio=1"});
      },
      ErrorCode::kNumericalFailure);
  EXPECT_THAT(message, AllOf(HasSubstr("step 6"), HasSubstr("layer")));
  EXPECT_EQ(tiny.Newest("run").step(), 4);
  EXPECT_EQ(tiny.Metrics("run").size(), 5u);
}

TEST(NonFinite, SuchWeightsAreNeverSaved) {
  TinyRun tiny("infinite");
  tiny.Train("run", {"checkpoint.every=1"}, 4);
  const std::string message = ErrorOf(
      [&] {
        tiny.Train("run", {"run.on_exists=resume", "checkpoint.every=1", "optim.lr=1e300",
                           "optim.floor_ratio=1"});
      },
      ErrorCode::kNumericalFailure);
  EXPECT_THAT(message, AllOf(HasSubstr("step 5"), HasSubstr("model.embed_tokens.weight")));
  EXPECT_EQ(tiny.Newest("run").step(), 4);
}

TEST(NonFinite, NamesTheLayerWhereItBegins) {
  TinyRun tiny("nan");
  const TrainOutcome first = tiny.Train("first");
  model::HuggingFaceModel m = model::LoadHuggingFace(first.paths.final_model());
  for (const io::NamedTensor& t : m.tensors) {
    if (t.name == "model.layers.1.mlp.gate.weight") t.tensor.span<float>()[3] = NAN;
  }
  model::SaveHuggingFace(tiny.path("poisoned"), m.config, m.tensors, {});
  const std::string message =
      ErrorOf([&] { tiny.Train("second", {"init.from=" + tiny.path("poisoned").string()}); },
              ErrorCode::kNumericalFailure);
  EXPECT_THAT(message, AllOf(HasSubstr("step 1"), HasSubstr("layer 1"), Not(HasSubstr("layer 0"))));
  EXPECT_FALSE(io::NewestGoodCheckpoint(RunPaths{tiny.path("second")}.checkpoints()));
}

TEST(BadInput, NothingIsWrittenBeforeEverythingIsChecked) {
  TinyRun tiny("early");
  const std::vector<std::vector<std::string>> cases = {
      {"batch.global_tokens=1e6"},
      {"data.train=/nonexistent.fa"},
      {"data.alphabet=protein", "data.seq_len=4096", "model.max_position_embeddings=4096"},
      {"model.num_experts_per_tok=5"},
      {"data.train_fraction=0.99999"},
      {"data.seq_len=128"},  // max_position_embeddings is 64
      {"model.num_local_experts=513"},
      {"model.n_group=2"},
      {"model.moe_router_pre_softmax=true"},
      {"model.moe_router_enable_expert_bias=true"},
      {"model.router_jitter_noise=1"},
      {"model.num_experts_per_tok=33", "model.num_local_experts=64"},
      {"threads=100000"},
      {"data.cache_dir=/tmp/caf\xe9"},
  };
  for (const auto& keys : cases) {
    SCOPED_TRACE(keys[0]);
    EXPECT_THROW(tiny.Train("never", keys), Error);
    EXPECT_FALSE(fs::exists(tiny.path("never")));
  }
}

TEST(BadInput, ARefusedResumeLeavesTheConfiguration) {
  TinyRun tiny("refused");
  tiny.Train("run");
  const RunPaths run{tiny.path("run")};
  const std::string before = io::ReadFile(run.config());
  EXPECT_THAT(ErrorOf(
                  [&] {
                    tiny.Train("run", {"run.on_exists=resume", "train.steps=5"});
                  },
                  ErrorCode::kBadInput),
              HasSubstr("has made 10 steps"));
  EXPECT_EQ(io::ReadFile(run.config()), before);
}

TEST(BadInput, TextMustBeUtf8) {
  TinyRun tiny("text");
  EXPECT_THAT(ErrorOf([&] { tiny.Train("caf\xe9"); }, ErrorCode::kBadInput),
              AllOf(HasSubstr("output"), HasSubstr("UTF-8")));
  EXPECT_TRUE(tiny.Train("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\xa7\xac").finished);
}

// A start that was killed while it wrote its first file.
TEST(OnExists, LeftoversOfAKilledStartAreNoRun) {
  TinyRun tiny("leftovers");
  const fs::path stale = tiny.path("run") / ".cistron-tmp-config.yaml-1-0";
  fs::create_directories(tiny.path("run"));
  std::ofstream(tiny.path("run") / ".lock") << "";
  std::ofstream(stale) << "device: c";
  EXPECT_TRUE(tiny.Train("run").finished);
  EXPECT_FALSE(fs::exists(stale));
}

TEST(FinalModel, EqualsTheLastCheckpointBitwise) {
  TinyRun tiny("final");
  const TrainOutcome outcome = tiny.Train("run");
  const auto exported = model::LoadHuggingFace(outcome.paths.final_model());
  const auto checkpoint = tiny.Newest("run");
  ASSERT_FALSE(exported.tensors.empty());
  for (const io::NamedTensor& t : exported.tensors) {
    const auto same = check::CompareBitwise(t.name, t.tensor, checkpoint.Read("weight/" + t.name));
    EXPECT_TRUE(same) << same.message;
  }
}

}  // namespace
}  // namespace cistron::train
