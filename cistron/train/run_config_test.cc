// Configurations: what is accepted, what each error says.
#include "cistron/train/run_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "cistron/base/error.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/config_schema.h"

namespace cistron::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string ErrorOf(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  try {
    CheckRunConfig(ParseRunConfig(yaml, "test.yaml", overrides));
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::kBadInput || error.code() == ErrorCode::kUnsupported);
    return error.message();
  }
  return "";
}

const std::vector<std::string> kLegal = {"data.train=a.fa", "output=out", "data.seq_len=256"};
std::vector<std::string> Join(std::vector<std::string> all, const std::vector<std::string>& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}
std::string ErrorOfOverride(const std::string& text) {
  std::vector<std::string> overrides = kLegal;
  overrides.push_back(text);
  return ErrorOf("", overrides);
}

TEST(RunConfig, OverridesWinOverThePreset) {
  const LoadedConfig loaded = ParseRunConfig("seed: 3\nmodel:\n  hidden_size: 64\n", "test.yaml",
                                             {"model.hidden_size=96", "optim.lr=3e-4"});
  EXPECT_EQ(loaded.config.seed, 3u);
  EXPECT_EQ(loaded.config.model.hidden_size, 96);
  EXPECT_EQ(loaded.config.optim.lr, 3e-4);
  EXPECT_EQ(loaded.Where("seed"), "seed (test.yaml:1)");
  EXPECT_EQ(loaded.Where("model.hidden_size"), "model.hidden_size (the command line)");
  EXPECT_EQ(loaded.Where("train.steps"), "train.steps");
}

TEST(RunConfig, UnknownKeysNameTheNearestOnlyWhenItIsNear) {
  const std::string quote = "did you mean '";
  EXPECT_THAT(ErrorOfOverride("optim.learning_rate=1"), HasSubstr(quote + "optim.lr'?"));
  EXPECT_THAT(ErrorOfOverride("learning_rate=1"), HasSubstr(quote + "optim.lr'?"));
  EXPECT_THAT(ErrorOfOverride("hiden_size=1"), HasSubstr(quote + "model.hidden_size'?"));
  EXPECT_THAT(ErrorOfOverride("sed=1"), HasSubstr(quote + "seed'?"));
  EXPECT_THAT(ErrorOfOverride("telemetry.endpoint=1"),
              AllOf(HasSubstr("there is no key 'telemetry.endpoint' ("), Not(HasSubstr(quote))));
}

TEST(RunConfig, AliasesAreKeys) {
  for (const char* alias : {"batch_size", "max_steps", "seq_length", "num_experts", "output_dir",
                            "epochs", "top_k", "dtype", "grad_clip", "warmup"}) {
    EXPECT_NE(NearestConfigKey(alias), nullptr) << alias;
  }
}

// Names of Megatron-LM's and DeepSeek's options, with the group that a person would guess.
TEST(RunConfig, NamesOfOtherProgramsForTheRouterAreHints) {
  for (const auto& [name, key] : {std::pair{"moe_router_topk", "model.num_experts_per_tok"},
                                  {"moe-router-topk", "model.num_experts_per_tok"},
                                  {"moe_router_score_function", "model.scoring_func"},
                                  {"moe_router_num_groups", "model.n_group"},
                                  {"moe_router_group_topk", "model.topk_group"},
                                  {"moe_router_topk_scaling_factor", "model.routed_scaling_factor"},
                                  {"moe_router_load_balancing_type", "model.moe_aux_loss_coeff"},
                                  {"moe_input_jitter_eps", "model.router_jitter_noise"},
                                  {"moe_shared_expert_intermediate_size", "model.n_shared_experts"},
                                  {"n_routed_experts", "model.num_local_experts"}}) {
    for (const char* group : {"", "model."}) {
      EXPECT_THAT(ErrorOfOverride(std::string(group) + name + "=1"),
                  HasSubstr(std::string("did you mean '") + key + "'?"))
          << name;
    }
  }
}

TEST(RunConfig, ARangeIsPrintedOnce) {
  EXPECT_THAT(ErrorOfOverride("model.rope_theta=0"),
              ::testing::EndsWith("model.rope_theta=0 is out of range (number, > 0)"));
  EXPECT_THAT(ErrorOfOverride("data.upper_case=yes"),
              ::testing::EndsWith("is neither true nor false (boolean)"));
}

TEST(RunConfig, AListOfValuesIsPrintedOnce) {
  const std::string error = ErrorOfOverride("precision=fp7");
  const std::string list = "fp32|bf16";
  EXPECT_THAT(error, HasSubstr(list));
  EXPECT_EQ(error.find(list), error.rfind(list));
}

