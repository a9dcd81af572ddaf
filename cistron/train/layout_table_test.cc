// The table: a tiny model trained for ten steps on (dp, ep) in {1, 2, 4}² × splits into
// micro-batches, in f64, fp32, bf16 and 8-bit formats, and with every option of the router, against
// one rank.
//
// The bound of f64, fp32 and bf16. What a layout changes are the orders in which sums are made:
// those over tokens, which ranks and micro-batches part, and those inside a product, where a kernel
// takes another way for another number of rows. A sum of n terms in any order is the exact sum of
// terms that are each off by at most γ_n (Higham, ch. 3 and 4). How far terms that are off move a
// quantity is measured, by runs of one rank in f64 in which in every step each label's weight, and
// so what the label gives to every gradient, is off by ±ε, and by runs in which each weight is, and
// so every term of every product. They carry that through ten updates as a run carries its
// roundings. Movement of a tensor's elements over ε, the largest of them, times γ_n of the
// accumulator bounds the distance of two layouts. (Signs are random, so the movement grows by √n
// where roundings that were all alike would by n; but roundings are not alike either, and γ_n
// counts n of them where they grow by √n.) Since layouts start from equal weights, what weights
// may differ by in the end is proportional to the rate.
//
// In bf16 a value that differs in the last bits of fp32 may round to the neighbouring bf16 number:
// off by up to 2u of bf16, whose effect runs with moved weights measure too.
//
// Gradients in bf16 are rounded at every micro-batch of a rank, and once more over ranks: sums of
// some of the terms are off by up to u of bf16 each. Runs of one rank in which the sum is off by ±ε
// after every micro-batch measure that as the others do, with micro-batches that are no larger.
//
// In 8 bits another order moves codes and, where blocks run along rows, the blocks themselves. The
// bound is three times the spread of one rank's runs over shuffled orders of the rows.
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/base/threads.h"
#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/testing/poison.h"
#include "cistron/train/layout_case.h"

namespace cistron::train {
namespace {

// Terms of the longest sums: the rows of all tokens' assignments, and ranks.
constexpr std::int64_t kRows = 32;
constexpr std::int64_t kTerms = kRows * kRowTokens * 2 + 16;
// Of the smallest micro-batches where gradients are in bf16.
constexpr std::int64_t kNarrowRows = 4;

class Bounds {
 public:
  explicit Bounds(LayoutCase c) : steps_(c.steps) {
    c.dtype = DType::kF64;
    const std::map<std::string, Tensor> exact = QuantitiesOf(TrainLayout(c, {}));
    for (const auto& [name, t] : exact) magnitude_[name] = Largest(t);
    const auto movement = [&](double LayoutCase::*what, const Layout& layout) {
      std::map<std::string, double> most;
      for (c.perturb_seed = 1; c.perturb_seed <= 3; ++c.perturb_seed) {
        c.*what = kStep;
        for (const auto& [name, t] : QuantitiesOf(TrainLayout(c, layout))) {
          most[name] = std::max(most[name], Distance(t, exact.at(name)) / kStep);
        }
        c.*what = 0;
      }
      return most;
    };
    by_labels_ = movement(&LayoutCase::perturb_label_weights, {});
    by_weights_ = movement(&LayoutCase::perturb_model_weights, {});
    if (c.narrow_gradients) {
      by_gradients_ = movement(&LayoutCase::perturb_gradients, {1, 1, kNarrowRows});
    }
  }

  double Of(const std::string& quantity, DType dtype) const {
    const bool master = quantity.starts_with("master/");
    const std::string name = master ? "weight/" + quantity.substr(7) : quantity;
    const double u = check::UnitRoundoff(dtype), magnitude = magnitude_.at(name);
    const DType accumulator = dtype == DType::kBF16 ? DType::kF32 : dtype;
    double bound =
        check::Gamma(kTerms, accumulator) * (by_labels_.at(name) + by_weights_.at(name)) +
        check::Gamma(kTerms, DType::kF64) * magnitude;
    if (name.starts_with("weight/")) {  // an update rounds it once
      bound += static_cast<double>(steps_) * check::UnitRoundoff(accumulator) * magnitude;
    }
    if (dtype == DType::kBF16) bound += 2 * u * by_weights_.at(name);
    if (!by_gradients_.empty()) bound += 2 * u * by_gradients_.at(name);  // of both runs
    if (dtype == DType::kBF16 && quantity.starts_with("weight/")) bound += 2 * u * magnitude;
    return bound;
  }

