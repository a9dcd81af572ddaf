// Where the time of steps goes, and what is said about it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cistron/base/error.h"
#include "cistron/io/file.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/train/profile.h"
#include "cistron/train/report.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Profile, CountsCallsAndWork) {
  Profile profile(Device{});
  const ops::Context ctx = ops::Context().WithRecorder(&profile);
  const Tensor a = ctx.Zeros({64, 32}, DType::kF32), b = ctx.Zeros({16, 32}, DType::kF32);
  const Tensor c = ctx.Zeros({64, 16}, DType::kF32);
  const auto product = [&] {
    ops::Gemm(ctx, a, ops::Transpose::kNo, b, ops::Transpose::kYes, ops::Write(c));
  };
  product();  // before the start nothing counts
  EXPECT_EQ(profile.last_op(), "gemm (cpu)");
  profile.Start();
  product();
  product();
  ops::AddTo(ctx, c, c.Clone());
  profile.End();
  product();
  ASSERT_EQ(profile.Rows().size(), 2u);
  for (const Profile::Row& row : profile.Rows()) {
    if (row.op == "gemm") {
      EXPECT_EQ(row.calls, 2);
      EXPECT_EQ(row.flops, 2 * 2.0 * 64 * 32 * 16);
      EXPECT_EQ(row.bytes, 2 * 4.0 * (64 * 32 + 16 * 32 + 64 * 16));
    } else {
      EXPECT_EQ(row.op, "reduce");
      EXPECT_EQ(row.calls, 1);
      EXPECT_EQ(row.flops, 0);
      EXPECT_EQ(row.bytes, 3 * 4.0 * 64 * 16);
    }
    EXPECT_GT(row.ms, 0);
  }
}

// Buffers with room for more rows than come: what is multiplied is what comes.
TEST(Profile, CountsRowsInUse) {
  Profile profile(Device{});
  const ops::Context ctx = ops::Context().WithRecorder(&profile);
  const Tensor sizes = Tensor::Empty({2}, DType::kI64);
  sizes.span<std::int64_t>()[0] = sizes.span<std::int64_t>()[1] = 4;
  const GroupedTensor x{ctx.Zeros({12, 32}, DType::kF32), sizes};
  const Tensor w = ctx.Zeros({2, 16, 32}, DType::kF32), y = ctx.Zeros({12, 16}, DType::kF32);
  profile.Start();
  profile.set_rows_in_use(8 / 12.0);
  ops::GroupedGemmForward(ctx, x, w, ops::Write(y));
  profile.End();
  ASSERT_EQ(profile.Rows().size(), 1u);
  EXPECT_DOUBLE_EQ(profile.Rows()[0].flops, 2.0 * 8 * 32 * 16);
}

TEST(Profile, RatesAreThoseOfTheNearerRoof) {
  Profile profile(Device{});
  const ops::Context ctx = ops::Context().WithRecorder(&profile);
  const Tensor x = ctx.Zeros({1 << 16}, DType::kF32), y = ctx.Zeros({1 << 16}, DType::kF32);
  profile.Start();
  ops::AddTo(ctx, x, y);
  profile.End();
  EXPECT_THAT(profile.Table({.flops = 1e12, .bytes_per_s = 1e9}),
              AllOf(HasSubstr("GB/s"), HasSubstr("100.0%"), HasSubstr("all ops")));
  EXPECT_THAT(profile.Table({}), Not(HasSubstr("GB/s")));
}

TEST(Profile, OfARunIsPrintedAndReported) {
  TinyRun tiny("profile");
  tiny.Train("run", {"train.steps=4", "profile=steps:2-3"});
  for (const char* part : {"mean of steps 2 to 3", "grouped_mlp", "adamw", "TFLOP/s", "roof"}) {
    EXPECT_THAT(tiny.printed(), HasSubstr(part));
    EXPECT_THAT(io::ReadFile(tiny.path("run") / "profile.txt"), HasSubstr(part));
  }
  EXPECT_THAT(io::ReadFile(WriteReport(tiny.path("run"))),
              HasSubstr("Where the time of a step goes"));
  tiny.Train("plain", {"train.steps=2"});
  EXPECT_THAT(tiny.printed(), Not(HasSubstr("op by op")));
  EXPECT_THAT(io::ReadFile(WriteReport(tiny.path("plain"))),
              Not(HasSubstr("Where the time of a step goes")));
}

TEST(Profile, BadStepsAreRefused) {
  TinyRun tiny("profile-bad");
  for (const char* bad :
       {"steps:", "steps:0-3", "steps:5-3", "steps:2-x", "10-12", "steps:1-2-3"}) {
    EXPECT_THROW(tiny.Load("run", {std::string("profile=") + bad}), Error) << bad;
  }
  EXPECT_EQ(tiny.Load("run", {"profile=steps:7"}).config.profile.last, 7);
  EXPECT_THROW(tiny.Train("run", {"train.steps=4", "profile=steps:3-5"}), Error);
}

}  // namespace
}  // namespace cistron::train