TEST(RunConfig, MissingDataFileIsToldWithThePlacesTried) {
  const std::filesystem::path folder = ::testing::TempDir() + "places";
  LoadedConfig loaded;
  loaded.config.data.train = {{"no_such.fa", 1.0}};
  ResolveDataPaths(loaded, folder / "configs" / "preset.yaml");
  try {
    loaded.data_faults.Throw();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_THAT(error.message(),
                AllOf(HasSubstr("data.train: no_such.fa"),
                      HasSubstr((std::filesystem::current_path() / "no_such.fa").string()),
                      HasSubstr((folder / "configs" / "no_such.fa").string()),
                      HasSubstr((folder / "no_such.fa").string())));
  }
}

TEST(RunConfig, DottedKeysInYaml) {
  EXPECT_EQ(ParseRunConfig("model.hidden_size: 64\n", "t", {}).config.model.hidden_size, 64);
}

TEST(RunConfig, ListsAndNull) {
  const RunConfig c = ParseRunConfig("data:\n  train: [a.fa, b.fa]\n  weights: [1, 2.5]\n", "t",
                                     {"model.head_dim=24", "model.sliding_window=null"})
                          .config;
  ASSERT_EQ(c.data.train.size(), 2u);
  EXPECT_EQ(c.data.train[1].path, "b.fa");
  EXPECT_EQ(c.data_weights, (std::vector<double>{1, 2.5}));
  EXPECT_EQ(c.model.head_dim, 24);
  EXPECT_FALSE(c.model.sliding_window);
  EXPECT_EQ(ParseRunConfig("", "t", {"data.train=[x.fa,y.fa]"}).config.data.train.size(), 2u);
}

TEST(RunConfig, WholeNumbersMayBeWrittenWithAnExponent) {
  EXPECT_EQ(ParseRunConfig("", "t", {"batch.global_tokens=2.5e6"}).config.batch.global_tokens,
            2500000);
  EXPECT_THAT(ErrorOfOverride("train.steps=1.5"), HasSubstr("is not a whole number"));
}

TEST(RunConfig, ThreadsAreBounded) {
  EXPECT_THAT(ErrorOfOverride("threads=100000"),
              HasSubstr("threads=100000 is out of range (integer, [0, 4096])"));
}

TEST(RunConfig, UnknownKeyNamesTheNearest) {
  EXPECT_THAT(ErrorOf("model:\n  hiden_size: 64\n"),
              AllOf(HasSubstr("test.yaml:2"), HasSubstr("'model.hiden_size'"),
                    HasSubstr("'model.hidden_size'")));
  EXPECT_THAT(ErrorOfOverride("lr=1"), AllOf(HasSubstr("command line"), HasSubstr("'optim.lr'")));
  EXPECT_THAT(ErrorOfOverride("batch.gobal_tokens=1"), HasSubstr("'batch.global_tokens'"));
}

// All that is wrong, in the order in which it is written, and each as it would be told alone.
TEST(RunConfig, FaultsAreToldTogether) {
  const std::string yaml = "seed: many\nmodle:\n  hidden_size: 64\noptim:\n  beta2: 1\n  lrr: 1\n";
  const std::vector<std::string> overrides = {"batch.gobal_tokens=1", "device=tpu", "train.steps"};
  const std::string all = ErrorOf(yaml, overrides);
  EXPECT_THAT(all,
              ::testing::StartsWith("the configuration has 7 faults:\n  test.yaml:1: seed=many"));
  std::size_t at = 0;
  for (const char* text :
       {"test.yaml:1: seed=many", "no group of keys 'modle'; the nearest is 'model'",
        "test.yaml:5: optim.beta2=1", "no key 'optim.lrr'; did you mean 'optim.lr'?",
        "no key 'batch.gobal_tokens'; did you mean 'batch.global_tokens'?", "device=tpu",
        "'train.steps' is not of the form key=value"}) {
    const std::size_t next = all.find(text, at);
    ASSERT_NE(next, std::string::npos) << text << " in\n" << all;
    at = next;
  }
  EXPECT_THAT(all, HasSubstr("\n  " + ErrorOf("", {"device=tpu"})));
}

// Also how values fit together, but not what follows from a fault.
TEST(RunConfig, FaultsOfValuesThatDoNotFitAreToldTogether) {
  const std::string error = ErrorOf(
      "", {"model.hidden_size=130", "optim.warmup_steps=2000", "parallel.ep=3", "output=run"});
  // Rows for three ranks are no matter where there cannot be three.
  EXPECT_THAT(error, AllOf(HasSubstr("4 faults"), HasSubstr("not divisible by 4 heads"),
                           HasSubstr("optim.warmup_steps (the command line)"),
                           HasSubstr("data.train names no file"),
                           HasSubstr("8 experts cannot be dealt evenly to 3 ranks"),
                           Not(HasSubstr("rows"))));
}

