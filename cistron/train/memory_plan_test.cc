// The planned peak against the peak that an allocator measures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cistron/base/threads.h"
#include "cistron/train/bench_step.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/memory_plan.h"

namespace cistron::train {
namespace {

using model::Recompute;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Planned by measured, two steps on the CPU.
double Ratio(const BenchShape& shape, const BenchOptions& options) {
  const auto allocator = MakeCachingCpuAllocator();
  BenchTrainStep(ops::Context().WithAllocator(*allocator), shape, options);
  const MemoryPlan plan = PlanMemory(MemoryProblemOf(shape, options, DeviceType::kCpu));
  const auto measured = static_cast<double>(allocator->Stats().peak_bytes);
  const double ratio = static_cast<double>(plan.peak_bytes) / measured;
  std::printf("%7.1f MiB planned, %7.1f measured: %.3f; %s; %s\n",
              static_cast<double>(plan.peak_bytes) / (1 << 20), measured / (1 << 20), ratio,
              plan.where.c_str(), LargestTerms(plan, 4).c_str());
  return ratio;
}

// Shapes in which weights, activations, rows of experts or logits weigh most.
std::vector<BenchShape> Shapes() {
  BenchShape base;
  base.model.hidden_size = 64;
  base.model.intermediate_size = 128;
  base.model.num_hidden_layers = 2;
  base.model.num_attention_heads = 4;
  base.model.num_key_value_heads = 2;
  base.model.num_local_experts = 4;
  base.model.max_position_embeddings = 128;
  base.sequence = 128;
  base.batch = 16;
  std::vector<BenchShape> shapes(4, base);
  shapes[1].model.num_local_experts = 32;
  shapes[1].batch = 4;
  shapes[2].model.num_experts_per_tok = 4;
  shapes[2].model.intermediate_size = 64;
  shapes[3].model.vocab_size = 4096;
  shapes[3].model.num_hidden_layers = 1;
  return shapes;
}

TEST(MemoryPlan, AgreesWithTheAllocator) {
  SetNumThreads(1);
  for (const BenchShape& shape : Shapes()) {
    for (const Precision precision : {Precision::kFp32, Precision::kBf16, Precision::kMxfp8}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kMoe, Recompute::kLayer}) {
        const double ratio =
            Ratio(shape, {.precision = precision, .steps = 1, .warmup = 1, .recompute = recompute});
        // Under a recipe a CPU decodes by pieces that depend on the routing.
        EXPECT_NEAR(ratio, 1, precision == Precision::kMxfp8 ? 0.1 : 0.05) << Name(precision);
      }
    }
    EXPECT_NEAR(
        Ratio(
            shape,
            {.precision = Precision::kBf16, .steps = 1, .warmup = 1, .states = OptimStates::kBF16}),
        1, 0.05);
    for (const std::int64_t micro_rows : {0, 1}) {
      EXPECT_NEAR(Ratio(shape, {.precision = Precision::kBf16,
                                .steps = 1,
                                .warmup = 1,
                                .micro_rows = micro_rows,
                                .gradients = OptimGradients::kBF16}),
                  1, 0.05);
    }
  }
}

// Mixtral-8x7B, two layers, 8192 tokens, on a GPU: by hand.
TEST(MemoryPlan, KindsOfAGpuStep) {
  const BenchShape shape = NamedBenchShape("8x7b_2layers");
  MemoryProblem p = MemoryProblemOf(shape, {.precision = Precision::kBf16}, DeviceType::kCuda);
  const MemoryPlan plan = PlanMemory(p);
  const std::int64_t experts = 2LL * 8 * 3 * 4096 * 14336, attention = 2LL * 10 * 4096 * 1024;
  const std::int64_t n = experts + attention + 2LL * (8 + 2) * 4096 + 4096 + 2LL * 256 * 4096;
  EXPECT_EQ(plan.Of(MemoryKind::kWeights), 2 * n);
  EXPECT_EQ(plan.Of(MemoryKind::kMasters), 4 * n);
  EXPECT_EQ(plan.Of(MemoryKind::kMoments), 8 * n);
  EXPECT_EQ(plan.Of(MemoryKind::kGradients), 4 * n);
  EXPECT_EQ(plan.where, "backward of layer 1");
  // Of experts, attention and routers in bf16, with any number of micro-batches.
  p.gradients = OptimGradients::kBF16;
  const std::int64_t narrow = experts + attention + 2LL * 8 * 4096;
  for (const bool one : {true, false}) {
    p.one_micro_batch = one;
    EXPECT_EQ(PlanMemory(p).Of(MemoryKind::kGradients), 4 * n - 2 * narrow);
  }
  p.gradients = OptimGradients::kAuto;
  p.states = OptimStates::kBF16;
  p.whole_batch = false;
  EXPECT_EQ(PlanMemory(p).Of(MemoryKind::kGradients), 4 * n);
  // Several layouts cut it, and this one's part is a single micro-batch: as on one GPU.
  p.one_micro_batch = true;
  EXPECT_EQ(PlanMemory(p).Of(MemoryKind::kGradients), 4 * n);
  p.whole_batch = true;
  EXPECT_EQ(PlanMemory(p).Of(MemoryKind::kGradients), 4 * n - 2 * narrow);
  p.gradients = OptimGradients::kF32;
  EXPECT_EQ(PlanMemory(p).Of(MemoryKind::kGradients), 4 * n);
  p.gradients = OptimGradients::kAuto;
  p.states = OptimStates::kF32;
  EXPECT_THAT(LargestTerms(plan, 2), HasSubstr("moments of experts 21.0 GiB, "));
  p.recompute = Recompute::kLayer;
  EXPECT_LT(PlanMemory(p).peak_bytes, plan.peak_bytes);
}