 private:
  static constexpr double kStep = 0x1p-14;
  std::int64_t steps_;
  std::map<std::string, double> magnitude_, by_labels_, by_weights_, by_gradients_;
};

struct Option {
  std::string name;
  LayoutCase run;
};

std::vector<Option> Options() {
  LayoutCase plain;
  plain.config = TableConfig();
  std::vector<Option> all;
  const auto add = [&](const char* name, auto&& change) {
    all.push_back({name, plain});
    change(all.back().run);
  };
  const auto sigmoid = [](LayoutCase& c) {
    c.config.scoring_func = model::ScoringFunc::kSigmoid;
    c.config.output_router_logits = false;
  };
  add("sigmoid with loss-free balancing", [&](LayoutCase& c) {
    sigmoid(c);
    c.config.moe_router_enable_expert_bias = true;
  });
  add("z-loss and a load-balancing loss of each layer", [](LayoutCase& c) {
    c.config.output_router_logits = false;
    c.config.moe_aux_loss_coeff = 0.1;
    c.config.moe_z_loss_coeff = 0.01;
  });
  add("jitter", [](LayoutCase& c) { c.config.router_jitter_noise = 0.01; });
  add("shared expert", [](LayoutCase& c) { c.config.n_shared_experts = 1; });
  add("padding", [](LayoutCase& c) { c.padding = 3; });
  add("recompute=moe", [](LayoutCase& c) { c.recompute = model::Recompute::kMoe; });
  add("recompute=layer", [](LayoutCase& c) { c.recompute = model::Recompute::kLayer; });
  return all;
}

std::vector<Layout> Layouts() {
  std::vector<Layout> all;
  for (const std::int64_t dp : {1, 2, 4}) {
    for (const std::int64_t ep : {1, 2, 4}) {
      const std::int64_t rows = kRows / (dp * ep);
      all.push_back({dp, ep, 0});
      all.push_back({dp, ep, rows > 3 ? 3 : 1});  // the last micro-batch is smaller
      if (dp * ep > 1) all.push_back({dp, ep, rows > 3 ? 3 : 1, true});
    }
  }
  return all;
}

// One thread a rank: threads that wait for each other on busy processors take most of the time.
class LayoutTable : public ::testing::Test {
 protected:
  LayoutTable() { SetNumThreads(1); }
  ~LayoutTable() override { SetNumThreads(threads_); }