// Of every part all faults that do not follow from each other, and no more.
TEST(RunConfig, NoFaultHidesOthersOfItsPart) {
  struct Case {
    std::vector<std::string> keys, told;
  };
  const std::vector<Case> cases = {
      {{"recipe.margin=1", "recipe.weights_2d=on"}, {"recipe.margin", "recipe.weights_2d"}},
      {{"precision=mxfp8", "recipe.first_layers_bf16=99", "recipe.bf16_patterns=[\"x\",\"y\"]"},
       {"no layer in mxfp8", "'x' matches no", "'y' matches no"}},
      {{"model.num_experts_per_tok=33", "model.num_local_experts=514"},
       {"514 experts; at most", "33 experts a token; at most"}},
      {{"model.num_experts_per_tok=9", "model.hidden_size=130", "model.num_key_value_heads=3",
        "model.vocab_size=64", "model.n_group=2", "model.moe_router_pre_softmax=true",
        "model.moe_router_bias_update_rate=0.01"},
       {"9 of 8 experts", "not divisible by 4 heads", "3 key-value heads", "vocabulary 64",
        "model.n_group=2 needs", "model.moe_router_pre_softmax takes", "0.01 has no effect"}},
      {{"model.n_group=3", "model.topk_group=4", "model.moe_router_enable_expert_bias=true",
        "model.eos_token_id=256"},
       {"exceeds model.n_group=3", "model.n_group=3 needs", "does not divide model.num_local",
        "does not divide model.num_experts_per_tok", "expert_bias=true needs",
        "model.eos_token_id is 256"}},
      {{"data.weights=[1,2]", "data.heldout=b.fa", "data.stride=257"},
       {"2 mixing weights", "held out only with", "data.stride (the command line)=257"}},
      {{"data.seq_len=640", "data.stride=0", "model.max_position_embeddings=600",
        "batch.global_tokens=2000", "batch.micro_tokens=5000", "parallel.dp=7"},
       {"rows of 640 tokens", "the nearest is 1920", "the nearest is 5120", "of 5000 tokens is"}},
      {{"profile=steps:2000-2001", "optim.warmup_steps=2000"}, {"profile", "before its warm-up"}},
      {{"optim.gradients=bf16", "optim.states=bf16"}, {"optim.gradients", "optim.states"}},
      {{"parallel.ep=3", "parallel.ep_rows=quantized"}, {"dealt evenly to 3", "ep_rows"}},
  };
  for (const Case& c : cases) {
    const std::string error = ErrorOf("", Join(kLegal, c.keys));
    EXPECT_THAT(error, HasSubstr(fmt::format("has {} faults:", c.told.size())));
    for (const std::string& text : c.told) EXPECT_THAT(error, HasSubstr(text));
  }
}

// Files that are missing are faults among others, but not of a run that is planned or explained.
// What a model that cannot be read would say of the values follows from that it cannot.
TEST(RunConfig, MissingFilesAreToldWithOtherFaults) {
  const std::string nowhere = ::testing::TempDir() + "nowhere/";
  const auto error = [&](void (*check)(const LoadedConfig&), std::vector<std::string> more) {
    more.insert(more.begin(), {"output=" + nowhere + "run", "optim.warmup_steps=100000",
                               fmt::format("data.train=[{0}a.fa, {0}b.fa]", nowhere)});
    const LoadedConfig loaded = LoadRun("", more);
    EXPECT_FALSE(loaded.HasData());
    try {
      check(loaded);
    } catch (const Error& e) {
      return e.message();
    }
    return std::string();
  };
  const std::vector<std::string> heads = {"model.num_attention_heads=3"},
                                 model = {heads[0], "init.from=" + nowhere + "model"};
  EXPECT_THAT(error(CheckRunConfig, heads),
              AllOf(HasSubstr("has 5 faults"), HasSubstr("data.train: " + nowhere + "a.fa"),
                    HasSubstr("sought as\n    " + nowhere + "a.fa\n  data.train"),
                    HasSubstr("data.train: " + nowhere + "b.fa"), HasSubstr("3 heads"),
                    HasSubstr("3 query heads"), HasSubstr("optim.warmup_steps")));
  EXPECT_THAT(error(CheckRunConfig, model),
              AllOf(HasSubstr("has 4 faults"), HasSubstr("b.fa"), HasSubstr(nowhere + "model"),
                    HasSubstr("optim.warmup_steps"), Not(HasSubstr("3 heads"))));
  for (const auto check : {CheckStep, CheckExplained}) {
    EXPECT_THAT(error(check, heads),
                AllOf(HasSubstr("has 3 faults"), Not(HasSubstr("data.train"))));
    EXPECT_THAT(error(check, model),
                AllOf(HasSubstr("has 2 faults"), Not(HasSubstr("data.train"))));
  }
}

