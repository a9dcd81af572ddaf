// What went wrong in systems of many ranks, each under its name, with what would bring it back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/comm/inproc.h"
#include "cistron/io/checkpoint.h"
#include "cistron/parallel/mesh.h"
#include "cistron/testing/poison.h"
#include "cistron/train/layout_case.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;
using testing::Agrees;

// In f64, where roundings hide nothing: a bound relative to a tensor's largest element.
constexpr double kWithin = 1e-11;

LayoutCase InF64(std::int64_t steps) {
  LayoutCase c;
  c.config = TableConfig();
  c.dtype = DType::kF64;
  c.steps = steps;
  return c;
}

const std::vector<Layout>& Layouts() {
  static const std::vector<Layout> all = {{1, 2, 0}, {2, 1, 0},       {2, 2, 3},
                                          {1, 4, 0}, {4, 1, 1, true}, {2, 2, 0, true}};
  return all;
}

bool Same(const Tensor& got, const Tensor& expected) {
  return Distance(got, expected) <= kWithin * Largest(expected);
}

// All that two runs share, gradients included.
void ExpectSameRun(const LayoutRun& got, const LayoutRun& expected) {
  EXPECT_EQ(got.differences, std::vector<std::string>());
  const auto quantities = QuantitiesOf(got);
  for (const auto& [name, t] : QuantitiesOf(expected)) {
    if (name.starts_with("scores/")) continue;
    EXPECT_TRUE(Same(quantities.at(name), t)) << name;
  }
}

Tensor Times(const Tensor& t, double factor) {
  const Tensor scaled = t.Clone();
  for (double& v : scaled.span<double>()) v *= factor;
  return scaled;
}

TEST(LayoutTraps, Step0LossLayout) {
  const double loss = TrainLayout(InF64(1), {}).steps[0].loss;
  for (const Layout& layout : Layouts()) {
    EXPECT_NEAR(TrainLayout(InF64(1), layout).steps[0].loss, loss, kWithin * loss) << layout.Name();
  }
}

TEST(LayoutTraps, ExpertGradScale) {
  const LayoutRun one = TrainLayout(InF64(1), {});
  for (const Layout& layout : Layouts()) {
    const LayoutRun run = TrainLayout(InF64(1), layout);
    for (const auto& [name, expected] : one.gradients) {
      const Tensor& got = run.gradients.at(name);
      EXPECT_TRUE(Same(got, expected)) << layout.Name() << ": " << name;
      // Means over ranks, or sums over an expert group, would not pass.
      EXPECT_FALSE(Same(Times(got, 1.0 / static_cast<double>(layout.ranks())), expected)) << name;
      if (layout.ep > 1) {
        EXPECT_FALSE(Same(Times(got, static_cast<double>(layout.ep)), expected)) << name;
      }
    }
  }
}

TEST(LayoutTraps, NormUndercount) {
  const double norm = TrainLayout(InF64(1), {}).steps[0].grad_norm;
  for (const Layout& layout : Layouts()) {
    const LayoutRun run = TrainLayout(InF64(1), layout);
    EXPECT_NEAR(run.steps[0].grad_norm, norm, kWithin * norm) << layout.Name();
    for (const auto& [at, of_rank] : run.norms) {
      EXPECT_EQ(of_rank, run.steps[0].grad_norm) << layout.Name() << ", rank " << at.second;
    }
    // Of one expert in four, as a norm of rank 0 alone would have them: another number.
    double squares = 0;
    for (const auto& [name, t] : run.gradients) {
      const bool experts = name.find("mlp.experts.") != std::string::npos;
      const Tensor part = experts ? t.Slice(0, 0, 1) : t;
      for (std::int64_t i = 0; i < part.numel(); ++i) {
        squares += std::pow(ElementAsDouble(part, i), 2);
      }
    }
    EXPECT_GT(std::abs(std::sqrt(squares) - norm), 1e3 * kWithin * norm);
  }
}

TEST(LayoutTraps, ReplicaDrift) {
  LayoutCase c;
  c.config = TableConfig();
  c.steps = 100;
  EXPECT_EQ(TrainLayout(c, {2, 2, 0}).differences, std::vector<std::string>());
  // One bit of one weight on one rank is seen.
  c.steps = 1;
  c.drift = true;
  EXPECT_FALSE(TrainLayout(c, {2, 2, 0}).differences.empty());
}

