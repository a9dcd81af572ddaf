// The program from outside: exit statuses, error texts, signals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "cistron/io/file.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/tiny_run.h"
#include "tests/subprocess.h"

namespace cistron {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ProgramTest : public ::testing::Test {
 protected:
  struct Result {
    int status;
    std::string out, err;
  };
  Result Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), CISTRON_PROGRAM);
    testing::Process process(tiny_.path("."), arguments);
    const int status = process.Wait();
    return {status, process.Output(), process.Errors()};
  }
  Result Train(const std::vector<std::string>& overrides) {
    std::vector<std::string> arguments = tiny_.Overrides("run", overrides);
    arguments.insert(arguments.begin(), "train");
    return Run(arguments);
  }
  std::string File(const std::string& name, const std::string& content) {
    std::ofstream(tiny_.path(name), std::ios::binary) << content;
    return tiny_.path(name).string();
  }
  static std::string Bases(std::size_t count) {
    std::string bases;
    for (std::size_t i = 0; i < count; ++i) bases += "ACGTTGCATT"[i % 10];
    return bases;
  }
  static std::string Golden(const std::string& name) {
    return std::string(CISTRON_SOURCE_DIR) + "/tests/golden/" + name;
  }

  train::TinyRun tiny_{"program"};
};

TEST_F(ProgramTest, IdleThreadsSpinShortlyUnlessTheUserChose) {
  const char* tests_choice = std::getenv("OMP_WAIT_POLICY");
  const std::string kept = tests_choice == nullptr ? "" : tests_choice;
  unsetenv("OMP_WAIT_POLICY");
  const Result chosen = Run({"info"});
  setenv("GOMP_SPINCOUNT", "77", 1);
  const Result count = Run({"info"});
  unsetenv("GOMP_SPINCOUNT");
  setenv("OMP_WAIT_POLICY", "active", 1);
  const Result active = Run({"info"});
  if (tests_choice == nullptr) {
    unsetenv("OMP_WAIT_POLICY");
  } else {
    setenv("OMP_WAIT_POLICY", kept.c_str(), 1);
  }
  EXPECT_THAT(chosen.out, AllOf(ContainsRegex("GOMP_SPINCOUNT +10000"),
                                ContainsRegex("OMP_WAIT_POLICY +not set")));
  EXPECT_THAT(count.out, ContainsRegex("GOMP_SPINCOUNT +77"));
  EXPECT_THAT(active.out, AllOf(ContainsRegex("GOMP_SPINCOUNT +not set"),
                                ContainsRegex("OMP_WAIT_POLICY +active")));
}

TEST_F(ProgramTest, InstructionSetIsLimitedByTheEnvironment) {
  setenv("CISTRON_ISA", "avx2", 1);
  const Result avx2 = Run({"info"});
  setenv("CISTRON_ISA", "avx1024", 1);
  const Result unknown = Run({"info"});
  unsetenv("CISTRON_ISA");
  EXPECT_THAT(avx2.out, ContainsRegex("kernels +avx2"));
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.err, HasSubstr("CISTRON_ISA=avx1024 is no known instruction set"));
}

TEST_F(ProgramTest, AMisspeltChoiceOfAnImplementationIsAnError) {
  const char* given = std::getenv("CISTRON_IMPL");
  const std::string kept = given == nullptr ? "" : given;
  setenv("CISTRON_IMPL", "atention=ref", 1);
  const Result misspelt = Train({"train.steps=2"});
  setenv("CISTRON_IMPL", "attention=ref", 1);
  const Result right = Train({"train.steps=2"});
  setenv("CISTRON_IMPL", kept.c_str(), 1);  // empty is as unset
  EXPECT_EQ(misspelt.status, 2);
  EXPECT_THAT(misspelt.err, AllOf(HasSubstr("no op 'atention'"), HasSubstr("'attention'")));
  EXPECT_EQ(right.status, 0) << right.err;
}

// An implementation of a GPU: refused before the run has a file, whether it is explained, strict or
// trained.
TEST_F(ProgramTest, AnImplementationOfAnotherDeviceIsRefusedAtStart) {
  const char* given = std::getenv("CISTRON_IMPL");
  const std::string kept = given == nullptr ? "" : given;
  setenv("CISTRON_IMPL", "attention=cuda", 1);
  std::vector<std::string> explain = tiny_.Overrides("run");
  explain.insert(explain.begin(), {"train", "--explain"});
  std::vector<Result> results = {Train({}), Train({"strict=true"}), Run(explain),
                                 Run({"verify", Golden("mixtral_tiny")})};
  setenv("CISTRON_IMPL", "adamw=cpu", 1);
  const Result refuses = Train({"precision=bf16", "optim.states=bf16"});
  setenv("CISTRON_IMPL", kept.c_str(), 1);  // empty is as unset
  for (const Result& r : results) {
    EXPECT_EQ(r.status, 2);
    EXPECT_EQ(r.out, "");
    EXPECT_THAT(r.err, AllOf(HasSubstr("CISTRON_IMPL: attention=cuda: "), HasSubstr("on cpu"),
                             HasSubstr("cpu, ref"), HasSubstr("device=cuda")));
  }
  EXPECT_EQ(refuses.status, 2);
  EXPECT_THAT(refuses.err, AllOf(HasSubstr("CISTRON_IMPL asks for 'cpu' of adamw"),
                                 HasSubstr("bf16 states"), HasSubstr("there are cpu, ref")));
  EXPECT_FALSE(fs::exists(tiny_.path("run")));
}