TEST(RunConfig, UnknownGroupNamesTheNearest) {
  EXPECT_THAT(ErrorOf("seed: 1\noptm:\n  lr: 1\n"),
              AllOf(HasSubstr("test.yaml:2"), HasSubstr("no group of keys 'optm'"),
                    HasSubstr("nearest is 'optim'")));
  EXPECT_THAT(ErrorOf("modle:\n  hidden_size: 64\n"), HasSubstr("nearest is 'model'"));
  EXPECT_THAT(ErrorOf("optim:\n  lr:\n    peak: 1\n"), HasSubstr("optim.lr holds a map"));
}

TEST(RunConfig, WrongTypeAndRangeNameKeyValueFileLine) {
  EXPECT_THAT(ErrorOf("seed: 1\nmodel:\n  hidden_size: wide\n"),
              AllOf(HasSubstr("test.yaml:3"), HasSubstr("model.hidden_size=wide"),
                    HasSubstr("whole number"), HasSubstr("≥ 1")));
  EXPECT_THAT(ErrorOf("data:\n  reverse_complement: 1.5\n"),
              AllOf(HasSubstr("test.yaml:2"), HasSubstr("1.5"), HasSubstr("[0, 1]")));
  EXPECT_THAT(ErrorOfOverride("device=tpu"), HasSubstr("cpu|cuda"));
  EXPECT_THAT(ErrorOfOverride("data.upper_case=yes"), HasSubstr("neither true nor false"));
  EXPECT_THAT(ErrorOfOverride("optim.lr=nan"), HasSubstr("is not a number"));
  EXPECT_THAT(ErrorOfOverride("optim.lr=\"1\""), HasSubstr("is not a number"));
  EXPECT_THAT(ErrorOfOverride("optim.lr=[1]"), HasSubstr("is a list"));
  EXPECT_THAT(ErrorOfOverride("optim.beta2=1"), HasSubstr("[0, 1)"));
  EXPECT_THAT(ErrorOfOverride("seed=-1"), HasSubstr("≥ 0"));
}

TEST(RunConfig, MalformedYamlAndOverrides) {
  EXPECT_THAT(ErrorOf("a: [1\n"), AllOf(HasSubstr("test.yaml:"), HasSubstr("not YAML")));
  EXPECT_THAT(ErrorOf("\n- 1\n"), AllOf(HasSubstr("test.yaml:2"), HasSubstr("key: value")));
  EXPECT_THAT(ErrorOf("hello\n"), AllOf(HasSubstr("test.yaml:1"), HasSubstr("key: value")));
  EXPECT_THAT(ErrorOf("seed: 1\n---\nseed: 2\n"),
              AllOf(HasSubstr("test.yaml:3"), HasSubstr("second document")));
  EXPECT_THAT(ErrorOf("seed: 1\n---\n"), HasSubstr("second document"));
  EXPECT_EQ(ErrorOf("---\nseed: 1\n...\n", kLegal), "");
  EXPECT_EQ(ErrorOf("# nothing\n", kLegal), "");
  EXPECT_THAT(ErrorOf("seed: 1\nseed: 2\n"), AllOf(HasSubstr(":2"), HasSubstr("twice")));
  EXPECT_THAT(ErrorOf("model: 3\n"), HasSubstr("group of keys"));
  EXPECT_THAT(ErrorOfOverride("data=x"), HasSubstr("data.train"));
  EXPECT_THAT(ErrorOf("seed: {a: 1}\n"), HasSubstr("map"));
  EXPECT_THAT(ErrorOfOverride("train.steps"), HasSubstr("train.steps=VALUE"));
}