TEST(LayoutTraps, RankSeededExperts) {
  const LayoutRun one = TrainLayout(InF64(0), {});
  for (const Layout& layout : Layouts()) {
    const LayoutRun run = TrainLayout(InF64(0), layout);
    EXPECT_EQ(run.differences, std::vector<std::string>());
    for (const auto& [name, expected] : one.state) {
      EXPECT_TRUE(Agrees(check::CompareBitwise(name, run.state.at(name), expected)));
    }
  }
  for (const auto& [name, t] : one.state) {
    if (!name.starts_with("weight/") || name.find("mlp.experts.") == std::string::npos) continue;
    for (std::int64_t e = 1; e < t.dim(0); ++e) {
      EXPECT_FALSE(Same(t.Select(e), t.Select(0))) << name << ": expert " << e << " is a copy";
    }
  }
}

TEST(LayoutTraps, MeanOfMeans) {
  LayoutCase c = InF64(2);
  c.weights_of_first = true;  // the other half of the ranks has no label of any weight
  const LayoutRun one = TrainLayout(c, {});
  for (const Layout& layout : Layouts()) {
    SCOPED_TRACE(layout.Name());
    ExpectSameRun(TrainLayout(c, layout), one);
  }
}

// Ranks 1 and above have no row in any layer with ep = 2, and 2 and above have none with ep = 4.
TEST(LayoutTraps, ZeroTokenRank) {
  for (const bool one_routing : {true, false}) {
    LayoutCase c = InF64(2);
    c.one_routing = one_routing;
    c.config.output_router_logits = false;
    const LayoutRun one = TrainLayout(c, {});
    if (one_routing) {
      EXPECT_EQ(one.steps[0].expert_counts[0][2] + one.steps[0].expert_counts[0][3], 0);
      EXPECT_GT(one.steps[0].expert_counts[0][1], 0);
    }
    for (const Layout& layout : {Layout{1, 2}, Layout{1, 4}, Layout{2, 2, 3}}) {
      SCOPED_TRACE(layout.Name());
      ExpectSameRun(TrainLayout(c, layout), one);
    }
  }
}

TEST(LayoutTraps, ZeroTokenRankInEveryRecipe) {
  for (const quant::Recipe& recipe :
       {quant::Recipe(quant::BF16{}), quant::Recipe(quant::DelayedScaling{}),
        quant::Recipe(quant::Float8CurrentScaling{}), quant::Recipe(quant::Float8BlockScaling{}),
        quant::Recipe(quant::MXFP8BlockScaling{})}) {
    SCOPED_TRACE(Name(recipe));
    LayoutCase c;
    c.config = TableConfig();
    c.dtype = DType::kBF16;
    c.recipe = recipe;
    c.steps = 2;
    c.one_routing = true;
    const LayoutRun run = TrainLayout(c, {2, 2, 0});
    EXPECT_EQ(run.differences, std::vector<std::string>());
    const double loss = TrainLayout(c, {}).steps[1].loss;
    // As far as a bf16 run may be: what it has in common with one rank is told by the table.
    EXPECT_NEAR(run.steps[1].loss, loss, 0.05 * loss);
  }
}

// Counts what a rank sends in exchanges of token rows.
class Counting final : public comm::Communicator {
 public:
  Counting(comm::Communicator& inner, std::int64_t width, std::atomic<std::int64_t>& rows)
      : inner_(&inner), width_(width), rows_(rows) {}
  Counting(std::unique_ptr<comm::Communicator> inner, std::int64_t width,
           std::atomic<std::int64_t>& rows)
      : owned_(std::move(inner)), inner_(owned_.get()), width_(width), rows_(rows) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::string_view transport() const override { return inner_->transport(); }
  std::unique_ptr<comm::Communicator> Split(int color, int key, std::string name) override {
    return std::make_unique<Counting>(inner_->Split(color, key, std::move(name)), width_, rows_);
  }

 protected:
  void Run(comm::Operation op) override {
    switch (op.signature.kind) {
      case comm::OpKind::kAllReduce: return inner_->AllReduce(op.input, op.signature.reduce);
      case comm::OpKind::kAllToAll:
        if (op.signature.row_elements == width_) {
          for (const std::int64_t n : op.to) rows_ += n;
        }
        return inner_->AllToAll(op.input, op.to, op.output, op.from);
      case comm::OpKind::kReduceScatter:
        return inner_->ReduceScatter(op.input, op.output, op.signature.reduce, op.to);
      case comm::OpKind::kAllGather: return inner_->AllGather(op.input, op.output, op.from);
      case comm::OpKind::kBroadcast: return inner_->Broadcast(op.input, op.signature.peer);
      case comm::OpKind::kBarrier: return inner_->Barrier();
      case comm::OpKind::kSend: return inner_->Send(op.input, op.signature.peer);
      case comm::OpKind::kRecv: return inner_->Recv(op.output, op.signature.peer);
    }
  }
  comm::Work Start(comm::Operation op) override {
    Run(std::move(op));
    return {};
  }