// The whole message, whatever a name holds.
TEST_F(ProgramTest, NamesWithControlBytesCutNoMessage) {
  const std::string file = File("nul.fa", std::string(">a\0b\nACGT\n", 10));
  const Result r = Train({"data.train=" + file});
  EXPECT_EQ(r.status, 2);
  EXPECT_THAT(r.err, AllOf(HasSubstr("record 'a\\x00b': NUL byte in the header line"),
                           HasSubstr("the file is binary or damaged\n")));
}

TEST_F(ProgramTest, HelpOfEveryVerbHasExamplesAndSucceeds) {
  const Result all = Run({"--help"});
  EXPECT_EQ(all.status, 0);
  EXPECT_THAT(all.out, HasSubstr("Exit status"));
  for (const char* verb : {"train", "launch", "eval", "score", "baseline", "convert", "report",
                           "inspect", "info", "verify", "bench"}) {
    SCOPED_TRACE(verb);
    EXPECT_THAT(all.out, HasSubstr(verb));
    const Result help = Run({verb, "--help"});
    EXPECT_EQ(help.status, 0);
    EXPECT_THAT(help.out, ContainsRegex("Example"));
  }
  EXPECT_THAT(Run({"train", "--help"}).out, HasSubstr("model.num_experts_per_tok"));
  EXPECT_THAT(Run({"--version"}).out, StartsWith("cistron "));
}

TEST_F(ProgramTest, WrongUsageIsStatusTwoAndOneScreen) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"trian"},
      {"train", "--no-such-option"},
      {"train", "seed"},
      {"train", "sed=1"},
      {"train", "--config-name", "no_such_preset"},
      {"eval"},
      {"eval", "/nonexistent"},
      {"convert", "/nonexistent", "/tmp/never"},
      {"report", "/nonexistent"},
      {"inspect", "/nonexistent"},
      {"verify", "/nonexistent"},
      {"bench", "--model", "huge"},
  };
  for (const auto& arguments : cases) {
    const Result r = Run(arguments);
    SCOPED_TRACE(arguments.empty() ? "(nothing)" : arguments.back());
    EXPECT_EQ(r.status, 2) << r.err;
    EXPECT_THAT(r.err, StartsWith("error: "));
    EXPECT_LT(std::count(r.err.begin(), r.err.end(), '\n'), 24);
  }
}

TEST_F(ProgramTest, BadInputIsStatusTwoAndLeavesNothing) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"data.train=" + tiny_.path("missing.fa").string(), "missing.fa"},
      {"data.train=" + File("empty.fa", ""), "empty"},
      {"data.train=" + File("text.fa", "Dear all,\nthis is no sequence\n"), "text.fa:1"},
      {"data.train=" + File("protein.fa", ">p\nMKVLAAGIVGLLLAQPS\n"), "protein.fa:2"},
      {"data.train=" + File("headers.fa", ">a\n>b\n"), "no sequence"},
      {"data.train=" + File("nul.fa", ">n\nACGT" + std::string(1, '\0') + "ACGT\n"), "nul.fa:2"},
      {"data.train=" + File("torn.fa.gz", "\x1f\x8b\x08"), "torn.fa.gz"},
      {"data.train_fraction=1", "held-out"},
      {"data.train=" + File("n_last.fa", ">a\n" + Bases(1900) + std::string(200, 'N') + "\n"),
       "no base to score"},
      {"data.train=" + File("n_first.fa", ">a\n" + std::string(1900, 'N') + Bases(100) + "\n"),
       "data.soft_mask_weight"},
      {"data.stride=33", "data.stride (the command line)=33"},
      {"batch.global_tokens=1e6", "batch.global_tokens"},
      {"model.num_experts_per_tok=5", "5 of 4 experts"},
      {"model.hidden_size=17", "not divisible"},
      {"output=/proc/no/such", "output=/proc/no/such"},
      {"output=" + tiny_.path("tiny.fa").string(), "not a directory"},
      {"init.from=" + tiny_.path("nothing").string(), "nothing"},
  };
  for (const auto& [key, text] : cases) {
    SCOPED_TRACE(key);
    const Result r = Train({key});
    EXPECT_EQ(r.status, 2);
    EXPECT_THAT(r.err, AllOf(StartsWith("error: "), HasSubstr(text)));
    EXPECT_FALSE(fs::exists(tiny_.path("run")));
  }
}

TEST_F(ProgramTest, ExplainShowsThePlanAndTrainsNothing) {
  std::vector<std::string> arguments =
      tiny_.Overrides("run", {"train.steps=3", "precision=mxfp8", "recipe.last_layers_bf16=1"});
  arguments.insert(arguments.begin(), {"train", "--explain", "--no-report"});
  const Result explained = Run(arguments);
  EXPECT_EQ(explained.status, 0) << explained.err;
  EXPECT_FALSE(fs::exists(tiny_.path("run")));
  EXPECT_THAT(explained.out, Not(AnyOf(HasSubstr("step "), HasSubstr("cuda"))));
  EXPECT_THAT(explained.out,
              AllOf(ContainsRegex("grouped_mlp +cpu\n"), ContainsRegex("quantized_gemm +cpu\n"),
                    HasSubstr("implementations on cpu in mxfp8"),
                    HasSubstr("layers 0:\nforward:\n"), HasSubstr("layers 1:\nforward:\n"),
                    HasSubstr("experts.down_proj; recipe MXFP8BlockScaling\n"),
                    HasSubstr("GroupedMLP = GroupedLinear model.layers.*.mlp.experts.gate_up_proj"),
                    HasSubstr("backward, as it runs:"), HasSubstr("128 tokens of a micro-batch"),
                    HasSubstr("recipe MXFP8BlockScaling\n"), ContainsRegex("recipe.format +e4m3\n"),
                    ContainsRegex("weights_2d +off\n"),
                    ContainsRegex("recipe.last_layers_bf16 +1\n"), Not(HasSubstr("margin"))));
}

