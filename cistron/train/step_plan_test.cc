// What ranks are planned to send and to hold, against what threads send and allocate, and against
// numbers worked out by hand.
#include "cistron/train/step_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/train/measure_ranks.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/rank_simulation.h"

namespace cistron::train {
namespace {

using ::testing::HasSubstr;

// Every token goes to every expert, so that ranks exchange equally many rows.
StepProblem SmallProblem(std::int64_t dp, std::int64_t ep) {
  StepProblem s;
  MemoryProblem& p = s.memory;
  p.model.vocab_size = 128;
  p.model.hidden_size = 64;
  p.model.intermediate_size = 96;
  p.model.num_hidden_layers = 2;
  p.model.num_attention_heads = 4;
  p.model.num_key_value_heads = 2;
  p.model.num_local_experts = 4;
  p.model.num_experts_per_tok = 4;
  p.model.max_position_embeddings = 64;
  p.model.moe_aux_loss_coeff = 0.01;
  p.tokens = 512;
  p.length = 64;
  p.dp = dp;
  p.ep = ep;
  return s;
}

std::int64_t Planned(const StepProblem& s) {
  std::int64_t sum = 0;
  for (const Traffic& t : TrafficOfStep(s)) sum += t.bytes;
  return sum;
}

// What the ranks agree on at the start is taken off.
std::int64_t SentInAStep(const StepProblem& s) {
  return MeasureRanks(s, 3).Sent() - MeasureRanks(s, 2).Sent();
}

constexpr std::pair<std::int64_t, std::int64_t> kLayouts[] = {{1, 2}, {2, 1}, {1, 4},
                                                              {2, 2}, {4, 1}, {2, 4}};

TEST(StepPlan, TrafficIsWhatThreadsSend) {
  for (const auto& [dp, ep] : kLayouts) {
    for (const Sharding sharding : {Sharding::kNone, Sharding::kFull}) {
      StepProblem s = SmallProblem(dp, ep);
      s.memory.tokens = 128;
      s.memory.sharding = sharding;
      EXPECT_EQ(Planned(s), SentInAStep(s))
          << "dp " << dp << " ep " << ep << (sharding == Sharding::kFull ? " sharded" : "");
    }
  }
}

TEST(StepPlan, TrafficOfOtherStepsIsWhatThreadsSend) {
  const auto check = [](const std::string& what, const auto& change) {
    for (const Sharding sharding : {Sharding::kNone, Sharding::kFull}) {
      StepProblem s = SmallProblem(2, 2);
      s.memory.tokens = 128;
      s.memory.sharding = sharding;
      change(s);
      EXPECT_EQ(Planned(s), SentInAStep(s))
          << what << (sharding == Sharding::kFull ? ", sharded" : "");
    }
  };
  check("micro-steps", [](StepProblem& s) {
    s.rank_tokens = 3 * s.memory.tokens;
    s.memory.one_micro_batch = false;
  });
  check("a shorter last micro-batch", [](StepProblem& s) {
    s.rank_tokens = 2 * s.memory.tokens + s.memory.length;
    s.memory.one_micro_batch = false;
  });
  check("recompute", [](StepProblem& s) { s.memory.recompute = model::Recompute::kMoe; });
  check("layer", [](StepProblem& s) { s.memory.recompute = model::Recompute::kLayer; });
  check("bf16", [](StepProblem& s) { s.memory.precision = Precision::kBf16; });
  check("gradients in bf16", [](StepProblem& s) {
    s.memory.precision = Precision::kBf16;
    s.memory.gradients = OptimGradients::kBF16;
  });
  check("mxfp8", [](StepProblem& s) { s.memory.precision = Precision::kMxfp8; });
  for (const Precision precision : {Precision::kMxfp8, Precision::kFp8Block}) {
    for (const auto recompute : {model::Recompute::kNone, model::Recompute::kMoe}) {
      check(fmt::format("quantised rows of {}", Name(precision)), [&](StepProblem& s) {
        s.memory.precision = precision;
        s.memory.recompute = recompute;
        s.memory.ep_rows = TravellingRows::kQuantized;
      });
    }
  }
  check("z-loss", [](StepProblem& s) { s.memory.model.moe_z_loss_coeff = 1e-3; });
  check("sequences", [](StepProblem& s) {
    s.memory.model.aux_scope = model::AuxScope::kSequence;
    s.memory.model.moe_z_loss_coeff = 1e-3;
  });
  check("shared expert", [](StepProblem& s) { s.memory.model.n_shared_experts = 1; });
  check("tied", [](StepProblem& s) { s.memory.model.tie_word_embeddings = true; });
}

// Routing that is not even moves other bytes: the test above can fail.
TEST(StepPlan, UnevenRoutingSendsOtherBytes) {
  StepProblem s = SmallProblem(1, 4);
  s.memory.model.num_experts_per_tok = 1;
  EXPECT_NE(Planned(s), SentInAStep(s));
}

// Reductions have their scratch from the process's allocator.
std::int64_t PlannedTensors(const MemoryPlan& plan) {
  std::int64_t bytes = plan.peak_bytes;
  for (const MemoryTerm& t : plan.terms) bytes -= t.name == "collectives" ? t.bytes : 0;
  return bytes;
}

void ExpectMemoryNear(const StepProblem& s, double tolerance) {
  const MemoryProblem& p = s.memory;
  const MemoryPlan plan = PlanMemory(p);
  const MeasuredRanks measured = MeasureRanks(s, 3);
  for (std::size_t rank = 0; rank < measured.peaks.size(); ++rank) {
    const double ratio =
        static_cast<double>(PlannedTensors(plan)) / static_cast<double>(measured.peaks[rank]);
    EXPECT_NEAR(ratio, 1, tolerance)
        << "dp " << p.dp << " ep " << p.ep << " " << Name(p.precision) << " recompute "
        << static_cast<int>(p.recompute) << " sharding " << static_cast<int>(p.sharding)
        << " micro-steps " << s.MicroSteps() << " rank " << rank << ": " << PlannedTensors(plan)
        << " planned, " << measured.peaks[rank] << " measured; " << LargestTerms(plan, 6);
  }
}

TEST(StepPlan, MemoryIsWhatEachRankAllocates) {
  SetNumThreads(1);
  for (const auto& [dp, ep] : kLayouts) {
    for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
      for (const auto recompute : {model::Recompute::kNone, model::Recompute::kLayer}) {
        StepProblem s = SmallProblem(dp, ep);
        s.memory.precision = precision;
        s.memory.recompute = recompute;
        ExpectMemoryNear(s, 0.05);
      }
    }
  }
}

TEST(StepPlan, MemoryOfShardsIsWhatEachRankAllocates) {
  SetNumThreads(1);
  for (const auto& [dp, ep] : kLayouts) {
    for (const std::int64_t micro_steps : {1, 2}) {
      StepProblem s = SmallProblem(dp, ep);
      s.memory.sharding = Sharding::kFull;
      s.memory.precision = Precision::kBf16;
      s.rank_tokens = micro_steps * s.memory.tokens;
      s.memory.one_micro_batch = micro_steps == 1;
      ExpectMemoryNear(s, 0.05);
      s.memory.gradients = OptimGradients::kBF16;
      ExpectMemoryNear(s, 0.05);
    }
  }
}

// Mixtral-8x7B over eight ranks, a row of 8,192 tokens each.
StepProblem Mixtral(std::int64_t dp, std::int64_t ep, Sharding sharding) {
  StepProblem s;
  MemoryProblem& p = s.memory;
  p.model.vocab_size = 256;
  p.model.hidden_size = 4096;
  p.model.intermediate_size = 14336;
  p.model.num_hidden_layers = 32;
  p.model.num_attention_heads = 32;
  p.model.num_key_value_heads = 8;
  p.model.num_local_experts = 8;
  p.model.num_experts_per_tok = 2;
  p.model.max_position_embeddings = 8192;
  p.device = DeviceType::kCuda;
  p.precision = Precision::kBf16;
  p.tokens = p.length = 8192;
  p.dp = dp;
  p.ep = ep;
  p.sharding = sharding;
  return s;
}

std::int64_t BytesOf(const StepProblem& s, TrafficKind kind) {
  std::int64_t sum = 0;
  for (const Traffic& t : TrafficOfStep(s)) sum += t.kind == kind ? t.bytes : 0;
  return sum;
}

constexpr std::int64_t kExperts = 32LL * 8 * 3 * 4096 * 14336;
constexpr std::int64_t kDense =
    32LL * (10 * 4096 * 1024 + 8 * 4096 + 2 * 4096) + 4096 + 2 * 256 * 4096;

TEST(StepPlan, TrafficByHand) {
  const StepProblem ep8 = Mixtral(1, 8, Sharding::kNone);
  // 8 ranks · 16,384 rows, seven eighths of which leave, through 32 layers.
  const std::int64_t rows = 32LL * 8 * 16384 * 7 / 8;
  EXPECT_EQ(BytesOf(ep8, TrafficKind::kCombine), rows * 4096 * 2);
  EXPECT_EQ(BytesOf(ep8, TrafficKind::kCombineBackward), rows * 4096 * 2);
  EXPECT_EQ(BytesOf(ep8, TrafficKind::kDispatchBackward), rows * (4096 * 2 + 4));
  EXPECT_EQ(BytesOf(ep8, TrafficKind::kDispatch), rows * (4096 * 2 + 4) + 32LL * 8 * 7 * 8);
  EXPECT_EQ(BytesOf(ep8, TrafficKind::kGradients), 2 * 7 * kDense * 4);
  EXPECT_EQ(BytesOf(ep8, TrafficKind::kGather), 0);

  // Four pairs of ranks with the same two experts.
  const StepProblem dp2 = Mixtral(2, 4, Sharding::kNone);
  EXPECT_EQ(BytesOf(dp2, TrafficKind::kGradients), (2 * 7 * kDense + 2 * 1 * kExperts) * 4);

  const StepProblem sharded = Mixtral(2, 4, Sharding::kFull);
  const std::int64_t once = 2 * 256 * 4096;  // embedding, head
  EXPECT_EQ(BytesOf(sharded, TrafficKind::kGather),
            2 * (7 * (2 * (kDense - once) + once) + 2 * kExperts));
  EXPECT_EQ(BytesOf(sharded, TrafficKind::kReduceScatter), 4 * (7 * kDense + kExperts));
  EXPECT_EQ(BytesOf(sharded, TrafficKind::kGradients), 0);
}

TEST(StepPlan, MemoryByHand) {
  const MemoryPlan whole = PlanMemory(Mixtral(1, 8, Sharding::kNone).memory);
  EXPECT_EQ(whole.Of(MemoryKind::kWeights), 2 * (kExperts / 8 + kDense));
  EXPECT_EQ(whole.Of(MemoryKind::kMoments), 8 * (kExperts / 8 + kDense));
  const MemoryPlan sharded = PlanMemory(Mixtral(2, 4, Sharding::kFull).memory);
  EXPECT_EQ(sharded.Of(MemoryKind::kMasters), 4 * (kExperts / 8 + kDense / 8));
  // A layer of weights in bf16 and of gradients in fp32: dense ones and two experts.
  const std::int64_t layer = (kDense - 4096 - 2 * 256 * 4096) / 32 + 2 * 3LL * 4096 * 14336;
  // The largest dense gradient once more, which eight ranks add.
  EXPECT_EQ(sharded.Of(MemoryKind::kCommunication),
            kCollectiveReserve + layer * (2 + 4) + 4096LL * 4096 * 4);
  // Room for half as many rows again.
  MemoryProblem roomy = Mixtral(1, 8, Sharding::kNone).memory;
  roomy.row_capacity = 1.5;
  EXPECT_EQ(roomy.ExpertRows(8192), 24576);
  EXPECT_GT(PlanMemory(roomy).peak_bytes, whole.peak_bytes);
  roomy.ep = 1;  // nothing is exchanged
  EXPECT_EQ(roomy.ExpertRows(8192), 16384);
}

TEST(StepPlan, LinksByHand) {
  const Cluster c = FindCluster("64xH200");
  // A group of 16 on two nodes: 7 peers here, 8 there.
  const LinkBytes rows = SplitAllToAll({16, 1}, c, 150);
  EXPECT_DOUBLE_EQ(rows.within, 70);
  EXPECT_DOUBLE_EQ(rows.between, 80);
  EXPECT_DOUBLE_EQ(SplitAllToAll({8, 1}, c, 70).between, 0);
  // A ring of all leaves each node once, over eight adapters.
  EXPECT_DOUBLE_EQ(SplitRing({64, 1}, c, 80).between, 10);
  EXPECT_DOUBLE_EQ(SplitRing({64, 1}, c, 80).within, 70);
  // Replicas of experts of ep=8 are one on each node.
  EXPECT_DOUBLE_EQ(SplitRing({8, 8}, c, 80).between, 80);
  EXPECT_DOUBLE_EQ(SplitRing({8, 1}, c, 80).within, 80);
}

// 8x7b_2layers of `cistron bench`, one H200: docs/benchmarks.md. The measurements are constants of
// a document; what is asserted is that the prediction, a pure function, stays by them.
TEST(StepPlan, TimesOfOneH200AreThoseMeasured) {
  const Cluster one = FindCluster("1xH200");
  const auto ms = [&](model::Recompute recompute, OptimStates states) {
    StepProblem s = Mixtral(1, 1, Sharding::kNone);
    s.memory.model.num_hidden_layers = 2;
    s.memory.recompute = recompute;
    s.memory.states = states;
    return PredictStep(s, one).value().Total() * 1e3;
  };
  EXPECT_NEAR(ms(model::Recompute::kNone, OptimStates::kF32) / 95.2, 1, 0.15);
  EXPECT_NEAR(ms(model::Recompute::kMoe, OptimStates::kF32) / 113.5, 1, 0.15);
  EXPECT_NEAR(ms(model::Recompute::kLayer, OptimStates::kF32) / 117.7, 1, 0.15);
  EXPECT_NEAR(ms(model::Recompute::kNone, OptimStates::kBF16) / 84.8, 1, 0.15);
}

TEST(StepPlan, TimeByHand) {
  Cluster c;
  c.gpus_per_node = 8;
  c.rates = {.product_flops = 1e12,
             .grouped_flops = 2e12,
             .attention_flops = 1e12,
             .attention_backward_flops = 1e12,
             .copy_bytes_per_s = 1e12};
  const Link link{1e9, 1e-3};
  c.within = {link, link, link, link};
  const StepProblem s = Mixtral(1, 8, Sharding::kNone);
  const StepTime t = PredictStep(s, c).value();
  const double tokens = 8192, layers = 32;
  EXPECT_DOUBLE_EQ(t.experts, 18 * tokens * 2 * 4096 * 14336 * layers / 2e12);
  EXPECT_DOUBLE_EQ(t.attention, 3.5 * 4 * tokens * 4096 * 4096 * layers / 1e12);
  for (const auto& collective : t.collectives) {
    if (collective.kind != TrafficKind::kCombine) continue;
    EXPECT_DOUBLE_EQ(collective.seconds, layers * (16384 * 7.0 / 8 * 8192 / 1e9 + 1e-3));
    EXPECT_EQ(collective.exposed, collective.seconds);
  }
  // Gradients in bf16: 2 bytes less of each for the update and for the norm, and as many less sent.
  StepProblem narrow = s;
  narrow.memory.gradients = OptimGradients::kBF16;
  double bytes = 0;
  for (const model::ParameterInfo& parameter : model::MixtralParameters(s.memory.model)) {
    const auto n = static_cast<double>(ElementsOfRank(s.memory, parameter));
    bytes += n * static_cast<double>(GradientSize(s.memory, parameter) -
                                     GradientSize(narrow.memory, parameter));
  }
  const double experts = 32.0 * 3 * 4096 * 14336, attention = 32.0 * 10 * 4096 * 1024;  // a rank's
  EXPECT_EQ(bytes, 2 * (experts + attention + 32.0 * 8 * 4096));
  EXPECT_NEAR(t.optimizer - PredictStep(narrow, c).value().optimizer,
              bytes * (1 / c.rates.optimizer_of_copy + 1) / 1e12, 1e-12);
  StepProblem other = s;
  other.memory.precision = Precision::kFp32;
  EXPECT_FALSE(PredictStep(other, c).has_value());
  // Gathers hide behind products.
  const StepTime sharded = PredictStep(Mixtral(1, 8, Sharding::kFull), c).value();
  EXPECT_LT(sharded.Exposed(), sharded.Communication());
}

// Behind a layer's backward the sums of the layer before hide, which slows it; behind that of the
// last one to be reached nothing is left.
TEST(StepPlan, GradientsOfTheLastLayerHideBehindNothing) {
  Cluster c = FindCluster("2xH200");
  StepProblem s = Mixtral(2, 1, Sharding::kNone);
  s.memory.model.num_hidden_layers = 4;
  const StepTime t = PredictStep(s, c).value();
  const auto gradients =
      std::find_if(t.collectives.begin(), t.collectives.end(),
                   [](const auto& one) { return one.kind == TrafficKind::kGradients; });
  ASSERT_NE(gradients, t.collectives.end());
  EXPECT_DOUBLE_EQ(gradients->exposed, gradients->seconds / 4);
  EXPECT_DOUBLE_EQ(t.slowed, c.within.slows_products * gradients->seconds * 3 / 4);
  EXPECT_DOUBLE_EQ(t.Total(), t.Compute() + t.Exposed() + t.slowed);
  // docs/benchmarks.md, headline run on two H200.
  EXPECT_NEAR(t.Total() * 1e3 / 228.5, 1, 0.15);
}

// Routing drawn at random moves, on average, what even routing does; rings exactly that.
TEST(RankSimulation, MovesWhatIsPlanned) {
  StepProblem s = Mixtral(2, 8, Sharding::kNone);
  s.memory.model.num_hidden_layers = 2;
  s.memory.recompute = model::Recompute::kMoe;
  const Cluster cluster = FindCluster("16xH200");
  const Simulation simulated = SimulateStep(s, cluster);
  ASSERT_EQ(simulated.ranks.size(), 16u);
  LinkBytes planned, mean;
  const StepTime plan = *PredictStep(s, cluster);
  for (const auto& c : plan.collectives) {
    planned.within += c.bytes.within;
    planned.between += c.bytes.between;
  }
  double received = 0, sent = 0;
  for (const SimulatedRank& rank : simulated.ranks) {
    mean.within += rank.sent.within / 16;
    mean.between += rank.sent.between / 16;
    sent += rank.sent.within + rank.sent.between;
    received += rank.received.within + rank.received.between;
    EXPECT_GT(rank.most_rows, 0.5);
    EXPECT_LT(rank.most_rows, 2);
  }
  EXPECT_NEAR(sent, received, 1e-9 * sent);
  EXPECT_NEAR(mean.within / planned.within, 1, 0.01);
  // Between nodes are rings alone: expert groups stay within one.
  EXPECT_NEAR(mean.between / planned.between, 1, 1e-9);
}

TEST(RankSimulation, SkewedRoutingWaitsForTheBusiestAndOverflows) {
  StepProblem s = Mixtral(1, 8, Sharding::kNone);
  s.memory.model.num_hidden_layers = 2;
  s.memory.row_capacity = 1.1;
  const Cluster cluster = FindCluster("8xH200");
  const Simulation even = SimulateStep(s, cluster, {.skew = 0});
  const Simulation skewed = SimulateStep(s, cluster, {.skew = 0.5});
  const StepTime plan = *PredictStep(s, cluster);
  const double planned = plan.Compute() + plan.Communication();
  EXPECT_NEAR(even.seconds / planned, 1, 0.03);
  EXPECT_GT(skewed.seconds, 1.1 * planned);
  EXPECT_EQ(even.overflows, 0);
  EXPECT_GT(skewed.overflows, 0);
  EXPECT_EQ(SimulateStep(s, cluster, {.skew = 0.5}).seconds, skewed.seconds);
  s.memory.precision = Precision::kFp32;
  EXPECT_THROW(SimulateStep(s, cluster), Error);
}

// 128 rows over eight ranks, at most ten of a rank's sixteen at once: they are planned as they are.
TEST(StepPlan, MicroBatchesOfUnequalSize) {
  const LoadedConfig loaded = LoadRun("L1_8x7B_ep", {"batch.micro_tokens=81920"});
  const StepProblem s = StepProblemOf(loaded.config);
  EXPECT_EQ(s.GlobalTokens(), loaded.config.batch.global_tokens);
  EXPECT_EQ(s.MicroSteps(), 2);
  StepProblem even = s;
  even.memory.tokens = 65536;
  const Cluster eight = FindCluster("8xH200");
  EXPECT_EQ(PredictStep(s, eight)->Compute(), PredictStep(even, eight)->Compute());
  const Cluster many = FindCluster("64xH200");
  EXPECT_EQ(RankLayouts(s, many, many.memory_bytes).front().problem.RankTokens(), 2 * 8192);
  const Cluster uneven = FindCluster("80xH200");
  EXPECT_THROW(RankLayouts(s, uneven, uneven.memory_bytes), Error);
}

// Without a micro-batch of its own a rank takes its rows at once, however many it has.
TEST(StepPlan, WholeBatchesStayWhole) {
  StepProblem s = StepProblemOf(LoadRun("L1_8x7B_ep", {"batch.micro_tokens=0"}).config);
  const Cluster four = FindCluster("4xH200");
  for (const PlannedLayout& l : RankLayouts(s, four, four.memory_bytes)) {
    EXPECT_EQ(l.problem.memory.tokens, 32 * 8192);
    EXPECT_TRUE(l.problem.memory.one_micro_batch);
  }
}

TEST(StepPlan, LayoutsAreRanked) {
  StepProblem s = Mixtral(1, 8, Sharding::kNone);
  s.memory.recompute = model::Recompute::kLayer;
  s.rank_tokens = 16 * s.memory.tokens;
  s.memory.whole_batch = false;
  const Cluster eight = FindCluster("8xH200");
  const auto layouts = RankLayouts(s, eight, eight.memory_bytes - kDeviceReserve);
  ASSERT_EQ(layouts.size(), 8u);  // ep 1, 2, 4, 8, each whole and sharded
  bool fit = true;
  double before = 0;
  for (const PlannedLayout& l : layouts) {
    EXPECT_EQ(l.problem.memory.Ranks(), 8);
    EXPECT_EQ(l.problem.GlobalTokens(), s.GlobalTokens());
    if (fit && l.fits) {
      EXPECT_LE(before, l.time->Total());
      before = l.time->Total();
    }
    EXPECT_TRUE(fit || !l.fits);
    fit = l.fits;
  }
  EXPECT_TRUE(layouts.front().fits);
  EXPECT_FALSE(layouts.back().fits);  // every expert on every GPU
  EXPECT_EQ(layouts.back().problem.memory.ep, 1);
  try {
    RankLayouts(s, FindCluster("256xH200"), 1);
    FAIL() << "128 rows were dealt to 256 ranks";
  } catch (const Error& e) {
    EXPECT_THAT(e.message(), HasSubstr("the nearest is 2097152"));
  }
}

}  // namespace
}  // namespace cistron::train