TEST(RunConfig, ValuesMustFitTogether) {
  EXPECT_THAT(ErrorOfOverride("model.num_experts_per_tok=9"), HasSubstr("9 of 8 experts"));
  EXPECT_THAT(ErrorOfOverride("model.hidden_size=130"), HasSubstr("not divisible by 4 heads"));
  EXPECT_THAT(ErrorOfOverride("model.num_key_value_heads=3"), HasSubstr("divide"));
  EXPECT_THAT(ErrorOfOverride("model.head_dim=7"), HasSubstr("odd"));
  EXPECT_THAT(ErrorOfOverride("model.vocab_size=64"), HasSubstr("at least 128"));
  EXPECT_THAT(ErrorOfOverride("batch.global_tokens=2000"), HasSubstr("nearest is 2048"));
  EXPECT_THAT(ErrorOfOverride("batch.micro_tokens=4096"),
              HasSubstr("larger than the global batch"));
  EXPECT_THAT(ErrorOfOverride("optim.warmup_steps=2000"),
              AllOf(HasSubstr("train.steps="), HasSubstr("optim.warmup_steps (the command line)")));
  // A short run of a preset: both keys, and a value that works.
  const std::string preset = "optim:\n  warmup_steps: 122\ndata:\n  train: x.fa\noutput: run\n";
  EXPECT_THAT(ErrorOf(preset, {"train.steps=20"}),
              AllOf(HasSubstr("train.steps (the command line)=20"),
                    HasSubstr("optim.warmup_steps (test.yaml:2)=122"),
                    HasSubstr("add optim.warmup_steps=2")));
  EXPECT_EQ(ErrorOf(preset, {"train.steps=20", "optim.warmup_steps=2"}), "");
  EXPECT_THAT(ErrorOf(preset, {"optim.decay_end=100"}),
              AllOf(HasSubstr("optim.decay_end"), HasSubstr("add optim.warmup_steps=10")));
  EXPECT_THAT(ErrorOfOverride("data.weights=[1,2]"), HasSubstr("2 mixing weights for 1 files"));
  EXPECT_THAT(ErrorOfOverride("data.split=files"), HasSubstr("data.heldout"));
  EXPECT_THAT(ErrorOfOverride("data.train=[]"), HasSubstr("names no file"));
}

TEST(RunConfig, WhatThisVersionDoesNotDoIsRefusedByName) {
  EXPECT_THAT(ErrorOf("", Join(kLegal, {"device=cuda", "precision=mxfp8"})),
              AllOf(HasSubstr("precision"), HasSubstr("=mxfp8: device=cuda trains in fp32 and "
                                                      "bf16; use one of them, or device=cpu")));
  if (!cuda::IsBuilt()) {
    EXPECT_THAT(ErrorOfOverride("device=cuda"), HasSubstr("this build has no CUDA backend"));
  } else if (cuda::Devices().empty()) {
    EXPECT_THAT(ErrorOfOverride("device=cuda"), HasSubstr("no GPU can be used"));
  }
}

TEST(RunConfig, OptionsOfAnotherRecipeAreRefused) {
  EXPECT_THAT(ErrorOfOverride("recipe.margin=1"), HasSubstr("precision=fp32 has no such option"));
  EXPECT_EQ(ErrorOf("", Join(kLegal, {"precision=fp8_delayed", "recipe.margin=1"})), "");
  EXPECT_THAT(ErrorOf("", Join(kLegal, {"precision=mxfp8", "recipe.margin=1"})),
              HasSubstr("recipe.margin"));
}

TEST(RunConfig, RouterKeysWithoutEffectAreRefused) {
  const std::string rate = "model.moe_router_bias_update_rate", coef = "model.router_aux_loss_coef";
  EXPECT_THAT(ErrorOfOverride(rate + "=0.01"),
              AllOf(HasSubstr(rate + " (the command line)=0.01 has no effect"),
                    HasSubstr("without model.moe_router_enable_expert_bias=true"),
                    HasSubstr("remove the key")));
  EXPECT_THAT(ErrorOf("model:\n  router_aux_loss_coef: 0.02\n", kLegal),
              AllOf(HasSubstr(coef + " (test.yaml:2)=0.02 has no effect"),
                    HasSubstr("without model.output_router_logits=true")));
  EXPECT_EQ(ErrorOf("", Join(kLegal, {rate + "=0.01", "model.scoring_func=sigmoid",
                                      "model.moe_router_enable_expert_bias=true"})),
            "");
  EXPECT_EQ(ErrorOf("", Join(kLegal, {coef + "=0.02", "model.output_router_logits=true"})), "");
  // Nothing asked for, and nothing set: a run's own file, and the file of a model.
  EXPECT_EQ(ErrorOf("", Join(kLegal, {coef + "=0", rate + "=0"})), "");
  EXPECT_EQ(ErrorOf(ToYaml(ParseRunConfig("", "t", kLegal).config)), "");
  LoadedConfig imported = ParseRunConfig("", "t", kLegal);
  imported.config.model = model::ParseMixtralConfig(
      R"({"router_aux_loss_coef": 0.02, "output_router_logits": false})", "config.json");
  EXPECT_NO_THROW(CheckRunConfig(imported));
}

TEST(RunConfig, RouterErrorsNameKeysAsTheyAreTypedAndARemedy) {
  EXPECT_EQ(ErrorOfOverride("model.n_group=2"),
            "model.n_group (the command line): model.n_group=2 needs model.scoring_func=sigmoid; "
            "set it, or model.n_group=1");
  EXPECT_THAT(ErrorOf("model:\n  moe_router_enable_expert_bias: true\n", kLegal),
              AllOf(::testing::StartsWith("model.moe_router_enable_expert_bias (test.yaml:2): "),
                    HasSubstr("needs model.scoring_func=sigmoid; set it")));
  EXPECT_THAT(ErrorOfOverride("model.moe_router_pre_softmax=true"),
              HasSubstr("set model.norm_topk_prob=false"));
  EXPECT_THAT(ErrorOfOverride("model.topk_group=2"),
              HasSubstr("model.topk_group=2 exceeds model.n_group=1; lower"));
  EXPECT_THAT(ErrorOf("", Join(kLegal, {"model.scoring_func=sigmoid", "model.n_group=3"})),
              HasSubstr("model.n_group=3 does not divide model.num_local_experts=8; change one"));
}