 private:
  int threads_ = NumThreads();
};

// The router's margins, before every step, beyond what the layout may move its scores by.
void ExpectWideMargins(const LayoutCase& c, const LayoutRun& one, const Bounds& bounds) {
  for (std::size_t i = 0; i < one.scores.size(); ++i) {
    const double gap =
        SmallestGap(one.scores[i], c.config.num_local_experts, c.config.num_experts_per_tok);
    EXPECT_GT(gap, 2 * bounds.Of(fmt::format("scores/{}", i + 1), c.dtype)) << "step " << i + 1;
  }
}

void ExpectWithin(const LayoutRun& many, const LayoutRun& one, const Bounds& bounds, DType dtype) {
  EXPECT_EQ(many.differences, std::vector<std::string>());
  ASSERT_EQ(many.steps.size(), one.steps.size());
  for (std::size_t i = 0; i < one.steps.size(); ++i) {
    EXPECT_EQ(many.steps[i].expert_counts, one.steps[i].expert_counts) << "step " << i + 1;
  }
  const std::map<std::string, Tensor> got = QuantitiesOf(many);
  for (const auto& [name, expected] : QuantitiesOf(one)) {
    if (name.starts_with("scores/")) continue;
    ASSERT_TRUE(got.contains(name)) << name;
    const double bound = bounds.Of(name, dtype);
    EXPECT_LE(Distance(got.at(name), expected), bound) << name;
  }
}

void CompareLayouts(const LayoutCase& run, std::initializer_list<DType> dtypes,
                    const std::vector<Layout>& layouts, const Layout& reference = {}) {
  const Bounds bounds(run);
  for (const DType dtype : dtypes) {
    LayoutCase c = run;
    c.dtype = dtype;
    const LayoutRun one = TrainLayout(c, reference);
    ExpectWideMargins(c, one, bounds);
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(fmt::format("{} {}", Name(dtype), layout.Name()));
      ExpectWithin(TrainLayout(c, layout), one, bounds, dtype);
    }
  }
}

LayoutCase Plain() {
  LayoutCase c;
  c.config = TableConfig();
  return c;
}

TEST_F(LayoutTable, EveryLayoutTrainsWhatOneRankTrains) {
  CompareLayouts(Plain(), {DType::kF32, DType::kBF16}, Layouts());
}

// Where roundings are small, what is wrong by little shows.
TEST_F(LayoutTable, InF64) {
  CompareLayouts(Plain(), {DType::kF64},
                 {{2, 1, 3}, {1, 4, 0}, {2, 2, 3}, {2, 2, 3, true}, {4, 4, 1}});
}

TEST_F(LayoutTable, EveryOption) {
  for (Option option : Options()) {
    SCOPED_TRACE(option.name);
    option.run.steps = 4;
    CompareLayouts(option.run, {DType::kF32, DType::kBF16},
                   {{1, 2, 0}, {2, 2, 3}, {4, 1, 0, true}});
  }
}

// Gradients in bf16, of ranks and of micro-batches, against one rank that rounds them once, and
// that rank against fp32 gradients.
TEST_F(LayoutTable, GradientsInBf16) {
  LayoutCase c = Plain();
  c.steps = 4;
  c.narrow_gradients = true;
  CompareLayouts(c, {DType::kBF16},
                 {{2, 1, 0}, {1, 4, 0}, {1, 1, 4}, {2, 2, 4}, {2, 2, 4, true}, {4, 1, 0, true}});
  const Bounds bounds(c);
  c.dtype = DType::kBF16;
  const LayoutRun narrow = TrainLayout(c, {});
  c.narrow_gradients = false;
  const LayoutRun wide = TrainLayout(c, {});
  ExpectWithin(narrow, wide, bounds, DType::kBF16);
  for (const auto& [name, t] : wide.gradients) {
    const Tensor got = narrow.gradients.at(name);
    const bool matrix = t.shape().rank() >= 2 && !name.starts_with("lm_head") &&
                        !name.starts_with("model.embed_tokens");
    EXPECT_EQ(got.dtype(), matrix ? DType::kBF16 : DType::kF32) << name;
    // The first step's, by the same weights: no bound is needed.
    EXPECT_TRUE(
        testing::Agrees(check::CompareBitwise(name, got, matrix ? ConvertTo(t, DType::kBF16) : t)));
    EXPECT_LT(bounds.Of("gradient/" + name, DType::kBF16), 0.25 * Largest(t)) << name;
  }
}

// Statistics of the auxiliary losses over all ranks' rows of a micro-step: equal where the
// micro-steps of all ranks together are.
TEST_F(LayoutTable, AuxiliaryLossOfTheBatch) {
  LayoutCase c = Plain();
  c.steps = 4;
  c.config.aux_scope = model::AuxScope::kBatch;
  c.config.moe_aux_loss_coeff = 0.1;
  CompareLayouts(c, {DType::kF32}, {{2, 1, 8}, {1, 2, 8}, {2, 2, 4}, {1, 4, 4}, {4, 4, 1}},
                 {1, 1, 16});
}

// Bounds that let wrong scales pass would prove nothing.
TEST_F(LayoutTable, BoundsAreNarrow) {
  const Bounds bounds(Plain());
  LayoutCase c = Plain();
  const LayoutRun one = TrainLayout(c, {});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [name, t] : QuantitiesOf(one)) {
      if (!name.starts_with("gradient/") && !name.starts_with("loss/")) continue;
      EXPECT_LT(bounds.Of(name, dtype), (dtype == DType::kF32 ? 1e-3 : 0.25) * Largest(t)) << name;
    }
  }
  // What ten updates at this rate can move a weight by.
  const double travel = static_cast<double>(c.steps) * c.lr;
  for (const auto& [name, t] : one.state) {
    if (name.starts_with("weight/")) {
      EXPECT_LT(bounds.Of(name, DType::kF32), 0.01 * travel) << name;
    }
  }
}

