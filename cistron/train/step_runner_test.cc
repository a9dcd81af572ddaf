// Steps queued ahead and captured in a CUDA graph against steps that wait. On a GPU where there is
// one; what a CPU can show runs everywhere.
#include "cistron/train/step_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/check/compare.h"
#include "cistron/model/tiny_mixtral.h"
#include "cistron/testing/poison.h"

namespace cistron::train {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;

constexpr double kRate = 0.01;
constexpr std::int64_t kVocab = 32;

// Everything whose statistics, losses or noise a step could forget to read anew.
model::MixtralConfig Config(model::AuxScope scope = model::AuxScope::kBatch) {
  model::MixtralConfig c = model::TinyConfig();
  c.aux_scope = scope;
  c.vocab_size = kVocab;
  c.hidden_size = 64;
  c.intermediate_size = 40;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.num_local_experts = 8;
  c.max_position_embeddings = 64;
  c.router_jitter_noise = 0.1;
  c.moe_aux_loss_coeff = 0.02;
  c.moe_z_loss_coeff = 0.001;
  return c;
}

// A model that trains by itself.
struct TrainedModel {
  TrainedModel(const ops::Context& given, DType dtype, CudaGraph graph, bool masters = true,
               DType gradients = DType::kF32, model::AuxScope scope = model::AuxScope::kBatch)
      : ctx(given),
        m(ctx, Config(scope), dtype, masters),
        optimizer(ctx, m.store, {.adamw = {.weight_decay = 0.1}, .max_grad_norm = 0.5}),
        runner(ctx, m, optimizer, {graph, model::kSeed}) {
    m.store.SetGradientDType(gradients);
    m.store.Initialize(model::kSeed, 0.2);
  }
  ops::Context ctx;
  model::LocalMixtral m;
  optim::AdamWOptimizer optimizer;
  StepRunner runner;
};

struct Global {
  std::vector<data::Batch> micro;
  data::BatchTotals totals;
};

// Two micro-batches of tokens drawn for a step. Every fifth step repeats one token, so that most
// experts are empty.
Global Draw(std::int64_t step, const std::vector<std::int64_t>& lengths, std::int64_t padding = 0) {
  Global g;
  for (std::uint64_t i = 0; i < 2; ++i) {
    std::int64_t tokens = padding;
    for (const std::int64_t n : lengths) tokens += n;
    data::Batch b = model::MakeBatch(
        lengths, step % 5 == 4 ? 1 : kVocab,
        (static_cast<std::uint64_t>(step) << 20) + i * static_cast<std::uint64_t>(tokens), padding);
    b.first_token = static_cast<std::int64_t>(i) * tokens;
    g.micro.push_back(std::move(b));
    ++g.totals.rows;
  }
  g.totals.weight_sum = model::WeightSum(g.micro);
  g.totals.tokens = model::RoutedTokens(g.micro);
  return g;
}

void ExpectSameState(const TrainedModel& a, const TrainedModel& b) {
  const auto of_a = a.optimizer.State(), of_b = b.optimizer.State();
  ASSERT_EQ(of_a.size(), of_b.size());
  for (std::size_t i = 0; i < of_a.size(); ++i) {
    EXPECT_TRUE(Agrees(
        check::CompareBitwise(of_a[i].name, of_a[i].tensor.ToHost(), of_b[i].tensor.ToHost())));
  }
}
void ExpectSameResult(const StepResult& a, const StepResult& b) {
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.aux_loss, b.aux_loss);
  EXPECT_EQ(a.layer_aux_loss, b.layer_aux_loss);
  EXPECT_EQ(a.z_loss, b.z_loss);
  EXPECT_EQ(a.grad_norm, b.grad_norm);
  EXPECT_EQ(a.expert_counts, b.expert_counts);
}

// Trains `steps` steps by `run`'s runner, as far ahead as it goes.
std::vector<StepResult> TrainAhead(TrainedModel& run, const std::vector<Global>& globals) {
  std::vector<StepResult> results;
  std::size_t started = 0;
  while (results.size() < globals.size()) {
    while (started < globals.size() && run.runner.in_flight() < run.runner.Depth()) {
      const Global& g = globals[started++];
      run.runner.Start(run.runner.Prepare(g.micro, g.totals),
                       kRate / static_cast<double>(run.optimizer.step() + 1));
    }
    results.push_back(run.runner.Finish());
  }
  return results;
}
std::vector<StepResult> TrainWaiting(TrainedModel& run, const std::vector<Global>& globals) {
  std::vector<StepResult> results;
  results.reserve(globals.size());
  for (const Global& g : globals) {
    results.push_back(TrainStep(run.ctx, run.m, run.optimizer, g.micro, g.totals,
                                kRate / static_cast<double>(run.optimizer.step() + 1),
                                model::kSeed));
  }
  return results;
}