TEST(RunConfig, LayersOutsideTheRecipeMustLeaveSome) {
  const auto error = [](const std::vector<std::string>& more) {
    return ErrorOf("", Join(Join(kLegal, {"precision=mxfp8", "model.num_hidden_layers=3"}), more));
  };
  EXPECT_EQ(error({"recipe.first_layers_bf16=1", "recipe.last_layers_bf16=1"}), "");
  const auto none = AllOf(HasSubstr("of 3 layers"), HasSubstr("no layer in mxfp8"));
  EXPECT_THAT(error({"recipe.first_layers_bf16=3"}),
              AllOf(none, HasSubstr("recipe.first_layers_bf16=3")));
  EXPECT_THAT(error({"recipe.last_layers_bf16=4"}),
              AllOf(none, HasSubstr("recipe.last_layers_bf16 (the command line)"),
                    HasSubstr("recipe.last_layers_bf16=4")));
  EXPECT_THAT(error({"recipe.first_layers_bf16=2", "recipe.last_layers_bf16=1"}), none);
  EXPECT_THAT(error({"recipe.first_layers_bf16=1", "recipe.last_layers_bf16=9223372036854775807"}),
              none);
}

TEST(RunConfig, PatternsOfBf16MustMatchAParameter) {
  const auto error = [](const std::string& patterns) {
    return ErrorOf("recipe:\n  bf16_patterns: " + patterns + "\n",
                   Join(kLegal, {"precision=fp8_block", "model.num_hidden_layers=2"}));
  };
  EXPECT_EQ(error("[\"*.down_proj\", model.layers.1.self_attn.q_proj.weight]"), "");
  EXPECT_THAT(error("[\"*.down_proj\", \"*dwon_proj\"]"),
              AllOf(HasSubstr("recipe.bf16_patterns (test.yaml:2)"), HasSubstr("'*dwon_proj'"),
                    HasSubstr("nearest names: model.layers.N.mlp.experts.down_proj")));
  EXPECT_THAT(error("[\"*layers.2.*\"]"),
              AllOf(HasSubstr("'*layers.2.*'"), HasSubstr("has 2 layers")));
  EXPECT_THAT(error("[\"*_proj*\"]"),
              AllOf(HasSubstr("*_proj*"), HasSubstr("no projection"), HasSubstr("fp8_block")));
  // A bare star is an alias of YAML; the help of the key says so.
  EXPECT_THAT(error("[*down_proj]"), HasSubstr("not YAML"));
  EXPECT_THAT(FindConfigKey("recipe.bf16_patterns")->help, HasSubstr("In quotes"));
}

TEST(RunConfig, HelpSaysThatTheLastEvaluationIsWhole) {
  EXPECT_THAT(FindConfigKey("eval.tokens")->help,
              HasSubstr("0: the whole held-out part, as the last evaluation of a run always is"));
}

// A run's own config.yaml, which has every key, is a preset like any other.
TEST(RunConfig, SavedConfigurationOfEveryPrecisionPasses) {
  for (const char* precision :
       {"fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"}) {
    SCOPED_TRACE(precision);
    const auto overrides = Join(kLegal, {std::string("precision=") + precision});
    const std::string saved = ToYaml(ParseRunConfig("", "t", overrides).config);
    EXPECT_EQ(ErrorOf(saved), "");
    // What the precision does not have is refused as before, in the file and over it.
    const bool delayed = std::string(precision) == "fp8_delayed";
    const std::string other = delayed ? "recipe.weights_2d" : "recipe.margin";
    const std::string value = delayed ? "off" : "1";
    const auto refused = AllOf(HasSubstr(other), HasSubstr("=" + value),
                               HasSubstr(std::string("precision=") + precision));
    EXPECT_THAT(ErrorOf(saved, {other + "=" + value}), refused);
    EXPECT_THAT(ErrorOf(other + ": " + value + "\n", overrides),
                AllOf(refused, HasSubstr("test.yaml:1")));
  }
}

TEST(RunConfig, LegalConfigurationPasses) {
  EXPECT_EQ(ErrorOf("", kLegal), "");
}

