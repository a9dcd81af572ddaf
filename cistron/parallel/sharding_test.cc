// Sharded parameters: what modules see, what is drawn, summed and saved is that of one rank, for
// shards that are uneven, empty, or end within an expert.
#include <gtest/gtest.h>

#include <mutex>
#include <numeric>

#include "cistron/comm/inproc.h"
#include "cistron/parallel/mesh_exchange.h"

namespace cistron::parallel {
namespace {

constexpr std::int64_t kExperts = 6;

std::vector<nn::ParameterSpec> Specs() {
  return {{.name = "matrix", .shape = {7, 5}},
          {.name = "vector", .shape = {3}, .decays = false},
          {.name = "experts", .shape = {kExperts, 5, 4}, .is_expert = true},
          {.name = "bias", .shape = {kExperts, 3}, .is_expert = true, .decays = false}};
}

std::vector<float> Values(const Tensor& t) {
  const Tensor dense = t.Clone();
  const auto v = dense.span<float>();
  return {v.begin(), v.end()};
}

// The part of a global tensor that lies in a box.
std::vector<float> InBox(const Tensor& global, const Shape& start, const Shape& size) {
  Tensor t = global;
  for (int d = 0; d < size.rank(); ++d) t = t.Slice(d, start[d], size[d]);
  return Values(t);
}

class Sharding : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(Sharding, IsInvisibleToModulesAndComplete) {
  const auto [dp, ep] = GetParam();
  const ops::Context ctx;
  nn::LocalParameterStore whole(ctx, DType::kF32);
  for (const nn::ParameterSpec& spec : Specs()) whole.Register(spec);
  whole.Initialize(3, 0.5);

  std::mutex mutex;
  std::map<std::string, std::int64_t> held;  // elements of all ranks' boxes
  comm::RunRanks(dp * ep, [&, dp = dp, ep = ep](comm::Communicator& world) {
    const Mesh mesh(world, dp, ep, kExperts);
    MeshExchange exchange(mesh);
    nn::ParameterPartition partition = mesh.Partition(/*sharded=*/true);
    partition.exchange = &exchange;
    nn::LocalParameterStore store(ctx, DType::kF32, true, partition);
    std::vector<nn::ParameterId> ids;
    for (const nn::ParameterSpec& spec : Specs()) ids.push_back(store.Register(spec));
    store.Initialize(3, 0.5);

    // Twice: the second pass gathers ahead. Then the weights change.
    for (int pass = 0; pass < 2; ++pass) {
      for (const nn::ParameterId id : ids) {
        const nn::AcquiredWeight w(store, id);
        const auto& p = store.parameters()[static_cast<std::size_t>(id)];
        EXPECT_EQ(Values(w.tensor()), InBox(whole.parameters()[static_cast<std::size_t>(id)].value,
                                            p.start, p.local_shape))
            << p.spec.name << " pass " << pass;
      }
    }
    for (const nn::ParameterId id : ids) {
      // Two micro-batches on each rank, whose gradients are small integers: sums are exact.
      for (int micro = 0; micro < 2; ++micro) {
        const ops::Output out = store.GradientOutput(id);
        float* g = out.tensor.data<float>();
        for (std::int64_t i = 0; i < out.tensor.numel(); ++i) {
          const float mine = static_cast<float>((i + 1) * (mesh.rank() + 1) + micro);
          g[i] = out.mode == ops::WriteMode::kWrite ? mine : g[i] + mine;
        }
      }
      store.OfferSquareSums(id, Tensor::Scalar(1.0));
    }
    store.FinishGradients();
    for (const auto& p : store.parameters()) {
      // Whose gradients are added: all ranks', or those of the ranks with the same experts.
      std::int64_t factors = 0, ranks = 0;
      for (int r = 0; r < mesh.size(); ++r) {
        if (p.spec.is_expert && r % ep != mesh.ep_index()) continue;
        factors += r + 1;
        ++ranks;
      }
      for (std::int64_t i = 0; i < p.grad.numel(); ++i) {
        EXPECT_EQ(p.grad.data<float>()[i],
                  static_cast<float>(2 * (p.shard_begin + i + 1) * factors + ranks))
            << p.spec.name << " element " << i;
      }
      EXPECT_FALSE(p.whole_grad) << p.spec.name;
      // Squares of what one rank wrote are not those of the sum.
      // Of one rank's part of a sum they would be wrong; where no other rank has a part they stay.
      const bool alone = (p.spec.is_expert ? dp : dp * ep) == 1;
      EXPECT_EQ(static_cast<bool>(p.square_sums), alone) << p.spec.name;
    }
    store.MarkChanged();

    for (const auto& p : store.parameters()) {
      const Tensor& global = whole.Find(p.spec.name)->value;
      for (const auto& [values, start] : nn::LocalParameterStore::BoxesOf(p, p.master)) {
        EXPECT_EQ(Values(values), InBox(global, start, values.shape())) << p.spec.name;
        const std::lock_guard lock(mutex);
        held[p.spec.name] += values.numel();
      }
    }
    store.Assign("experts", whole.Find("experts")->value);
    store.Assign("vector", whole.Find("vector")->value);
    for (const char* name : {"experts", "vector"}) {
      const auto& p = *store.Find(name);
      for (const auto& [values, start] : nn::LocalParameterStore::BoxesOf(p, p.master)) {
        EXPECT_EQ(Values(values), InBox(whole.Find(name)->value, start, values.shape())) << name;
      }
    }
  });
  for (const auto& p : whole.parameters()) EXPECT_EQ(held[p.spec.name], p.value.numel());
}

INSTANTIATE_TEST_SUITE_P(Layouts, Sharding,
                         ::testing::Values(std::pair{1, 1}, std::pair{2, 1}, std::pair{1, 2},
                                           std::pair{4, 1}, std::pair{5, 2}, std::pair{2, 3},
                                           std::pair{3, 6}));

// A gradient that is complete travels while others are made; one that comes late is refused.
TEST(GradientTransfers, ReducesBehindAndRefusesMoreMicroBatchesThanAnnounced) {
  comm::RunRanks(2, [](comm::Communicator& world) {
    const Mesh mesh(world, 2, 1, kExperts);
    MeshExchange exchange(mesh);
    nn::ParameterPartition partition = mesh.Partition(true);
    partition.exchange = &exchange;
    nn::LocalParameterStore store(ops::Context(), DType::kF32, true, partition);
    const nn::ParameterId id = store.Register({.name = "w", .shape = {4, 2}});
    const auto write = [&](float value) {
      const ops::Output out = store.GradientOutput(id);
      float* g = out.tensor.data<float>();
      for (int i = 0; i < 8; ++i) g[i] = value + (out.mode == ops::WriteMode::kWrite ? 0 : g[i]);
      store.OfferSquareSums(id, Tensor::Scalar(8 * value * value));  // of this rank's gradient
      store.GradientsWritten();
    };
    for (int step = 0; step < 3; ++step) {
      store.ExpectMicroBatches(2);
      write(1);
      write(2);
      if (step == 2) {
        EXPECT_THROW(store.GradientOutput(id), Error);  // it is under way
      }
      store.FinishGradients();
      EXPECT_EQ(store.parameters()[0].grad.data<float>()[0], 6);
      EXPECT_FALSE(store.parameters()[0].square_sums) << "the norm would be of one rank's gradient";
      store.ZeroGradients();
    }
  });
}

}  // namespace
}  // namespace cistron::parallel