TEST(StepInputs, BatchesOfACopyAreThoseThatWerePacked) {
  for (const std::int64_t padding : {0, 5}) {
    const Global g = Draw(1, {7, 0, 12}, padding);
    const StepInputs in = PackStep(g.micro, g.totals, CpuAllocator());
    const Tensor copy = in.block.Clone();
    FillPoison(in.block);
    const auto batches = BatchesIn(copy, in);
    ASSERT_EQ(batches.size(), g.micro.size());
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const data::Batch &a = batches[i], &b = g.micro[i];
      EXPECT_TRUE(Agrees(check::CompareBitwise("tokens", a.tokens, b.tokens)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("labels", a.labels, b.labels)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("weights", a.weights, b.weights)));
      EXPECT_TRUE(Agrees(
          check::CompareBitwise("cu_seqlens", a.sequences.cu_seqlens, b.sequences.cu_seqlens)));
      EXPECT_TRUE(
          Agrees(check::CompareBitwise("positions", a.sequences.positions, b.sequences.positions)));
      EXPECT_EQ(static_cast<bool>(a.token_mask), padding > 0);
      EXPECT_EQ(a.first_token, b.first_token);
    }
  }
  const auto layout = [](const Global& g) {
    return PackStep(g.micro, g.totals, CpuAllocator()).layout;
  };
  EXPECT_EQ(layout(Draw(1, {7, 12})), layout(Draw(2, {7, 12})));
  EXPECT_NE(layout(Draw(1, {7, 12})), layout(Draw(1, {12, 7, 0})));
  EXPECT_NE(layout(Draw(1, {10, 9})), layout(Draw(1, {7, 12})));  // other bounds
}

// Steps of 48 tokens a micro-batch, packed otherwise in each, with the bounds of a run.
Global DrawPacked(std::int64_t step) {
  static const std::vector<std::vector<std::int64_t>> kPackings = {
      {20, 12, 16}, {48}, {1, 1, 1, 30, 15}, {24, 24}, {7, 9, 8, 5, 4, 10, 5}};
  const auto index = static_cast<std::size_t>(step) % kPackings.size();
  Global g = Draw(step, kPackings[index]);
  for (data::Batch& b : g.micro) b.sequences = ops::WithBounds(b.sequences, 9, 48);
  return g;
}

TEST(StepInputs, BoundsOfARunKeepTheLayout) {
  const auto layout = [](const Global& g) {
    return PackStep(g.micro, g.totals, CpuAllocator()).layout;
  };
  for (std::int64_t t = 1; t < 10; ++t) EXPECT_EQ(layout(DrawPacked(0)), layout(DrawPacked(t)));
  Global other = DrawPacked(0);
  other.micro[1].sequences = ops::WithBounds(other.micro[1].sequences, 10, 48);
  EXPECT_NE(layout(DrawPacked(0)), layout(other));
}

// Proteins keep their bounds whatever the heads; records that fill many rows and some that fill
// half of one, with wide heads, have a plan of cuDNN for their own sizes.
TEST(StepInputs, BoundsAreKeptWhereTheyAreCheap) {
  RunConfig config;
  config.precision = Precision::kBf16;
  config.model = Config();
  config.data.seq_len = 4096;
  config.batch.global_tokens = config.batch.micro_tokens = 8192;
  const data::WindowLengths proteins{20, 4096, 375, 270.0 * 270},
      mixed{1, 4096, 2048, 1182.0 * 1182};
  for (const std::int64_t head_dim : {32, 64, 128}) {
    config.model.head_dim = head_dim;
    const ops::Context ctx = ops::Context().WithImpl("");
    EXPECT_TRUE(KeepsSequenceBounds(ctx, config, proteins)) << head_dim;
    EXPECT_EQ(KeepsSequenceBounds(ctx, config, mixed), head_dim <= 64) << head_dim;
    EXPECT_FALSE(KeepsSequenceBounds(ctx.WithImpl("attention=cudnn"), config, proteins));
  }
}