// A user who accumulates gradients in bf16 is told so before the run.
TEST_F(ProgramTest, RoundedGradientsAreSaidAhead) {
  const std::string text = "\ngradients of matrices in bf16",
                    more = ", rounded at every micro-batch";
  for (const bool several : {false, true}) {
    const std::string micro = fmt::format("batch.micro_tokens={}", several ? 64 : 0);
    const std::vector<std::string> keys = {"precision=bf16", "optim.gradients=bf16", micro};
    std::vector<std::string> explain = tiny_.Overrides("run", keys), plan = explain;
    explain.insert(explain.begin(), {"train", "--explain"});
    plan.insert(plan.begin(), "plan");
    for (const auto& arguments : {explain, plan}) {
      const Result r = Run(arguments);
      EXPECT_EQ(r.status, 0) << r.err;
      EXPECT_THAT(r.out, HasSubstr(text + (several ? more : "") + "\n"));
    }
  }
}

// The same on every machine, but for the line that says whether it runs here.
TEST_F(ProgramTest, ExplainNeedsNoGpu) {
  std::vector<std::string> arguments = tiny_.Overrides(
      "run",
      {"device=cuda", "precision=bf16", "model.hidden_size=64", "model.intermediate_size=64"});
  arguments.insert(arguments.begin(), {"train", "--explain"});
  const Result r = Run(arguments);
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_THAT(r.out,
              AllOf(HasSubstr("implementations on cuda:0 in bf16"),
                    ContainsRegex("cross_entropy +cuda\n"), HasSubstr("fusion of the experts"),
                    HasSubstr("model.layers.*.mlp.experts.gate_up_proj")));
  const bool here = cuda::IsBuilt() && !cuda::Devices().empty();
  EXPECT_EQ(r.out.find("here nothing runs on one: cuda: ") == std::string::npos, here) << r.out;
  EXPECT_FALSE(fs::exists(tiny_.path("run")));
  // Training does.
  if (!here) {
    EXPECT_EQ(Train({"device=cuda"}).status, 2);
  }
}

// As a run asks: packed proteins with heads of 64, and rows of a genome with heads of 32, have
// attention of our own kernels; rows of a genome with heads of 64 have cuDNN's. How long sequences
// are comes from the data where that is there, and is said to be assumed where not.
TEST_F(ProgramTest, ExplainNamesTheAttentionThatRuns) {
  struct Case {
    std::vector<std::string> keys;
    const char *attention, *sequences;
  };
  const std::string rows = ">r\n" + Bases(4096) + "\n", missing = tiny_.path("no.fa").string();
  const std::string full = "data.train=" + File("rows.fa", rows), none = "data.train=[]";
  const std::string split = "data.split=none", protein = "data.alphabet=protein";
  const std::vector<Case> cases = {
      {{protein, "model.head_dim=64", none},
       "flash",
       "assumed to be 16 tokens long on average, half of data.seq_len=32, since data.train names "
       "no file"},
      {{protein, "model.head_dim=64", "data.train=" + missing, "data.seq_len=1024",
        "model.max_position_embeddings=1024", "batch.global_tokens=1024"},
       "flash",
       "assumed to be 350 tokens long on average, as proteins of UniProt are, since the files of "
       "data.train are not all here"},
      {{protein, "model.head_dim=64",
        "data.train=" + File("short.fa", ">a\nMKTAYIAKQR\n>b\n" + std::string(34, 'M') + "\n" +
                                             std::string(400, 'M') + "\n"),
        split},
       "flash",
       // Of 10 and 434 residues: one window of 10, and 14 of 32, the last of which begins earlier.
       "those of data.train, cut at data.seq_len=32, are 31 tokens long on average"},
      {{"model.head_dim=32", none},
       "flash",
       "assumed to fill rows of data.seq_len=32, since data.train names no file"},
      {{"model.head_dim=64", none}, "cudnn", "assumed to fill rows"},
      {{"model.head_dim=64", full, split},
       "cudnn",
       "all those of data.train fill rows of data.seq_len=32"},
  };
  for (const Case& c : cases) {
    std::vector<std::string> arguments =
        tiny_.Overrides("run", {"device=cuda", "precision=bf16", "output="});
    arguments.insert(arguments.end(), c.keys.begin(), c.keys.end());
    arguments.insert(arguments.begin(), {"train", "--explain"});
    const Result r = Run(arguments);
    EXPECT_EQ(r.status, 0) << r.err;
    EXPECT_THAT(r.out, ContainsRegex(fmt::format("\n  attention +{}\n", c.attention)));
    EXPECT_THAT(r.out, HasSubstr(fmt::format("\nsequences: {}", c.sequences)));
  }
}