// Sums of gradients on more than two GPUs: the largest dense gradient, 4096 × 4096 in fp32, and one
// of experts, of which no more than 256 MiB are summed at once.
TEST(MemoryPlan, SumsOverManyGpusTakeMemory) {
  MemoryProblem p = MemoryProblemOf(NamedBenchShape("8x7b_2layers"),
                                    {.precision = Precision::kBf16}, DeviceType::kCuda);
  const auto scratch = [&p](std::int64_t dp, std::int64_t ep, Sharding sharding) {
    p.dp = dp;
    p.ep = ep;
    p.sharding = sharding;
    for (const MemoryTerm& t : PlanMemory(p).terms) {
      if (t.name == "sums of gradients") return t.bytes >> 20;
    }
    return std::int64_t{0};
  };
  for (const Sharding sharding : {Sharding::kNone, Sharding::kFull}) {
    EXPECT_EQ(scratch(1, 2, sharding), 0);  // NCCL adds two ranks in their order by itself
    EXPECT_EQ(scratch(2, 1, sharding), 0);
    EXPECT_EQ(scratch(1, 4, sharding), 64);
    EXPECT_EQ(scratch(2, 2, sharding), 64);
    EXPECT_EQ(scratch(4, 1, sharding), 64 + 256);
  }
}

// Buffers never hold more than all rows of all ranks.
TEST(MemoryPlan, BuffersOfExpertsEndAtAllRows) {
  MemoryProblem p = MemoryProblemOf(NamedBenchShape("8x7b_2layers"),
                                    {.precision = Precision::kBf16}, DeviceType::kCuda);
  p.row_capacity = 3;
  EXPECT_EQ(p.ExpertRows(100), 200);
  p.ep = 2;
  EXPECT_EQ(p.ExpertRows(100), 400);
  p.ep = 8;
  EXPECT_EQ(p.ExpertRows(100), 600);
}

TEST(MemoryPlan, ACpuWithTooLittleIsTold) {
  const MemoryProblem problem =
      MemoryProblemOf(NamedBenchShape("small"), BenchOptions{}, DeviceType::kCpu);
  const std::int64_t peak = PlanMemory(problem).peak_bytes;
  EXPECT_EQ(CpuMemoryFault(problem, 1, peak), "");
  EXPECT_THAT(CpuMemoryFault(problem, 1, peak - 1),
              AllOf(HasSubstr("the step needs " + BytesText(peak)), HasSubstr("recompute"),
                    Not(HasSubstr("ranks here"))));
  EXPECT_EQ(CpuMemoryFault(problem, 3, 3 * peak), "");
  EXPECT_THAT(CpuMemoryFault(problem, 3, 3 * peak - 1),
              AllOf(HasSubstr("the step needs " + BytesText(3 * peak)),
                    HasSubstr(BytesText(peak) + " on each of 3 ranks here")));
}

TEST(MemoryPlan, AdviceFitsOrSaysThatNothingDoes) {
  MemoryProblem p = MemoryProblemOf(NamedBenchShape("8x7b_2layers"),
                                    {.precision = Precision::kBf16}, DeviceType::kCuda);
  p.tokens *= 8;
  const std::int64_t gib = std::int64_t{1} << 30;
  EXPECT_THAT(AdviceToFit(p, PlanMemory(p).peak_bytes - gib),
              HasSubstr("recompute=moe would need"));
  EXPECT_THAT(AdviceToFit(p, 58 * gib), HasSubstr("batch.micro_tokens="));
  EXPECT_THAT(AdviceToFit(p, 40 * gib),
              AllOf(HasSubstr("make the model smaller"), HasSubstr("more GPUs: parallel.ep")));
  // What it says of states in bf16 is the plan of that step: its gradients are fp32, since a row of
  // eight is one micro-batch of several.
  MemoryProblem narrow = p;
  narrow.states = OptimStates::kBF16;
  narrow.recompute = Recompute::kLayer;
  narrow.tokens = narrow.length;
  narrow.one_micro_batch = narrow.whole_batch = false;
  EXPECT_THAT(AdviceToFit(p, 40 * gib),
              HasSubstr("trains other numbers, " + BytesText(PlanMemory(narrow).peak_bytes) + ";"));
  EXPECT_THAT(AdviceToFit(narrow, 20 * gib), Not(HasSubstr("optim.states")));
  MemoryProblem rounded = narrow;
  rounded.states = OptimStates::kF32;
  rounded.gradients = OptimGradients::kBF16;
  EXPECT_THAT(AdviceToFit(p, 40 * gib), HasSubstr("which rounds gradients, " +
                                                  BytesText(PlanMemory(rounded).peak_bytes) + ";"));
  EXPECT_THAT(AdviceToFit(rounded, 20 * gib), Not(HasSubstr("optim.gradients")));
}

}  // namespace
}  // namespace cistron::train