void ExpectSameBits(const LayoutRun& got, const LayoutRun& expected) {
  const std::map<std::string, Tensor> g = QuantitiesOf(got);
  for (const auto& [name, t] : QuantitiesOf(expected)) {
    EXPECT_TRUE(testing::Agrees(check::CompareBitwise(name, g.at(name), t)));
  }
}

TEST_F(LayoutTable, TwoRunsOfALayoutHaveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Layout& layout : {Layout{2, 2, 3}, Layout{1, 4, 0}, Layout{4, 1, 0}}) {
      SCOPED_TRACE(fmt::format("{} {}", Name(dtype), layout.Name()));
      LayoutCase c = Plain();
      c.dtype = dtype;
      c.steps = 3;
      ExpectSameBits(TrainLayout(c, layout), TrainLayout(c, layout));
    }
  }
}

// Ranks share the threads of the process: each of four has one thread of two, or two of eight.
TEST_F(LayoutTable, ThreadsChangeNoBit) {
  LayoutCase c = Plain();
  c.steps = 3;
  SetNumThreads(2);
  const LayoutRun few = TrainLayout(c, {2, 2, 0});
  SetNumThreads(8);
  const LayoutRun many = TrainLayout(c, {2, 2, 0});
  ExpectSameBits(many, few);
}

// One rank with its rows as they are, and what any quantity of an 8-bit run moves by where they are
// in another order.
struct Shuffled {
  std::map<std::string, Tensor> quantities;
  std::map<std::string, double> spread;
};
Shuffled TrainShuffled(LayoutCase c, const Layout& layout) {
  std::vector<std::map<std::string, Tensor>> runs;
  for (c.row_order = 0; c.row_order < 6; ++c.row_order) {
    runs.push_back(QuantitiesOf(TrainLayout(c, layout)));
  }
  Shuffled shuffled{runs.front(), {}};
  for (const auto& [name, t] : runs.front()) {
    if (name.starts_with("scores/")) continue;
    double& spread = shuffled.spread[name];
    for (std::size_t i = 0; i < runs.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        spread = std::max(spread, Distance(runs[i].at(name), runs[j].at(name)));
      }
    }
  }
  return shuffled;
}

void CompareQuantisedLayouts(const quant::Recipe& recipe, const std::vector<Layout>& layouts) {
  LayoutCase c = Plain();
  c.dtype = DType::kBF16;
  c.recipe = recipe;
  c.rows = 96;  // more for an expert than a block holds
  std::map<std::int64_t, Shuffled> by_micro_rows;
  const auto of_one = [&](std::int64_t micro_rows) -> const Shuffled& {
    auto it = by_micro_rows.find(micro_rows);
    if (it == by_micro_rows.end()) {
      it = by_micro_rows.emplace(micro_rows, TrainShuffled(c, {1, 1, micro_rows})).first;
    }
    return it->second;
  };
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(fmt::format("{} {}", Name(recipe), layout.Name()));
    // One rank that computes at once what all ranks together do.
    const auto& [expected, spread] = of_one(layout.micro_rows * layout.ranks());
    // In evaluation the amax is that of a rank's rows: as of one rank that has as many at once.
    const bool own_amax = std::holds_alternative<quant::Float8CurrentScaling>(recipe);
    const double heldout_spread =
        own_amax ? of_one(c.rows / layout.ranks()).spread.at("heldout") : 0;
    const LayoutRun run = TrainLayout(c, layout);
    EXPECT_EQ(run.differences, std::vector<std::string>());
    const std::map<std::string, Tensor> got = QuantitiesOf(run);
    for (const auto& [name, t] : expected) {
      if (name.starts_with("scores/")) continue;
      // What is read is rounded once to fp32, or a sum in f64.
      const double rounding = (t.dtype() == DType::kF64 ? check::Gamma(kTerms, DType::kF64)
                                                        : check::UnitRoundoff(DType::kF32)) *
                              Largest(t);
      const double most = own_amax && name == "heldout" ? heldout_spread : spread.at(name);
      EXPECT_LE(Distance(got.at(name), t), 3 * most + rounding) << name;
    }
  }
}