TEST_F(ProgramTest, ExplainSaysWhichLayoutItIsOf) {
  const auto explain = [this](const std::vector<std::string>& keys) {
    std::vector<std::string> arguments = tiny_.Overrides("run", keys);
    arguments.insert(arguments.begin(), {"train", "--explain"});
    const Result r = Run(arguments);
    EXPECT_EQ(r.status, 0) << r.err;
    return r.out;
  };
  EXPECT_THAT(explain({}),
              StartsWith("layout: 1 rank, parallel.dp=1 parallel.ep=1 parallel.shard=none\n"));
  const std::string four = explain({"parallel.dp=2", "parallel.ep=2", "parallel.shard=full"});
  EXPECT_THAT(four, StartsWith("layout: 4 ranks, parallel.dp=2 parallel.ep=2 parallel.shard=full; "
                               "what follows is of one of them, with 2 of 4 experts a layer\n"));
  EXPECT_THAT(four, HasSubstr("for the 32 tokens of a micro-batch"));
  // A number of ranks that the run would refuse.
  std::vector<std::string> arguments = tiny_.Overrides("run", {"parallel.ep=2"});
  arguments.insert(arguments.begin(), {"train", "--explain", "--ranks", "3"});
  const Result wrong = Run(arguments);
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.err, HasSubstr("must be the number of ranks, which is 3"));
}

TEST_F(ProgramTest, LaunchWithoutANumberOfRanksSaysWhichToGive) {
  const auto launch = [this](const std::vector<std::string>& words) {
    std::vector<std::string> arguments = {"launch"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const Result r = Run(arguments);
    EXPECT_EQ(r.status, 2);
    EXPECT_EQ(r.out, "");
    return r.err;
  };
  const std::string name = "--config-name";
  EXPECT_THAT(launch({"train", name, "L0_sanity", "parallel.ep=2", "parallel.dp=4"}),
              HasSubstr("write `cistron launch -n 8 train --config-name L0_sanity parallel.ep=2 "
                        "parallel.dp=4`\n"));
  // The layout of a preset, which needs no data here, whatever stands around its name.
  EXPECT_THAT(launch({"train", name, "L1_8x7B_ep"}), HasSubstr("launch -n 8 train --config-name "));
  EXPECT_THAT(launch({"train", "--no-report", "seed=2", name + "=L1_8x7B_ep", "parallel.dp=2"}),
              HasSubstr("launch -n 16 train --no-report"));
  EXPECT_THAT(launch({"train", "--ranks", "4", name, "L1_8x7B_ep"}), HasSubstr("launch -n 8 "));
  // The last value of a key counts, as it does in a configuration.
  EXPECT_THAT(launch({"train", "parallel.dp=2", "parallel.ep=4", "parallel.ep=2"}),
              HasSubstr("launch -n 4 train"));
  // As a shell reads it.
  EXPECT_THAT(
      launch({"train", name, "L1_8x7B_ep", "output=my runs/it's $1"}),
      HasSubstr("launch -n 8 train --config-name L1_8x7B_ep 'output=my runs/it'\\''s $1'`"));
  // Where nothing says how many.
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{}, {"info"}, {"train", name, "L0_sanity"}}) {
    EXPECT_THAT(launch(words), AllOf(HasSubstr("write `cistron launch -n N "),
                                     HasSubstr("as in `cistron launch -n 2 ")));
  }
  // No number that the run would refuse.
  for (const auto& [keys, told] :
       {std::pair{std::vector<std::string>{"parallel.ep=2", "parallel.dp=3"},
                  "rows of 256 tokens cannot be dealt evenly to 6 ranks"},
        {{"parallel.ep=3"}, "8 experts cannot be dealt evenly to 3 ranks"},
        {{"parallel.ep=x"}, "parallel.ep=x is not a whole number"},
        {{"parallel.dp=2000", "parallel.ep=3000"}, "cannot be dealt evenly"}}) {
    std::vector<std::string> words = {"train", name, "L0_sanity"};
    words.insert(words.end(), keys.begin(), keys.end());
    EXPECT_THAT(launch(words), AllOf(HasSubstr(told), Not(HasSubstr("launch -n"))));
  }
  EXPECT_THAT(launch({"train", name, "L0_santy"}), HasSubstr("there is no preset 'L0_santy'"));
}

TEST_F(ProgramTest, PlanNeedsNeitherDataNorDevice) {
  const Result fits = Run({"plan", "data.seq_len=64", "batch.global_tokens=1024"});
  EXPECT_EQ(fits.status, 0) << fits.err;
  EXPECT_THAT(fits.out, AllOf(HasSubstr("activations"), HasSubstr("peak"), HasSubstr("fits: ")));
  const Result large = Run({"plan", "--model", "8x7b_2layers", "--precision", "bf16", "--device",
                            "cuda", "plan.memory_gib=50"});
  EXPECT_EQ(large.status, 2);
  EXPECT_THAT(large.out, AllOf(HasSubstr("does not fit"),
                               HasSubstr("largest: moments of experts 21.0 GiB, masters of experts "
                                         "10.5 GiB, gradients of experts 10.5 GiB")));
  for (const auto& [key, text] : {std::pair{"cluster=1xV1", "one of A100, H100"},
                                  {"cluster=12xH200", "the nearest is 16xH200"},
                                  {"plan.ep_buffer_factor=0.5", "of at least 1"},
                                  {"plan.memory_gib=many", "not a number of GiB"},
                                  {"plan.memory=3", "there is no key"}}) {
    const Result bad = Run({"plan", key});
    EXPECT_EQ(bad.status, 2) << key;
    EXPECT_THAT(bad.err, HasSubstr(text));
  }
  // What would be passed over is refused.
  const Result option =
      Run({"plan", "--config-name", "L1_8x7B_ep", "cluster=8xH200", "--gradients", "bf16"});
  EXPECT_EQ(option.status, 2);
  EXPECT_THAT(option.err, HasSubstr("give the key optim.gradients="));
  const Result narrow = Run({"plan", "--model", "8x7b_2layers", "--gradients", "bf16"});
  EXPECT_EQ(narrow.status, 2);
  EXPECT_THAT(narrow.err, HasSubstr("give --precision bf16"));
  const Result states = Run({"plan", "--model", "8x7b_2layers", "--states", "bf16"});
  EXPECT_EQ(states.status, 2);
  EXPECT_THAT(states.err, HasSubstr("give --precision bf16"));
}