TEST(RunConfig, SavedYamlReadsBackTheSame) {
  const std::vector<std::string> overrides = {
      "data.train=[\"a b.fa\",c\\d.fa]", "optim.lr=0.1",      "model.head_dim=24", "optim.eps=1e-9",
      "data.tag_delimiters=[\"#\"]",     "run.on_exists=new", "aux_scope=sequence"};
  const RunConfig c = ParseRunConfig("", "t", overrides).config;
  const std::string yaml = ToYaml(c);
  const RunConfig again = ParseRunConfig(yaml, "saved", {}).config;
  EXPECT_EQ(ToYaml(again), yaml);
  EXPECT_TRUE(CompareConfigs(c, again).empty());
  EXPECT_EQ(again.data.train[1].path, "c\\d.fa");
}

TEST(RunConfig, EveryKeyHasItsOwnPlaceInTheYaml) {
  const std::string defaults = ToYaml(RunConfig());
  LoadedConfig loaded = ParseRunConfig(defaults, "t", {});
  EXPECT_EQ(loaded.origins.size(), ConfigKeys().size());
}

TEST(RunConfig, ComparisonShowsWhatDiffersAndSkipsMechanicalKeys) {
  const RunConfig a = ParseRunConfig("", "t", {"seed=1", "threads=1"}).config;
  const RunConfig b = ParseRunConfig("", "t", {"seed=2", "threads=2", "optim.lr=0.5"}).config;
  const auto differences = CompareConfigs(a, b);
  ASSERT_EQ(differences.size(), 2u);
  EXPECT_EQ(differences[0].key, "seed");
  EXPECT_EQ(differences[0].saved, "1");
  EXPECT_EQ(differences[0].given, "2");
  EXPECT_EQ(differences[1].key, "optim.lr");
}

// `auto` and what it comes to are no difference, and only that.
TEST(RunConfig, AutoIsNoDifferenceFromWhatItComesTo) {
  const auto differing = [](const std::vector<std::string>& both, const std::string& saved,
                            const std::string& given) {
    std::vector<std::string> keys;
    for (const ConfigDifference& d :
         CompareConfigs(ParseRunConfig("", "t", Join(both, {saved})).config,
                        ParseRunConfig("", "t", Join(both, {given})).config)) {
      keys.push_back(d.key + ": " + d.saved + " " + d.given);
    }
    return keys;
  };
  using ::testing::ElementsAre;
  using ::testing::IsEmpty;
  const std::string gradients = "optim.gradients=", weights = "recipe.weights_2d=";
  for (const char* precision : {"precision=fp32", "precision=bf16"}) {
    EXPECT_THAT(differing({precision}, gradients + "fp32", gradients + "auto"), IsEmpty());
  }
  EXPECT_THAT(differing({"precision=bf16"}, gradients + "auto", gradients + "bf16"),
              ElementsAre("optim.gradients: auto bf16"));
  const std::vector<std::string> narrow = {"precision=bf16", "optim.states=bf16"};
  EXPECT_THAT(differing(narrow, gradients + "bf16", gradients + "auto"), IsEmpty());
  EXPECT_THAT(differing(narrow, gradients + "fp32", gradients + "auto"),
              ElementsAre("optim.gradients: fp32 auto"));
  EXPECT_THAT(differing({"precision=fp8_block"}, weights + "auto", weights + "on"), IsEmpty());
  EXPECT_THAT(differing({"precision=fp8_block"}, weights + "auto", weights + "off"),
              ElementsAre("recipe.weights_2d: auto off"));
}

// Layouts train the same numbers: a rank's part of a batch that is cut may be one micro-batch.
TEST(RunConfig, AutoGradientsDoNotDependOnTheLayout) {
  const auto type = [](const char* micro, const char* dp) {
    return ParseRunConfig("", "t",
                          {"precision=bf16", "optim.states=bf16", "data.seq_len=64",
                           "batch.global_tokens=1024", micro, dp})
        .config.GradientDType();
  };
  for (const char* dp : {"parallel.dp=1", "parallel.dp=4"}) {
    EXPECT_EQ(type("batch.micro_tokens=0", dp), DType::kBF16);
    EXPECT_EQ(type("batch.micro_tokens=1024", dp), DType::kBF16);
    EXPECT_EQ(type("batch.micro_tokens=256", dp), DType::kF32);
  }
}

// A checkpoint of one device resumes on the other, in the same precision.
TEST(RunConfig, ADeviceMayChangeWhereARunResumes) {
  const RunConfig a = ParseRunConfig("", "t", {}).config;
  const RunConfig b = ParseRunConfig("", "t", {"device=cuda", "precision=bf16"}).config;
  const auto differences = CompareConfigs(a, b);
  ASSERT_EQ(differences.size(), 2u);
  EXPECT_EQ(differences[0].key, "device");
  EXPECT_EQ(differences[0].role, KeyRole::kTunable);
  EXPECT_EQ(differences[1].key, "precision");
  EXPECT_EQ(differences[1].role, KeyRole::kIdentity);
}