TEST_F(LayoutTable, InMxfp8) {
  CompareQuantisedLayouts(quant::MXFP8BlockScaling{},
                          {{2, 1}, {1, 4}, {2, 2}, {2, 2, 4}, {2, 2, 0, true}});
}

TEST_F(LayoutTable, InFp8Block) {
  CompareQuantisedLayouts(quant::Float8BlockScaling{},
                          {{2, 1}, {1, 4}, {2, 2}, {2, 2, 4}, {2, 2, 0, true}});
}

// Codes that travel in the place of rows of which nothing else is read.
TEST_F(LayoutTable, QuantisedRowsChangeNoBit) {
  for (const quant::Recipe& recipe :
       {quant::Recipe(quant::MXFP8BlockScaling{}), quant::Recipe(quant::Float8BlockScaling{})}) {
    for (const auto recompute : {model::Recompute::kNone, model::Recompute::kMoe}) {
      LayoutCase c = Plain();
      c.dtype = recompute == model::Recompute::kMoe ? DType::kBF16 : DType::kF32;
      c.recipe = recipe;
      c.recompute = recompute;
      c.steps = 2;
      for (const Layout& layout : {Layout{1, 4}, Layout{2, 2, 4, true}}) {
        SCOPED_TRACE(fmt::format("{} {}", Name(recipe), layout.Name()));
        c.quantized_rows = false;
        const LayoutRun exact = TrainLayout(c, layout);
        c.quantized_rows = true;
        const auto got = QuantitiesOf(TrainLayout(c, layout));
        for (const auto& [name, t] : QuantitiesOf(exact)) {
          EXPECT_TRUE(testing::Agrees(check::CompareBitwise(name, got.at(name), t)));
        }
      }
    }
  }
}

// Its amax is that of all ranks' rows, so that only micro-batches part what has one scale.
TEST_F(LayoutTable, InFp8Current) {
  CompareQuantisedLayouts(quant::Float8CurrentScaling{},
                          {{2, 1}, {1, 4}, {2, 2}, {2, 2, 4}, {2, 2, 0, true}});
}

TEST_F(LayoutTable, InFp8Delayed) {
  CompareQuantisedLayouts(quant::DelayedScaling{.amax_history_len = 4},
                          {{2, 1}, {1, 4}, {2, 2}, {2, 2, 3}, {2, 2, 0, true}});
}

// Were amax not taken over ranks, the two above would fail: scales differ between replicas, and
// gradients from one rank's by more than an order of rows can.
TEST_F(LayoutTable, LocalAmaxIsSeen) {
  LayoutCase c = Plain();
  c.dtype = DType::kBF16;
  c.steps = 3;
  c.local_amax = true;
  c.recipe = quant::DelayedScaling{.amax_history_len = 4};
  EXPECT_FALSE(TrainLayout(c, {2, 1}).differences.empty());
  c.recipe = quant::Float8CurrentScaling{};
  const std::string name = "model.layers.0.mlp.experts.gate_up_proj";
  const Shuffled one = TrainShuffled(c, {1, 1, c.rows});
  EXPECT_GT(
      Distance(TrainLayout(c, {2, 1}).gradients.at(name), one.quantities.at("gradient/" + name)),
      30 * one.spread.at("gradient/" + name));
}

}  // namespace
}  // namespace cistron::train