// The system would kill it without a word.
TEST_F(ProgramTest, ARunThatThisMachineCannotHoldIsRefused) {
  const Result r = Train({"parallel.ep=2", "model.intermediate_size=1000000000"});
  EXPECT_EQ(r.status, 2);
  EXPECT_THAT(r.err, AllOf(HasSubstr("this machine has"), HasSubstr("on each of 2 ranks here")));
  EXPECT_THAT(r.err, Not(HasSubstr("warning")));
}

TEST_F(ProgramTest, PlanOfAClusterRanksLayouts) {
  const Result r = Run({"plan", "--config-name", "L1_8x7B_ep", "cluster=8xH200"});
  EXPECT_EQ(r.status, 0) << r.err;
  for (const char* text :
       {"46.4G parameters", "layout: parallel.dp=1 parallel.ep=8", "communication",
        "fits: ", "a GPU sends in a step", "time of a step: ", "assumed: ", "layouts, best first",
        "of the 140.4 GiB of a GPU 1.0 GiB are the device's own, beside what is in the column\n",
        "does not fit: moments of experts"}) {
    EXPECT_THAT(r.out, HasSubstr(text));
  }
  const Result small = Run({"plan", "--config-name", "L1_8x7B_ep", "cluster=8xH100"});
  EXPECT_EQ(small.status, 2);
  EXPECT_THAT(small.out, AllOf(HasSubstr("does not fit"), HasSubstr("largest: ")));
  // Whatever the preset runs on, a cluster has GPUs.
  const Result cpu = Run({"plan", "--config-name", "L0_sanity", "cluster=2xB200"});
  EXPECT_EQ(cpu.status, 0) << cpu.err;
  EXPECT_THAT(cpu.out, HasSubstr("not predicted; rates are known for bf16"));
  for (const auto& [cluster, text] : {std::pair{"cluster=2xB200", "precision=bf16 alone, not fp32"},
                                      {"cluster=1xB200", "one GPU has none to send to"},
                                      {"train.steps=1", "name the cluster"}}) {
    const Result bad =
        Run({"plan", "--config-name", "L0_sanity", cluster, "--simulate", "optim.warmup_steps=1"});
    EXPECT_EQ(bad.status, 2);
    EXPECT_EQ(bad.out, "");
    EXPECT_THAT(bad.err, HasSubstr(text));
  }
  const Result simulated = Run({"plan", "--model", "8x7b_2layers", "--precision", "bf16",
                                "--device", "cuda", "cluster=2xH200", "--simulate"});
  EXPECT_EQ(simulated.status, 0) << simulated.err;
  EXPECT_THAT(simulated.out, HasSubstr("simulated: 2 ranks"));
}

TEST_F(ProgramTest, PlanOfAClusterInJson) {
  const Result r = Run({"plan", "--json", "--config-name", "L1_8x7B_ep", "cluster=8xH200"});
  EXPECT_EQ(r.status, 0) << r.err;
  const auto plan = nlohmann::json::parse(r.out);
  EXPECT_EQ(plan.at("cluster"), "8xH200");
  EXPECT_EQ(plan.at("tokens"), 1048576);
  ASSERT_EQ(plan.at("layouts").size(), 8u);  // ep of 1, 2, 4 and 8, whole and sharded
  bool fits = true;
  for (const auto& layout : plan.at("layouts")) {
    EXPECT_EQ(layout.at("dp").get<int>() * layout.at("ep").get<int>(), 8);
    EXPECT_TRUE(fits || !layout.at("fits").get<bool>()) << "those that fit come first";
    fits = layout.at("fits");
    EXPECT_GT(layout.at("peak_bytes"), layout.at("reserved_bytes"));
    // Of 16 micro-batches of 8,192 tokens.
    EXPECT_NEAR(layout.at("tokens_per_s_gpu").get<double>(),
                131072e3 / layout.at("step_ms").get<double>(), 1e-6);
  }
  // Buffers are the run's, unless the plan is told otherwise; none where hosts count the rows.
  const auto peak = [&](const char* key) {
    const Result of = Run({"plan", "--json", "--config-name", "L1_8x7B_ep", "cluster=8xH200",
                           "recompute=none", "model.num_hidden_layers=14", key});
    EXPECT_EQ(of.status, 0) << of.err;
    const auto all = nlohmann::json::parse(of.out);
    for (const auto& layout : all.at("layouts")) {
      if (layout.at("ep") == 8 && layout.at("shard") == "none") {
        return layout.at("peak_bytes").get<std::int64_t>();
      }
    }
    return std::int64_t{0};
  };
  EXPECT_EQ(peak("parallel.ep_buffer_factor=3"), peak("plan.ep_buffer_factor=3"));
  EXPECT_GT(peak("parallel.ep_buffer_factor=3"), peak("parallel.ep_buffer_factor=2"));
  EXPECT_EQ(peak("parallel.ep_sync=host"), peak("plan.ep_buffer_factor=1"));
  const Result factor = Run({"plan", "--config-name", "L0_sanity", "plan.ep_buffer_factor=2"});
  EXPECT_EQ(factor.status, 2);
  EXPECT_THAT(factor.err, HasSubstr("give parallel.ep_buffer_factor"));
  const Result none = Run({"plan", "--json", "--config-name", "L0_sanity"});
  EXPECT_EQ(none.status, 2);
  EXPECT_THAT(none.err, HasSubstr("name the cluster"));
}

