// Held-out loss: against whole logits, against itself cut otherwise, and a table a record.
#include "cistron/train/evaluate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/base/error.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"
#include "cistron/train/evaluation_recipe.h"
#include "cistron/train/expert_bases.h"
#include "cistron/train/model_source.h"
#include "cistron/train/reading_rules.h"
#include "cistron/train/run_directory.h"
#include "cistron/train/score.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

class EvaluateTest : public ::testing::Test {
 protected:
  EvaluateTest()
      : config_(tiny_.Load("run").config),
        corpus_(data::Corpus::Open(config_.data)),
        stream_(corpus_),
        model_(ops::Context(), config_.model, DType::kF32) {
    model_.store.Initialize(7, 0.3);
  }
  EvaluationResult Run(std::int64_t max_tokens, std::int64_t batch_tokens) {
    return Evaluate(model_.model, stream_, config_.data.seq_len, max_tokens, batch_tokens);
  }

  TinyRun tiny_{"evaluate"};
  RunConfig config_;
  std::shared_ptr<const data::Corpus> corpus_;
  data::EvaluationStream stream_;
  model::LocalMixtral model_;
};

TEST_F(EvaluateTest, IsTheMeanNllOfTheSoftmaxOfTheLogits) {
  double nll = 0;
  std::int64_t bases = 0;
  for (std::int64_t row = 0; row < stream_.num_rows(); ++row) {
    const data::Batch batch = stream_.Rows(row, 1);
    const Tensor logits = model_.model.ComputeLogits(batch).logits;
    const auto labels = batch.labels.span<std::int64_t>();
    for (std::int64_t t = 0; t < batch.num_tokens(); ++t) {
      const std::int64_t label = labels[static_cast<std::size_t>(t)];
      if (label == ops::kIgnoreLabel) continue;
      double sum = 0;
      for (const float l : logits.Select(t).span<float>()) sum += std::exp(static_cast<double>(l));
      nll += std::log(sum) - ElementAsDouble(logits.Select(t), label);
      ++bases;
    }
  }
  const EvaluationResult result = Run(0, 4096);
  EXPECT_EQ(result.bases, bases);
  EXPECT_NEAR(result.nll, nll, 1e-6 * nll);
  EXPECT_DOUBLE_EQ(result.BitsPerBase(), result.Loss() / std::log(2.0));
  EXPECT_DOUBLE_EQ(result.Perplexity(), std::exp(result.Loss()));
}

TEST_F(EvaluateTest, DoesNotDependOnTheBatch) {
  const EvaluationResult one = Run(0, 1), many = Run(0, 1 << 20);
  EXPECT_EQ(one.bases, many.bases);
  EXPECT_NEAR(one.nll, many.nll, 1e-6 * many.nll);
}

TEST_F(EvaluateTest, ASampleIsSpreadAndAlwaysTheSame) {
  const EvaluationResult sample = Run(96, 32);  // three rows of seven and a half
  EXPECT_LE(sample.bases, 3 * 31);
  EXPECT_GE(sample.bases, 2 * 15);
  EXPECT_EQ(Run(96, 32).nll, sample.nll);
  EXPECT_EQ(Run(1 << 20, 32).bases, Run(0, 32).bases);  // more than there is: all
}

TEST_F(EvaluateTest, ASampleWithNothingToScoreGivesWayToTheWhole) {
  std::ofstream(tiny_.path("n_first.fa")) << ">n\n" << std::string(128, 'N') << "\n>b\nACGTACGT\n";
  const data::EvaluationStream stream(
      data::Corpus::Open(WholeFile(tiny_.path("n_first.fa"), RulesOf(config_.data))),
      data::Part::kAll);
  EXPECT_EQ(Evaluate(model_.model, stream, config_.data.seq_len, 32, 32).bases, 7);
  EXPECT_TRUE(std::isnan(EvaluationResult().Loss()));
}

TEST(ReadingRules, AreKeptWithTheModel) {
  model::MixtralConfig config;
  SetReadingRules(config, {64, data::Alphabet::kProtein, false, true, true, {"#", "\xff"}, "seq"});
  const ReadingRules rules = GetReadingRules(config);
  EXPECT_EQ(rules.seq_len, 64);
  EXPECT_EQ(rules.alphabet, data::Alphabet::kProtein);
  EXPECT_EQ(rules.tag_delimiters, (std::vector<std::string>{"#", "\xff"}));
  EXPECT_EQ(rules.json_field, "seq");
}

