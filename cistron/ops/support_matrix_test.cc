#include "cistron/ops/support_matrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cistron/base/error.h"

namespace cistron::ops {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SupportMatrix, ReferenceRunsEveryFloatAndComesLast) {
  std::map<std::string, std::string> last;
  for (const SupportRow& row : SupportMatrix()) {
    last[row.op] = row.impl;
    // Masters of the optimiser are f32 or f64.
    if (row.impl == "ref" && !(row.op == "adamw" && row.dtype == "bf16")) {
      EXPECT_TRUE(row.support) << row.op << " " << row.dtype << ": " << row.support.reason;
    }
  }
  EXPECT_GE(last.size(), 12u);
  for (const auto& [op, impl] : last) EXPECT_EQ(impl, "ref") << op;
}

TEST(SupportMatrix, RefusalsHaveReasons) {
  std::set<std::string> seen;
  for (const SupportRow& row : SupportMatrix()) {
    EXPECT_EQ(static_cast<bool>(row.support), row.support.reason.empty());
    EXPECT_TRUE(seen.insert(row.op + "/" + row.direction + "/" + row.impl + "/" + row.dtype).second)
        << row.op;
  }
}

TEST(SupportMatrix, EveryFormatAndScalingRunsAndTheReferenceComesLast) {
  std::map<std::string, std::string> last;
  std::set<std::string> seen;
  for (const SupportRow& row : FormatSupport()) {
    last[row.op] = row.impl;
    EXPECT_TRUE(row.support) << row.op << " " << row.dtype << " " << row.scaling << ": "
                             << row.support.reason;
    EXPECT_TRUE(seen.insert(row.op + "/" + row.direction + "/" + row.impl + "/" + row.dtype + "/" +
                            row.scaling)
                    .second);
  }
  EXPECT_EQ(last.size(), 3u);  // quantize of two dtypes, products
  for (const auto& [op, impl] : last) EXPECT_EQ(impl, "ref") << op;
  EXPECT_EQ(seen.size(), 5u * 2 * 2 * 5);  // ops and directions, implementations, formats, scalings
}

TEST(ImplChoice, NamesThatAreThereAreAccepted) {
  for (const char* choice :
       {"", "ref", "cpu", "attention=ref", "attention=ref,gemm=cpu", "quantize=ref,cpu",
        "activation=ref,quantized_gemm=cpu,", "grouped_mlp=ref"}) {
    EXPECT_NO_THROW(CheckImplChoice(choice)) << choice;
  }
  for (const auto& rows : {SupportMatrix(), FormatSupport()}) {
    for (const SupportRow& row : rows) {
      EXPECT_NO_THROW(CheckImplChoice(row.op.substr(0, row.op.find(' ')) + "=" + row.impl));
    }
  }
}