 private:
  std::unique_ptr<comm::Communicator> owned_;
  comm::Communicator* inner_;
  std::int64_t width_;
  std::atomic<std::int64_t>& rows_;
};

// A token's rows travel four times in a layer, to its experts and back in both passes: no row more.
TEST(LayoutTraps, PaddingTraffic) {
  LayoutCase c = InF64(1);
  std::atomic<std::int64_t> rows{0};
  c.wrap = [&](comm::Communicator& world) {
    return std::make_unique<Counting>(world, c.config.hidden_size, rows);
  };
  TrainLayout(c, {2, 2, 3});
  const std::int64_t tokens = c.rows * kRowTokens;
  const std::int64_t passes = 4 + 2;  // training, and the held-out batch forward alone
  EXPECT_EQ(rows, passes * c.config.num_hidden_layers * tokens * c.config.num_experts_per_tok);
}

class WithFolder : public ::testing::Test {
 protected:
  WithFolder() : folder_(fs::temp_directory_path() / fmt::format("cistron-layouts-{}", getpid())) {
    fs::remove_all(folder_);
  }
  ~WithFolder() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  fs::path folder_;
};
using LayoutCheckpoints = WithFolder;

// Saved under each layout, restored under each other: bitwise the same state, and the run goes on.
void ExpectStateMoves(LayoutCase c, const fs::path& folder) {
  const std::vector<Layout> layouts = {{1, 1, 0}, {1, 2, 0}, {2, 2, 0},
                                       {1, 4, 0}, {4, 1, 0}, {2, 2, 0, true}};
  c.steps = 2;
  for (const Layout& from : layouts) {
    LayoutCase saved = c;
    saved.save_to = folder / fmt::format("dp{}ep{}{}", from.dp, from.ep, from.sharded ? "s" : "");
    const LayoutRun before = TrainLayout(saved, from);
    for (const Layout& to : layouts) {
      SCOPED_TRACE(fmt::format("from {} to {}", from.Name(), to.Name()));
      LayoutCase restored = c;
      restored.restore_from = io::NewestGoodCheckpoint(saved.save_to).value();
      const LayoutRun after = TrainLayout(restored, to);  // no step is left
      EXPECT_EQ(after.differences, std::vector<std::string>());
      ASSERT_EQ(after.state.size(), before.state.size());
      for (const auto& [name, t] : before.state) {
        EXPECT_TRUE(Agrees(check::CompareBitwise(name, after.state.at(name), t)));
      }
    }
  }
}

TEST_F(LayoutCheckpoints, ReshardLosesState) {
  LayoutCase c = InF64(2);
  c.config.scoring_func = model::ScoringFunc::kSigmoid;
  c.config.moe_router_enable_expert_bias = true;
  ExpectStateMoves(c, folder_);
  // And what the run goes on to is what it would have come to.
  c.steps = 4;
  const LayoutRun whole = TrainLayout(c, {});
  for (const Layout& to : Layouts()) {
    SCOPED_TRACE(to.Name());
    LayoutCase rest = c;
    rest.restore_from = io::NewestGoodCheckpoint(folder_ / "dp2ep2").value();
    const LayoutRun run = TrainLayout(rest, to);
    EXPECT_NEAR(run.steps.back().loss, whole.steps.back().loss, kWithin * whole.steps.back().loss);
    for (const auto& [name, t] : whole.state) EXPECT_TRUE(Same(run.state.at(name), t)) << name;
  }
}

// Scales and histories of experts lie on the ranks that have them, and are stored as one tensor.
TEST_F(LayoutCheckpoints, ReshardKeepsDelayedScaling) {
  LayoutCase c = InF64(2);
  c.dtype = DType::kBF16;
  c.recipe = quant::DelayedScaling{.amax_history_len = 4};
  ExpectStateMoves(c, folder_);
}

// A rank that dies before the last part is written leaves nothing that could be picked up.
TEST_F(LayoutCheckpoints, SaveHalfWritten) {
  LayoutCase c = InF64(1);
  c.save_to = folder_;
  TrainLayout(c, {2, 2, 0});
  const fs::path good = io::NewestGoodCheckpoint(folder_).value();
  c.steps = 2;
  c.die_in_save = true;
  EXPECT_ANY_THROW(TrainLayout(c, {2, 2, 0}));
  EXPECT_EQ(io::NewestGoodCheckpoint(folder_).value(), good);
  EXPECT_EQ(io::ListCheckpoints(folder_), std::vector<fs::path>{good});
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1)
      << "a temporary directory is left";
}

}  // namespace
}  // namespace cistron::train