// What ops are asked of before a run is what its micro-batches are.
TEST(StepInputs, AttentionIsThatOfTheMicroBatches) {
  RunConfig config;
  config.model = Config();
  config.precision = Precision::kBf16;
  config.data.seq_len = 1024;
  config.batch.global_tokens = config.batch.micro_tokens = 4096;
  const ops::Context ctx = ops::Context().WithImpl("");
  const ops::AttentionProblem genome = MicroBatchAttention(ctx, config, {1024, 1024, 1024, 0});
  EXPECT_TRUE(genome.uniform);
  EXPECT_EQ(genome.num_sequences, 4);
  EXPECT_EQ(genome.max_length, 1024);
  const data::WindowLengths proteins{20, 1024, 350, 350.0 * 350};
  const ops::AttentionProblem packed = MicroBatchAttention(ctx, config, proteins);
  EXPECT_FALSE(packed.uniform);
  EXPECT_EQ(packed.num_sequences, data::SequencesBound(proteins, 4, 1024));
  EXPECT_EQ(packed.max_length, 1024);
  // Without bounds, as many as there are.
  config.model.head_dim = 64;
  config.data.seq_len = config.batch.global_tokens;
  const data::WindowLengths long_rows{20, 4096, 350, 350.0 * 350};
  const ops::Context cudnn = ctx.WithImpl("attention=cudnn");
  ASSERT_FALSE(KeepsSequenceBounds(cudnn, config, long_rows));
  EXPECT_EQ(MicroBatchAttention(cudnn, config, long_rows).num_sequences, 12);  // 4096 / 350
}

// The losses of sequences, and the bits of everything, are those without bounds.
TEST(StepRunner, BoundsChangeNoBitOnACpu) {
  for (const model::AuxScope scope : {model::AuxScope::kBatch, model::AuxScope::kSequence}) {
    const ops::Context ctx;
    TrainedModel bounded(ctx, DType::kF32, CudaGraph::kAuto, true, DType::kF32, scope),
        plain(ctx, DType::kF32, CudaGraph::kAuto, true, DType::kF32, scope);
    std::vector<Global> with, without;
    for (std::int64_t t = 0; t < 5; ++t) {
      with.push_back(DrawPacked(t));
      without.push_back(DrawPacked(t));
      for (data::Batch& b : without.back().micro) {
        std::vector<std::int64_t> lengths;
        const auto cu = b.sequences.cu_seqlens.span<std::int64_t>();
        for (std::size_t s = 1; s < cu.size(); ++s) {
          if (cu[s] > cu[s - 1]) lengths.push_back(cu[s] - cu[s - 1]);
        }
        b.sequences = ops::PackedFromLengths(lengths);
      }
    }
    const auto a = TrainAhead(bounded, with), b = TrainAhead(plain, without);
    for (std::size_t t = 0; t < with.size(); ++t) ExpectSameResult(a[t], b[t]);
    ExpectSameState(bounded, plain);
  }
}

TEST(StepRunner, OnACpuAStepIsTrainStep) {
  const ops::Context ctx;
  TrainedModel ahead(ctx, DType::kF32, CudaGraph::kAuto),
      waiting(ctx, DType::kF32, CudaGraph::kAuto);
  std::vector<Global> globals;
  for (std::int64_t t = 0; t < 3; ++t) globals.push_back(Draw(t, {20, 12}));
  const auto a = TrainAhead(ahead, globals), b = TrainWaiting(waiting, globals);
  for (std::size_t t = 0; t < globals.size(); ++t) ExpectSameResult(a[t], b[t]);
  ExpectSameState(ahead, waiting);
  EXPECT_EQ(ahead.runner.replays(), 0);
}

class CapturedStep : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::IsBuilt() || cuda::Devices().empty()) GTEST_SKIP() << "no GPU";
    ctx_.emplace(Device{DeviceType::kCuda, 0});
  }
  std::optional<ops::Context> ctx_;
};

// host-sync, weights-stale-in-replay: captured once, replayed with 50 routings, some with empty
// experts, each after an update: the bits of steps that wait; nothing waits, and nothing is taken
// from the driver.
TEST_F(CapturedStep, HostSync) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [masters, gradients] :
         {std::pair{true, DType::kF32}, {true, DType::kBF16}, {false, DType::kBF16}}) {
      if (gradients == DType::kBF16 && dtype == DType::kF32) continue;
      SCOPED_TRACE(fmt::format("{} masters {} {}", Name(dtype), masters, Name(gradients)));
      TrainedModel ahead(*ctx_, dtype, CudaGraph::kAuto, masters, gradients);
      TrainedModel queued(*ctx_, dtype, CudaGraph::kOff, masters, gradients);
      TrainedModel waiting(*ctx_, dtype, CudaGraph::kOff, masters, gradients);
      std::vector<Global> globals;
      for (std::int64_t t = 0; t < 50; ++t) globals.push_back(Draw(t, {32, 32}));
      const std::vector<Global> first(globals.begin(), globals.begin() + 5);
      const std::vector<Global> rest(globals.begin() + 5, globals.end());
      auto a = TrainAhead(ahead, first);
      const std::int64_t taken = ctx_->allocator().Stats().allocations;
      const std::int64_t pinned = cuda::PinnedAllocator().Stats().allocations;
      for (StepResult& r : TrainAhead(ahead, rest)) a.push_back(std::move(r));
      EXPECT_EQ(ctx_->allocator().Stats().allocations, taken);
      EXPECT_EQ(cuda::PinnedAllocator().Stats().allocations, pinned);
      EXPECT_EQ(ahead.runner.replays(), 49) << ahead.runner.note();
      EXPECT_THAT(ahead.runner.note(), HasSubstr("captured in a CUDA graph"));
      const auto b = TrainWaiting(waiting, globals);
      const auto c = TrainAhead(queued, globals);
      EXPECT_EQ(queued.runner.replays(), 0);
      EXPECT_TRUE(ahead.runner.newest_is_replay());
      EXPECT_FALSE(queued.runner.newest_is_replay());
      for (std::size_t t = 0; t < globals.size(); ++t) {
        SCOPED_TRACE(t);
        ExpectSameResult(a[t], c[t]);
        ExpectSameResult(a[t], b[t]);
      }
      ExpectSameState(ahead, queued);
      ExpectSameState(ahead, waiting);
    }
  }
}