TEST(ImplChoice, AMisspeltNameIsAnErrorThatNamesTheNearest) {
  const auto error = [](const char* choice) {
    try {
      CheckImplChoice(choice);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kBadInput);
      return e.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(error("atention=ref"), AllOf(HasSubstr("CISTRON_IMPL: atention=ref: there is no op"),
                                           HasSubstr("nearest is 'attention'")));
  EXPECT_THAT(error("gemm=cpu,grouped_gem=ref"), HasSubstr("nearest is 'grouped_gemm'"));
  EXPECT_THAT(error("Attention=ref"), HasSubstr("nearest is 'attention'"));
  EXPECT_THAT(error("gemm=reff"),
              AllOf(HasSubstr("no implementation 'reff' of gemm"), HasSubstr("nearest is 'ref'")));
  EXPECT_THAT(error("rf"), AllOf(HasSubstr("no implementation 'rf';"), HasSubstr("'ref'")));
  EXPECT_THAT(error("gemm="), HasSubstr("no implementation '' of gemm"));
  EXPECT_THAT(error("=ref"), HasSubstr("there is no op ''"));
}

// Known elsewhere is not known here.
TEST(ImplChoice, AnotherDevicesImplementationIsAnErrorThatNamesThoseOfThisOne) {
  const auto error = [](const char* choice, DeviceType device) -> std::string {
    try {
      CheckImplChoice(choice, device);
    } catch (const Error& e) {
      return e.message();
    }
    return "";
  };
  EXPECT_EQ(error("ref,attention=cpu", DeviceType::kCpu), "");
  EXPECT_EQ(error("cuda,attention=flash", DeviceType::kCuda), "");
  EXPECT_THAT(error("attention=cuda", DeviceType::kCpu),
              AllOf(HasSubstr("CISTRON_IMPL: attention=cuda: there is no implementation 'cuda' of "
                              "attention on cpu"),
                    HasSubstr("there are cpu, ref"), HasSubstr("'cuda' needs device=cuda"),
                    HasSubstr("choose one of these")));
  EXPECT_THAT(error("cuda", DeviceType::kCpu), HasSubstr("'cuda' on cpu"));
  EXPECT_THAT(error("ref", DeviceType::kCuda), HasSubstr("'ref' needs device=cpu"));
}

// Lines of a table, which all have as many cells as its head.
void ExpectCells(const std::string& table, std::ptrdiff_t cells) {
  std::size_t begin = 0;
  while (begin < table.size()) {
    const std::size_t end = table.find('\n', begin);
    const std::string line = table.substr(begin, end - begin);
    EXPECT_EQ(std::count(line.begin(), line.end(), '|'), cells + 1) << line;
    begin = end + 1;
  }
}

TEST(SupportMatrix, TablesHaveOneLineForEachImplementation) {
  const std::string text = FormatSupportMatrix();
  const std::size_t gap = text.find("\n\n");
  ASSERT_NE(gap, std::string::npos);
  const std::string table = text.substr(0, gap + 1), formats = text.substr(gap + 2);
  std::set<std::string> implementations;
  for (const SupportRow& row : SupportMatrix()) {
    implementations.insert(row.op + "/" + row.direction + "/" + row.impl);
  }
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'),
            static_cast<std::ptrdiff_t>(implementations.size() + 2));
  EXPECT_THAT(table, ::testing::HasSubstr("| adamw | ref | cpu | update | yes | yes | yes"));
  ExpectCells(table, 7);
  EXPECT_EQ(std::count(formats.begin(), formats.end(), '\n'), 5 * 2 * 2 + 2);
  EXPECT_THAT(formats, ::testing::HasSubstr("| quantized_gemm | cpu | cpu | dgrad | e5m2 | yes |"));
  ExpectCells(formats, 10);
}

TEST(SupportMatrix, ChosenImplementationsAreThoseOfTheContext) {
  const auto chosen = [](const Context& ctx, const Workload& workload) {
    const auto choices = ChooseImplementations(ctx, workload);
    CheckThatAllRun(ctx, choices);
    EXPECT_TRUE(StrictRefusals(choices).empty());
    return FormatChosen(choices);
  };
  const std::string best = chosen(Context(), {});
  EXPECT_THAT(best, ::testing::ContainsRegex("\n  attention +cpu\n"));
  EXPECT_THAT(best, ::testing::Not(::testing::HasSubstr("quantize")));
  const QuantizedLayout layout{.scaling = Scaling::kMxfp8, .format = DType::kE4M3};
  const std::string reference =
      chosen(Context().WithImpl("ref"), {.dtype = DType::kBF16, .layouts = {layout}});
  EXPECT_THAT(reference, ::testing::ContainsRegex("\n  quantized_gemm +ref\n"));
  EXPECT_THAT(reference, ::testing::Not(::testing::HasSubstr(" cpu\n")));
  // Masters of a bf16 model are updated in fp32.
  EXPECT_THAT(reference, ::testing::ContainsRegex("\n  adamw +ref\n"));
  EXPECT_THAT(chosen(Context(), {.unused = {"attention", "jitter"}}),
              ::testing::Not(::testing::AnyOf(HasSubstr("attention"), HasSubstr("jitter"))));
}

std::string ErrorOfChoice(const char* impl, const Workload& workload) {
  const Context ctx = Context().WithImpl(impl);
  try {
    CheckThatAllRun(ctx, ChooseImplementations(ctx, workload));
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    return e.message();
  }
  return "";
}