TEST(ReadingRules, OlderModelsLackTheKeysOfFilesAndDamageIsNamed) {
  const auto with_alphabet = [](const std::string& name) {
    model::MixtralConfig config;
    config.extra_json = R"({"cistron": {"seq_len": 64, "upper_case": true, "begin_token": false,
                                        "end_token": false, "alphabet": ")" +
                        name + "\"}}";
    return config;
  };
  EXPECT_TRUE(GetReadingRules(with_alphabet("rna")).tag_delimiters.empty());
  try {
    GetReadingRules(with_alphabet("klingon"));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(),
                ::testing::AllOf(::testing::HasSubstr("\"alphabet\" is \"klingon\""),
                                 ::testing::HasSubstr("dna, rna, protein, bytes")));
  }
}

TEST_F(EvaluateTest, StopsBetweenBatches) {
  int asked = 0;
  const EvaluationResult result =
      Evaluate(model_.model, stream_, config_.data.seq_len, 0, 32, {}, [&] { return ++asked > 2; });
  EXPECT_FALSE(result.complete);
  EXPECT_LT(result.bases, Run(0, 32).bases);
  EXPECT_TRUE(Run(0, 32).complete);
}

TEST_F(EvaluateTest, ObserverSeesTheRoutingOfEveryToken) {
  ExpertBaseCounts counts("ACGT", 2, 4);
  Evaluate(model_.model, stream_, config_.data.seq_len, 0, 64,
           [&](const data::Batch& batch, const Tensor& experts) { counts.Add(batch, experts); });
  std::int64_t letters = 0;
  for (std::int64_t row = 0; row < stream_.num_rows(); ++row) {
    const data::Batch batch = stream_.Rows(row, 1);  // outlives the loop over its tokens
    for (const std::int64_t token : batch.tokens.span<std::int64_t>()) {
      letters += std::string("ACGT").find(static_cast<char>(token)) != std::string::npos;
    }
  }
  for (std::int64_t layer = 0; layer < 2; ++layer) {
    std::int64_t sum = 0;
    for (std::int64_t expert = 0; expert < 4; ++expert) {
      for (std::size_t base = 0; base < 4; ++base) sum += counts.count(layer, expert, base);
    }
    EXPECT_EQ(sum, 2 * letters);  // top-2
  }
}

TEST_F(EvaluateTest, RecordsAddUpToTheFile) {
  std::ofstream(tiny_.path("records.fa")) << ">long\n"
                                          << std::string(100, 'A') << "\n>one\nA\n>n\n"
                                          << std::string(40, 'N') << "\n>last\nACGTACGT\n";
  const auto corpus =
      data::Corpus::Open(WholeFile(tiny_.path("records.fa"), RulesOf(config_.data)));
  const data::EvaluationStream stream(corpus, data::Part::kAll);
  std::vector<EvaluationResult> records;
  for (const std::int64_t batch_tokens : {1, 64, 4096}) {
    SCOPED_TRACE(batch_tokens);
    records.clear();
    ScoreRecords(model_.model, *corpus, stream, batch_tokens,
                 [&](std::int64_t index, const EvaluationResult& r) {
                   EXPECT_EQ(index, static_cast<std::int64_t>(records.size()));
                   records.push_back(r);
                 });
    ASSERT_EQ(records.size(), 4u);
    EXPECT_EQ(records[0].bases,
              100 - 4);  // windows of 32, 32, 32 and 4; the first of each is given
    EXPECT_EQ(records[1].bases, 0);
    EXPECT_EQ(records[2].bases, 0);
    EXPECT_EQ(records[3].bases, 7);
    const EvaluationResult all =
        Evaluate(model_.model, stream, config_.data.seq_len, 0, batch_tokens);
    EXPECT_NEAR(records[0].nll + records[3].nll, all.nll, 1e-6 * all.nll);
  }
}