// Packed otherwise in every step, with the bounds of a run: captured once, the bits of steps that
// wait.
TEST_F(CapturedStep, PackedSequencesWithBounds) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(Name(dtype));
    TrainedModel ahead(*ctx_, dtype, CudaGraph::kAuto), waiting(*ctx_, dtype, CudaGraph::kOff);
    std::vector<Global> globals;
    for (std::int64_t t = 0; t < 20; ++t) globals.push_back(DrawPacked(t));
    const auto a = TrainAhead(ahead, globals), b = TrainWaiting(waiting, globals);
    EXPECT_EQ(ahead.runner.replays(), 19) << ahead.runner.note();
    for (std::size_t t = 0; t < globals.size(); ++t) {
      SCOPED_TRACE(t);
      ExpectSameResult(a[t], b[t]);
    }
    ExpectSameState(ahead, waiting);
  }
}

// Other shapes run, and those that stay are captured anew.
TEST_F(CapturedStep, ShapesThatChange) {
  TrainedModel ahead(*ctx_, DType::kBF16, CudaGraph::kAuto),
      waiting(*ctx_, DType::kBF16, CudaGraph::kOff);
  std::vector<Global> globals;
  for (std::int64_t t = 0; t < 24; ++t) {
    const bool odd = t / 6 % 2 == 1;
    globals.push_back(t == 3 ? Draw(t, {9, 30}, 3)
                      : odd  ? Draw(t, {17, 20, 3})
                             : Draw(t, {32, 32}));
  }
  const auto a = TrainAhead(ahead, globals), b = TrainWaiting(waiting, globals);
  for (std::size_t t = 0; t < globals.size(); ++t) {
    SCOPED_TRACE(t);
    ExpectSameResult(a[t], b[t]);
  }
  ExpectSameState(ahead, waiting);
  EXPECT_GT(ahead.runner.replays(), 10);
}

// A step that fails is named although the next one is queued, and neither changes anything.
TEST_F(CapturedStep, FailureIsNamedAndChangesNothing) {
  TrainedModel run(*ctx_, DType::kBF16, CudaGraph::kAuto),
      before(*ctx_, DType::kBF16, CudaGraph::kAuto);
  std::vector<Global> globals;
  for (std::int64_t t = 0; t < 4; ++t) globals.push_back(Draw(t, {32, 32}));
  TrainAhead(run, globals);
  TrainAhead(before, globals);
  const double infinity[] = {INFINITY};
  for (TrainedModel* r : {&run, &before}) {
    const auto& gate = *r->m.store.Find("model.layers.1.mlp.gate.weight");
    CopyTo(Tensor::FromSpan<float>({1}, std::array{INFINITY}),
           gate.master.Reshape({gate.master.numel()}).Slice(0, 0, 1));
    CopyTo(ConvertTo(Tensor::FromSpan<double>({1}, infinity), DType::kBF16),
           gate.value.Reshape({gate.value.numel()}).Slice(0, 0, 1));
  }
  const Global next = Draw(6, {32, 32});
  run.runner.Start(run.runner.Prepare(next.micro, next.totals), kRate);
  run.runner.Start(run.runner.Prepare(globals[0].micro, globals[0].totals), kRate);
  try {
    run.runner.Finish();
    FAIL() << "the loss was finite";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNumericalFailure);
    EXPECT_THAT(error.message(), HasSubstr("step 5:"));
    EXPECT_THAT(error.message(), HasSubstr("layer 1"));
  }
  EXPECT_EQ(run.optimizer.step(), 4);
  ExpectSameState(run, before);
}

}  // namespace
}  // namespace cistron::train
