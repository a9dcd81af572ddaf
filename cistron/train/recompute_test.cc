// recompute=moe and recompute=layer against none: the same bits everywhere, in less memory.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cistron/check/compare.h"
#include "cistron/train/bench_step.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

void ExpectSameRun(const TinyRun& tiny, const std::string& run, const std::string& reference) {
  const auto got = tiny.Newest(run), expected = tiny.Newest(reference);
  ASSERT_EQ(got.names(), expected.names());
  for (const std::string& name : expected.names()) {
    const auto same = check::CompareBitwise(name, got.Read(name), expected.Read(name));
    EXPECT_TRUE(same) << same.message;
  }
  const auto a = tiny.Metrics(run), b = tiny.Metrics(reference);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].loss, b[i].loss) << "step " << a[i].step;
    EXPECT_EQ(a[i].aux_loss, b[i].aux_loss) << "step " << a[i].step;
    EXPECT_EQ(a[i].layer_aux_loss, b[i].layer_aux_loss) << "step " << a[i].step;
    EXPECT_EQ(a[i].z_loss, b[i].z_loss) << "step " << a[i].step;
    EXPECT_EQ(a[i].grad_norm, b[i].grad_norm) << "step " << a[i].step;
    EXPECT_EQ(a[i].expert_load, b[i].expert_load) << "step " << a[i].step;
  }
}

// Everything that is drawn, counted or remembered in forward: noise, router statistics, the
// balancing bias, histories of delayed scaling; two micro-batches, so that gradients accumulate.
TEST(Recompute, SameBitsInEveryPrecision) {
  const std::vector<std::string> keys = {"train.steps=4",
                                         "eval.every=2",
                                         "batch.micro_tokens=64",
                                         "model.router_jitter_noise=0.1",
                                         "model.scoring_func=sigmoid",
                                         "model.moe_router_enable_expert_bias=true",
                                         "model.moe_aux_loss_coeff=0.01",
                                         "model.moe_z_loss_coeff=0.01",
                                         "model.n_shared_experts=1"};
  for (const std::string precision : {"fp32", "bf16", "mxfp8", "fp8_delayed", "fp8_block"}) {
    SCOPED_TRACE(precision);
    TinyRun tiny("recompute-" + precision);
    for (const std::string recompute : {"none", "moe", "layer"}) {
      std::vector<std::string> all = keys;
      all.push_back("precision=" + precision);
      all.push_back("recompute=" + recompute);
      tiny.Train(recompute, all);
    }
    ExpectSameRun(tiny, "moe", "none");
    ExpectSameRun(tiny, "layer", "none");
  }
}

// A run that is continued may choose anew.
TEST(Recompute, IsNoPartOfTheState) {
  TinyRun tiny("recompute-resume");
  tiny.Train("whole", {"train.steps=4"});
  tiny.Train("parts", {"train.steps=4", "recompute=layer"}, /*stop_after=*/2);
  tiny.Train("parts", {"train.steps=4", "recompute=moe"});
  ExpectSameRun(tiny, "parts", "whole");
}

std::int64_t PeakBytes(model::Recompute recompute) {
  BenchShape shape = NamedBenchShape("small");
  shape.sequence = 256;
  shape.batch = 4;
  shape.model.max_position_embeddings = 256;
  const auto allocator = MakeCachingCpuAllocator();
  BenchTrainStep(ops::Context().WithAllocator(*allocator), shape,
                 {.precision = Precision::kBf16, .steps = 1, .warmup = 1, .recompute = recompute});
  return allocator->Stats().peak_bytes;
}

TEST(Recompute, TakesLessMemory) {
  const std::int64_t none = PeakBytes(model::Recompute::kNone);
  const std::int64_t moe = PeakBytes(model::Recompute::kMoe);
  const std::int64_t layer = PeakBytes(model::Recompute::kLayer);
  // At least half of what three of the four layers keep: pre-activations are [2T, 2F] in bf16, and
  // attention's q, k, v and o together are as wide as 8/3 H at least.
  const std::int64_t tokens = 1024, ffn = 384, hidden = 192;
  EXPECT_LT(moe, none - 3 * (tokens * 2 * 2 * ffn * 2) / 2);
  EXPECT_LT(layer, moe - 3 * (tokens * hidden * 8 / 3 * 2) / 2);
}

}  // namespace
}  // namespace cistron::train