// Of a machine without a GPU, and of one where none is shown.
TEST_F(ProgramTest, ADeviceThatIsNotThereIsAnError) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  const Result r = Train({"device=cuda"});
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(r.status, 2);
  EXPECT_THAT(r.err, AllOf(StartsWith("error: cuda: "), HasSubstr("device=cpu")));
  EXPECT_FALSE(fs::exists(tiny_.path("run")));
}

// The recipe of one of the two products is another: GroupedMLP refuses, and says what to change.
TEST_F(ProgramTest, StrictMakesAFusionThatDoesNotFireAnError) {
  const std::vector<std::string> overrides = {"train.steps=3", "precision=mxfp8",
                                              "recipe.bf16_patterns=[\"*.down_proj\"]"};
  EXPECT_EQ(Train(overrides).status, 0);
  fs::remove_all(tiny_.path("run"));
  std::vector<std::string> strict = overrides;
  strict.push_back("strict=true");
  const Result refused = Train(strict);
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(
      refused.err,
      AllOf(HasSubstr("strict=true refuses this run:\n  layers 0, 1: GroupedMLP (joint) does "
                      "not fire: model.layers.*.mlp.experts."),
            HasSubstr("remedy: let the patterns of high-precision layers name both")));
  EXPECT_FALSE(fs::exists(tiny_.path("run")));
  // All that is refused, of layers that differ; and an op.
  const Result several =
      Train({"strict=true", "precision=mxfp8",
             "recipe.bf16_patterns=[\"*.0.*.down_proj\", \"*.1.*.gate_up_proj\"]"});
  EXPECT_EQ(several.status, 2);
  EXPECT_THAT(several.err, AllOf(HasSubstr("\n  layers 0: GroupedMLP (joint)"),
                                 HasSubstr("\n  layers 1: GroupedMLP (joint)")));
  const Result op = Train({"strict=true", "precision=bf16", "optim.states=bf16"});
  EXPECT_EQ(op.status, 2);
  EXPECT_THAT(op.err, AllOf(HasSubstr("adamw (update): 'ref' would run"),
                            HasSubstr("CISTRON_IMPL=adamw=ref")));
  EXPECT_FALSE(fs::exists(tiny_.path("run")));
}

TEST_F(ProgramTest, NonFiniteLossIsStatusTwoWithStepAndLayer) {
  const Result r = Train({"optim.lr=1e30", "optim.warmup_steps=0"});
  EXPECT_EQ(r.status, 2);
  EXPECT_THAT(r.err, AllOf(HasSubstr("step 2"), HasSubstr("layer")));
}

TEST_F(ProgramTest, VerifyOfAnotherPathSaysWhatToGive) {
  const Result folder = Run({"verify", Golden("")});
  EXPECT_EQ(folder.status, 2);
  EXPECT_THAT(folder.err, AllOf(HasSubstr("give one of these"), HasSubstr("mixtral_gqa8"),
                                HasSubstr("numerics.safetensors")));
  const Result file = Run({"verify", File("notes.md", "# Notes\n")});
  EXPECT_EQ(file.status, 2);
  EXPECT_THAT(file.err, HasSubstr("not golden values"));
  // Files of a model folder, and one of numerics with an option that would do nothing.
  for (const char* inside : {"mixtral_tiny/golden.safetensors", "mixtral_tiny/model.safetensors"}) {
    const Result part = Run({"verify", Golden(inside)});
    EXPECT_EQ(part.status, 2);
    EXPECT_THAT(part.err, HasSubstr("give " + Golden("mixtral_tiny") + "\n"));
  }
  const Result formats = Run({"verify", Golden("numerics2.safetensors"), "--precision", "fp32"});
  EXPECT_EQ(formats.status, 2);
  EXPECT_EQ(formats.out, "");
  EXPECT_THAT(formats.err, AllOf(HasSubstr("--precision fp32"), HasSubstr("leave the option out")));
  EXPECT_EQ(Run({"verify", Golden("numerics2.safetensors")}).status, 0);
  EXPECT_THAT(Run({"verify", Golden("mixtral_tiny"), "--precision", "bf16"}).out,
              HasSubstr("bound: twice the error"));
}

TEST_F(ProgramTest, VerifySaysYesAndNo) {
  const Result good = Run({"verify", Golden("mixtral_tiny")});
  EXPECT_EQ(good.status, 0) << good.out << good.err;
  EXPECT_THAT(good.out, HasSubstr("train.grad_norm"));
  // The weights of another run: every value is off.
  fs::copy(Golden("mixtral_tiny"), tiny_.path("wrong"));
  std::fstream weights(tiny_.path("wrong") / "model.safetensors",
                       std::ios::in | std::ios::out | std::ios::binary);
  weights.seekp(-4, std::ios::end);
  const float huge = 1e3f;
  weights.write(reinterpret_cast<const char*>(&huge), sizeof(huge));
  weights.close();
  EXPECT_EQ(Run({"verify", tiny_.path("wrong").string()}).status, 1);
  File("wrong/about.json", "{\"gap\": Infinity}");
  const Result no_json = Run({"verify", tiny_.path("wrong").string()});
  EXPECT_EQ(no_json.status, 2);
  EXPECT_THAT(no_json.err, AllOf(HasSubstr("about.json"), HasSubstr("line 1")));
}