// A checkpoint evaluated under the recipe of its run gives the run's own number, to the last bit.
TEST(EvaluationRecipe, OfACheckpointGivesTheRunsOwnLoss) {
  TinyRun run("evaluation_recipe");
  for (const char* name : {"mxfp8", "fp8_block", "fp8_current", "fp8_delayed"}) {
    SCOPED_TRACE(name);
    const std::vector<std::string> options = {std::string("precision=") + name, "train.steps=2",
                                              "recipe.last_layers_bf16=1", "recipe.format=e4m3"};
    const auto outcome = run.Train(name, options);
    ASSERT_TRUE(outcome.heldout);
    const RunConfig config = run.Load(name, options).config;
    const auto path = io::NewestGoodCheckpoint(RunPaths{run.path(name)}.checkpoints()).value();
    const Precision precision = ParsePrecision(name);
    const auto m = LoadModel(ops::Context(), path, ModelDType(precision));
    const data::EvaluationStream stream(data::Corpus::Open(config.data));
    const auto loss = [&] {
      return Evaluate(m->model, stream, config.data.seq_len, 0, 2048).Loss();
    };
    EvaluationRecipe recipe = ReadEvaluationRecipe(path, precision);
    EXPECT_EQ(recipe.high_precision.last, 1);
    {
      const quant::Autocast scope(recipe.recipe, recipe.Scope());
      EXPECT_EQ(loss(), outcome.heldout->loss);
    }
    EXPECT_NE(loss(), outcome.heldout->loss);  // outside it is another computation
  }
}

TEST(EvaluationRecipe, DelayedScalingNeedsTheScalesOfACheckpoint) {
  TinyRun run("evaluation_recipe_refusals");
  run.Train("bf16", {"precision=bf16", "train.steps=2"});
  const RunPaths paths{run.path("bf16")};
  const auto error = [](const std::filesystem::path& path) -> std::string {
    try {
      ReadEvaluationRecipe(path, Precision::kFp8Delayed);
    } catch (const Error& e) {
      return e.message();
    }
    return "";
  };
  EXPECT_THAT(error(io::NewestGoodCheckpoint(paths.checkpoints()).value()),
              ::testing::HasSubstr("has no state of delayed scaling"));
  EXPECT_THAT(error(paths.root),
              ::testing::AllOf(::testing::HasSubstr("holds weights alone"),
                               ::testing::HasSubstr("no checkpoint of this run, of precision=bf16, "
                                                    "holds them")));
  // Another recipe than the run's takes its own defaults; a final model knows its run.
  run.Train("mx", {"precision=mxfp8", "train.steps=2", "recipe.last_layers_bf16=1"});
  const RunPaths mx{run.path("mx")};
  EXPECT_EQ(ReadEvaluationRecipe(mx.root, Precision::kMxfp8).high_precision.last, 1);
  EXPECT_EQ(ReadEvaluationRecipe(mx.final_model() / "", Precision::kMxfp8).high_precision.last, 1);
  EXPECT_EQ(ReadEvaluationRecipe(mx.root, Precision::kFp8Block).high_precision.last, 0);
}

// A finished run's directory stands for its final model, which has weights alone: the refusal names
// the checkpoint that would do, from wherever in the run it was asked.
TEST(EvaluationRecipe, ARefusedRunNamesItsCheckpointThatHasTheScales) {
  TinyRun run("evaluation_recipe_remedy");
  run.Train("fp8", {"precision=fp8_delayed", "train.steps=4"});
  const RunPaths paths{run.path("fp8")};
  // One that is newer and damaged, and one that is newer and has no states.
  std::filesystem::create_directory(paths.checkpoints() / "step-00000009");
  run.Train("bf16", {"precision=bf16", "train.steps=5"});
  std::filesystem::rename(RunPaths{run.path("bf16")}.checkpoints() / "step-00000005",
                          paths.checkpoints() / "step-00000005");
  for (const auto& path :
       {paths.root, paths.final_model(), paths.root / "", paths.checkpoints() / "step-00000005"}) {
    SCOPED_TRACE(path.string());
    try {
      ReadEvaluationRecipe(path, Precision::kFp8Delayed);
      ADD_FAILURE() << "not refused";
    } catch (const Error& e) {
      EXPECT_THAT(e.message(),
                  ::testing::HasSubstr("give " + (paths.checkpoints() / "step-00000004").string()));
    }
  }
}

}  // namespace
}  // namespace cistron::train