TEST(RunConfig, PresetsLoadAndPassTheirChecks) {
  const std::filesystem::path folder = std::filesystem::path(CISTRON_SOURCE_DIR) / "configs";
  std::set<std::string> presets;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path().string());
    LoadedConfig loaded = LoadRunConfig(entry.path(), {});
    CheckStep(loaded);  // as it is, whatever this machine has
    ResolveDataPaths(loaded, entry.path());
    EXPECT_NO_THROW(loaded.data_faults.Throw());
    for (const auto& file : loaded.config.data.train) {
      EXPECT_TRUE(std::filesystem::exists(file.path)) << file.path;
    }
    // A preset that leaves the data to the user says so, and misses nothing else.
    if (loaded.config.data.train.empty()) {
      std::stringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      EXPECT_THAT(text.str(), HasSubstr("data.train=FILE"));
      loaded = LoadRunConfig(entry.path(), {"data.train=mine.fa"});
    }
    loaded.config.device = DeviceChoice::kCpu;
    CheckRunConfig(loaded);
    presets.insert(entry.path().stem().string());
  }
  EXPECT_THAT(presets, ::testing::IsSupersetOf({"L0_sanity", "L1_8x7B_ep", "L1_8x7B_bench",
                                                "og2_8x1B", "protein_moe", "ecoli_2min"}));
}

TEST(RunConfig, PresetsOfManyRanks) {
  const LoadedConfig two = LoadRunConfig(FindPreset("L0_sanity"), {"parallel.ep=2"});
  CheckStep(two);
  EXPECT_EQ(two.config.RowsPerMicroBatch() * 2, two.config.RowsPerStep());
  const RunConfig mixtral = LoadRunConfig(FindPreset("L1_8x7B_ep"), {}).config;
  EXPECT_EQ(mixtral.Ranks(), 8);
  // 45.1 G of experts and 1.35 G of all else.
  EXPECT_EQ(model::ParameterCount(mixtral.model),
            32LL * 8 * 3 * 4096 * 14336 + 32LL * 10 * 4096 * 1024 + 32LL * (8 + 2) * 4096 + 4096 +
                2LL * 256 * 4096);
  const RunConfig og2 = LoadRunConfig(FindPreset("og2_8x1B"), {}).config;
  EXPECT_EQ(model::ParameterCount(og2.model), 16LL * 8 * 3 * 2048 * 4096 + 16LL * 6 * 2048 * 1024 +
                                                  16LL * (8 + 2) * 2048 + 2048 + 2LL * 256 * 2048);
}

TEST(RunConfig, RowsTravelQuantisedWhereThatChangesNothing) {
  const auto error = [](const std::vector<std::string>& keys) {
    return ErrorOf("", Join(Join(kLegal, keys), {"parallel.ep_rows=quantized"}));
  };
  EXPECT_EQ(error({"precision=mxfp8"}), "");
  EXPECT_EQ(error({"precision=fp8_block"}), "");
  for (const std::vector<std::string>& keys : std::vector<std::vector<std::string>>{
           {"precision=bf16"},
           {"precision=fp8_current"},
           {"precision=fp8_delayed"},
           {"precision=fp8_block", "recipe.power_of_two_scales=off"}}) {
    EXPECT_THAT(error(keys), AllOf(HasSubstr("parallel.ep_rows (the command line)=quantized"),
                                   HasSubstr(keys.front()), HasSubstr(keys.back())));
  }
}

TEST(RunConfig, RowsGoByTheHostsWhereNoStepCanBeMadeAgain) {
  const auto why = [](const std::vector<std::string>& keys) {
    return ParseRunConfig("", "x.yaml", Join(kLegal, keys)).config.WhyRowsByHost();
  };
  EXPECT_EQ(why({"precision=fp32"}), "");
  EXPECT_EQ(why({"precision=bf16"}), "");
  EXPECT_EQ(why({"precision=bf16", "parallel.ep_sync=host"}), "parallel.ep_sync=host");
  EXPECT_THAT(why({"precision=fp8_delayed"}), HasSubstr("DelayedScaling keeps state on the host"));
  EXPECT_THAT(why({"precision=mxfp8"}), HasSubstr("MXFP8BlockScaling"));
}

TEST(RunConfig, MissingPresetListsTheKnownOnes) {
  EXPECT_EQ(FindPreset("L0_sanity").stem(), "L0_sanity");
  try {
    FindPreset("L0_santy");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), AllOf(HasSubstr("'L0_santy'"), HasSubstr("L0_sanity")));
  }
}

}  // namespace
}  // namespace cistron::train