// Where runs on DNA are compared, others say why they are not.
TEST_F(ProgramTest, RunsOnProteinSayWhyThereIsNoMarkovBaseline) {
  const Result trained = Train({"data.alphabet=protein", "train.steps=2"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  EXPECT_THAT(trained.out, HasSubstr("\nno Markov baseline: Markov models here are of four bases, "
                                     "for dna and rna, not for protein\n"));
  EXPECT_FALSE(fs::exists(tiny_.path("run") / "baseline.json"));
  const Result baseline = Run({"baseline", tiny_.path("run").string()});
  EXPECT_EQ(baseline.status, 2);
  EXPECT_THAT(baseline.err, HasSubstr("data.alphabet"));
  EXPECT_THAT(baseline.err, HasSubstr("dna and rna, not for protein"));
}

TEST_F(ProgramTest, TrainThenEvalScoreConvertInspectReport) {
  const Result trained = Train({});
  ASSERT_EQ(trained.status, 0) << trained.err;
  EXPECT_THAT(trained.out, AllOf(HasSubstr("bits per base"), HasSubstr("Markov")));
  const std::string run = tiny_.path("run").string(), fasta = tiny_.path("tiny.fa").string();
  EXPECT_TRUE(fs::exists(tiny_.path("run") / "report.html"));

  const Result held_out = Run({"eval", run});
  EXPECT_EQ(held_out.status, 0) << held_out.err;
  EXPECT_THAT(held_out.out, HasSubstr("held-out\t212\t"));
  const Result shorter = Run({"eval", run, "--seq-len", "16"});
  EXPECT_EQ(shorter.status, 0) << shorter.err;
  EXPECT_THAT(shorter.out, AllOf(HasSubstr("held-out\t"), Not(HasSubstr("held-out\t212\t"))));
  const Result other_letters = Run({"eval", run, "--alphabet", "rna"});
  EXPECT_EQ(other_letters.status, 2);
  EXPECT_THAT(other_letters.err, HasSubstr("--alphabet"));
  const Result unknown = Run({"eval", run, "--data", File("n.fa", ">n\nNNNNNNNN\n")});
  EXPECT_EQ(unknown.status, 0) << unknown.err;
  EXPECT_THAT(unknown.out, HasSubstr("n.fa\t0\tNA\tNA\tNA\n"));
  // Options, not keys of a configuration; and nothing before what is wrong.
  const std::string rna = File("rna.fa", ">r\nACGUACGU\n");
  for (const char* verb : {"eval", "score"}) {
    const Result letters = Run({verb, run, "--data", rna});
    EXPECT_EQ(letters.status, 2);
    EXPECT_THAT(letters.err, AllOf(HasSubstr("--alphabet rna"), Not(HasSubstr("data.alphabet"))));
    const Result no_data = Run({verb, run + "/final"});
    EXPECT_EQ(no_data.status, 2);
    EXPECT_EQ(no_data.out, "");
    EXPECT_THAT(no_data.err, HasSubstr("--data FILE"));
  }
  const Result files = Run({"eval", run + "/final", "--data", fasta, fasta});
  EXPECT_EQ(files.status, 0) << files.err;
  EXPECT_THAT(files.out, HasSubstr("all\t"));

  const Result score = Run({"score", run, "--data", fasta, "--output", run + "/scores.tsv"});
  EXPECT_EQ(score.status, 0) << score.err;
  EXPECT_THAT(io::ReadFile(tiny_.path("run") / "scores.tsv"),
              AllOf(HasSubstr("\tfirst\t3000\t"), HasSubstr("\tsecond\t1500\t")));

  // Names cannot end a field or a line.
  const std::string odd =
      File("odd.jsonl", "{\"id\": \"a\\tb\\n\\\\c\", \"sequence\": \"ACGTACGT\"}\n");
  const Result escaped = Run({"score", run, "--data", odd});
  EXPECT_EQ(escaped.status, 0) << escaped.err;
  EXPECT_THAT(escaped.out, HasSubstr("odd.jsonl\ta\\x09b\\x0a\\x5cc\t8\t7\t"));
  // Before anything is computed, and by the name that was given.
  for (const std::string& nowhere : {run + "/absent/scores.tsv", run}) {
    for (const char* verb : {"score", "report"}) {
      const Result r =
          Run({verb, run, "--output", nowhere, verb == std::string("score") ? "--data" : "--curve",
               verb == std::string("score") ? fasta : nowhere});
      EXPECT_EQ(r.status, 2) << r.err;
      EXPECT_THAT(r.err, AllOf(StartsWith("error: " + nowhere + ": "), Not(HasSubstr("-tmp-"))));
    }
  }

  const std::string stacked = tiny_.path("stacked").string(), again = tiny_.path("again").string(),
                    checkpoint = tiny_.path("checkpoint").string();
  EXPECT_EQ(Run({"convert", run, stacked, "--layout", "stacked"}).status, 0);
  EXPECT_EQ(Run({"convert", stacked, checkpoint}).status, 0);
  EXPECT_EQ(Run({"convert", checkpoint, again}).status, 0);
  EXPECT_EQ(io::ReadFile(tiny_.path("again") / "model.safetensors"),
            io::ReadFile(tiny_.path("run") / "final" / "model.safetensors"));
  EXPECT_EQ(Run({"convert", run, again}).status, 2);  // exists
  // A disk that is full leaves no half of a model in the way of the next try.
  for (const char* kind : {"huggingface", "checkpoint"}) {
    const std::string target = tiny_.path("full").string();
    testing::Process full(tiny_.path("."), {CISTRON_PROGRAM, "convert", run, target, "--to", kind},
                          {.file_size_limit = 20'000});
    EXPECT_EQ(full.Wait(), 3) << full.Errors();
    EXPECT_FALSE(fs::exists(target)) << kind;
  }
  const std::string sharded = tiny_.path("sharded").string();
  EXPECT_EQ(Run({"convert", again, sharded, "--to", "checkpoint", "--max-shard-gib", "1"}).status,
            2);
  EXPECT_EQ(Run({"convert", again, sharded, "--max-shard-gib", "1"}).status, 0);
  EXPECT_TRUE(fs::exists(tiny_.path("sharded") / "config.json"));

  const Result inspected = Run({"inspect", run + "/checkpoints/step-00000010"});
  EXPECT_EQ(inspected.status, 0) << inspected.err;
  EXPECT_THAT(inspected.out,
              AllOf(HasSubstr("moment1/lm_head.weight"), HasSubstr("checksums hold")));
  EXPECT_EQ(Run({"report", run, "--output", run + "/other.html"}).status, 0);
  EXPECT_EQ(Run({"baseline", run, "--max-order", "3"}).status, 0);
}

TEST_F(ProgramTest, EvalAndScoreFollowARecipe) {
  const Result trained = Train({"precision=mxfp8", "train.steps=4"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const std::string run = tiny_.path("run").string(), fasta = tiny_.path("tiny.fa").string();
  const auto lines = train::ReadMetrics(tiny_.path("run") / "metrics.jsonl");
  ASSERT_TRUE(!lines.empty() && lines.back().heldout);
  const std::string checkpoint = run + "/checkpoints/step-00000004";
  const auto files = [&](const char* verb, const char* precision) {
    return Run({verb, checkpoint, "--data", fasta, "--precision", precision});
  };
  for (const char* verb : {"eval", "score"}) {
    SCOPED_TRACE(verb);
    const Result plain = files(verb, "bf16");
    EXPECT_EQ(plain.status, 0) << plain.err;
    for (const char* precision : {"mxfp8", "fp8_block", "fp8_current"}) {
      const Result r = files(verb, precision);
      EXPECT_EQ(r.status, 0) << r.err;
      EXPECT_NE(r.out, plain.out) << precision;
    }
    const Result refused = files(verb, "fp8_delayed");
    EXPECT_EQ(refused.status, 2);
    EXPECT_THAT(refused.err,
                HasSubstr("of precision=mxfp8, holds them; give a checkpoint of a run"));
    EXPECT_THAT(refused.err, HasSubstr("no state of delayed scaling"));
  }
  // The run's own number, which is that of its fp32 masters: the final model is in bf16.
  const Result held_out =
      Run({"eval", checkpoint, "--precision", "mxfp8", "--batch-tokens", "2048"});
  EXPECT_EQ(held_out.status, 0) << held_out.err;
  EXPECT_THAT(held_out.out, HasSubstr(fmt::format("\t{:.6f}\t", lines.back().heldout->loss)));
}

TEST_F(ProgramTest, WhatTrainReadsEvalAndScoreReadToo) {
  const auto line = [](const std::string& field, char tag) {
    return "{\"" + field + "\": \"" + tag + "E.coli" + tag + Bases(2000) + "\"}\n";
  };
  const std::string file = File("tags.jsonl", line("dna", '#'));
  const Result trained =
      Train({"data.train=" + file, "data.json_field=dna", "data.tag_delimiters=[\"#\"]"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const std::string model = tiny_.path("run/final").string();
  const std::string other = File("other.jsonl", line("seq", '%'));
  for (const char* verb : {"eval", "score"}) {
    SCOPED_TRACE(verb);
    const Result same = Run({verb, model, "--data", file});
    EXPECT_EQ(same.status, 0) << same.err;
    EXPECT_EQ(Run({verb, model, "--data", other}).status, 2);
    const Result told =
        Run({verb, model, "--json-field", "seq", "--tag-delimiters", "%", "--data", other});
    EXPECT_EQ(told.status, 0) << told.err;
  }
}

TEST_F(ProgramTest, AModelWhoseVocabularyLacksLettersIsRefusedEarly) {
  ASSERT_EQ(Train({"train.steps=2"}).status, 0);
  const std::string run = tiny_.path("run").string(), fasta = tiny_.path("tiny.fa").string();
  for (const char* verb : {"eval", "score"}) {
    SCOPED_TRACE(verb);
    const Result bytes = Run({verb, run, "--data", fasta, "--alphabet", "bytes"});
    EXPECT_EQ(bytes.status, 2);
    EXPECT_THAT(bytes.err, AllOf(StartsWith("error: " + run), HasSubstr("vocabulary of 128"),
                                 HasSubstr("'bytes'"), HasSubstr("256"), HasSubstr("--alphabet")));
    const Result letters = Run({verb, Golden("mixtral_tiny"), "--data", fasta, "--seq-len", "16"});
    EXPECT_EQ(letters.status, 2);
    EXPECT_THAT(letters.err, AllOf(HasSubstr("is too small for the alphabet 'dna'"),
                                   HasSubstr("128; give a model with such a vocabulary\n")));
  }
}

TEST_F(ProgramTest, WeightsAloneDoNotResume) {
  ASSERT_EQ(Train({}).status, 0);
  const std::string run = tiny_.path("run").string();
  // A checkpoint without optimiser state in place of the run's own.
  ASSERT_EQ(Run({"convert", run + "/final", run + "/weights"}).status, 0);
  fs::remove_all(tiny_.path("run") / "checkpoints");
  fs::rename(tiny_.path("run") / "weights", tiny_.path("run") / "checkpoints");
  const Result r = Train({});
  EXPECT_EQ(r.status, 2);
  EXPECT_THAT(r.err, HasSubstr("init.from="));
}

}  // namespace
}  // namespace cistron