// Each op is told with the value, the reason, the names that there are and what to change.
TEST(SupportMatrix, AChoiceThatCannotRunNamesEveryOpItFails) {
  EXPECT_EQ(ErrorOfChoice("cpu", {.unused = {"grouped_bias"}}), "");
  const std::string absent = ErrorOfChoice("attention=cuda,norm=flash", {});
  EXPECT_THAT(absent, AllOf(HasSubstr("CISTRON_IMPL asks for 'cuda' of attention"),
                            HasSubstr("there is none of that name; on cpu there are cpu, ref"),
                            HasSubstr("\nCISTRON_IMPL asks for"), HasSubstr("'flash' of norm"),
                            HasSubstr("one of these as norm=NAME")));
  EXPECT_EQ(ErrorOfChoice("norm=flash", {.unused = {"norm"}}), "");
  // Weights in bf16 without masters are updated by the reference alone.
  const Workload bf16{.dtype = DType::kBF16, .optimizer_dtype = DType::kBF16};
  EXPECT_EQ(ErrorOfChoice("", bf16), "");
  EXPECT_THAT(ErrorOfChoice("adamw=cpu", bf16),
              AllOf(HasSubstr("'cpu' of adamw"), HasSubstr("bf16 states run in the reference")));
}

TEST(SupportMatrix, StrictNamesEveryOpWhoseBestRefuses) {
  const auto lines = StrictRefusals(ChooseImplementations(Context(), {.dtype = DType::kF64}));
  EXPECT_GT(lines.size(), 3u);
  EXPECT_THAT(lines, ::testing::Contains(AllOf(HasSubstr("attention (forward, backward): 'ref'"),
                                               HasSubstr("cpu: dtype f64"),
                                               HasSubstr("CISTRON_IMPL=attention=ref"))));
}

TEST(SupportMatrix, IsAskedAtTheSizesGiven) {
  const auto reason = [](const OpSizes& sizes) {
    for (const SupportRow& row : SupportMatrix(sizes, DeviceType::kCuda)) {
      EXPECT_EQ(row.device, "cuda");
      if (row.impl == "flash" && row.dtype == "bf16") return row.support.reason;
    }
    return std::string("no such row");
  };
  EXPECT_THAT(reason({.head_dim = 12}), HasSubstr("head_dim 12 is not a multiple of 8"));
  EXPECT_THAT(reason({}), ::testing::Not(HasSubstr("head_dim")));
}

// In the order in which a run asks: sizes decide, and whether sequences are uniform.
TEST(SupportMatrix, AttentionIsAskedInTheOrderOfTheSizes) {
  const auto first = [](const OpSizes& sizes) {
    for (const SupportRow& row : SupportMatrix(sizes, DeviceType::kCuda)) {
      if (row.op == "attention") return row.impl;
    }
    return std::string("no such row");
  };
  OpSizes sizes{.tokens = 32768, .head_dim = 64, .num_sequences = 32, .max_length = 1024};
  EXPECT_EQ(first(sizes), "flash") << "packed";
  sizes.uniform = true;
  EXPECT_EQ(first(sizes), "cudnn");
  sizes.head_dim = 32;
  EXPECT_EQ(first(sizes), "flash") << "narrow heads";
}

// What cuDNN refuses is no reason where it does not come first.
TEST(SupportMatrix, StrictAcceptsTheFirstThoughALaterOneRefuses) {
  const Context cuda = Context::ForQuestions({DeviceType::kCuda, 0}).WithImpl("");
  const auto attention = [&](bool uniform) {
    // Scores of 64 sequences of 4096 tokens are more than cuDNN's backward may keep.
    const auto choices = ChooseImplementations(cuda, {.dtype = DType::kBF16,
                                                      .sizes = {.tokens = 64 * 4096,
                                                                .heads = 16,
                                                                .kv_heads = 4,
                                                                .head_dim = 64,
                                                                .num_sequences = 64,
                                                                .max_length = 4096,
                                                                .uniform = uniform}});
    for (const OpChoice& choice : choices) {
      if (choice.op == "attention") return choice;
    }
    return OpChoice{};
  };
  for (const bool uniform : {false, true}) {
    const OpChoice choice = attention(uniform);
    EXPECT_EQ(choice.impl, "flash");
    EXPECT_EQ(StrictRefusals({&choice, 1}).empty(), !uniform);
  }
}

}  // namespace
}  // namespace cistron::ops
