// balance_loss: closed forms and sums written once more, by every implementation.
#include "cistron/ops/balance_loss/balance_loss.h"

#include <gtest/gtest.h>

#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

void ForEach(DType dtype, const std::function<void(const Context&)>& f) {
  testing::ForEachImplementation(BalanceLossImpls(), BalanceLossProblem{dtype, 4}, f);
}

Tensor Poisoned(const Shape& shape) {
  const Tensor t = Tensor::Empty(shape, DType::kF64);
  FillPoison(t);
  return t;
}

Tensor Counts(const Shape& shape, const std::vector<std::int64_t>& values) {
  return Tensor::FromSpan<std::int64_t>(shape, values);
}

// Closed form: two layers, three scopes of which one has no tokens, two experts, top-1.
TEST(LoadBalancingLoss, ClosedForm) {
  std::vector<RouterOutputs> layers(2);
  const std::vector<std::int64_t> counts[] = {{3, 1, 0, 0, 0, 2}, {1, 3, 0, 0, 2, 0}};
  const std::vector<double> scores[] = {{2.5, 1.5, 0, 0, 0.75, 1.25}, {1.5, 2.5, 0, 0, 1.0, 1.0}};
  for (std::size_t l = 0; l < 2; ++l) {
    layers[l].counts = Counts({3, 2}, counts[l]);
    layers[l].score_sums = Tensor::FromSpan<double>({3, 2}, scores[l]);
  }
  // Scope 0: n = 4 of N = 12 tokens, T = 8, C = (4, 4), S = (4, 4): aux = 2/64·32 = 1.
  // Scope 2: n = 2, T = 4, C = (2, 2), S = (1.75, 2.25): aux = 2/16·8 = 1.
  const double expected[] = {0.5 * (4.0 / 12) * 2 / 64 * 4, 0, 0.5 * (2.0 / 12) * 2 / 16 * 2};
  ForEach(DType::kF64, [&](const Context& ctx) {
    const Tensor value = Poisoned({}), grad = Poisoned({3, 2});
    LoadBalancingLoss(ctx, layers, 1, 0.5, Tensor::Scalar(1.0 / 12), value, grad);
    EXPECT_DOUBLE_EQ(value.item(), 4.0 / 12 + 2.0 / 12);
    for (std::int64_t i = 0; i < 6; ++i) {
      EXPECT_DOUBLE_EQ(ElementAsDouble(grad, i), expected[i / 2]);
    }
  });
}

// More layers than one launch takes, more experts than threads; the definition, term by term.
TEST(LoadBalancingLoss, ManyLayersAndExperts) {
  constexpr std::int64_t kLayers = 150, kScopes = 2, kExperts = 300, kTopK = 4;
  std::vector<RouterOutputs> layers(kLayers);
  std::vector<std::int64_t> total(kScopes * kExperts);
  std::vector<double> scores(kScopes * kExperts);
  for (std::int64_t l = 0; l < kLayers; ++l) {
    RouterOutputs& layer = layers[static_cast<std::size_t>(l)];
    layer.counts = Tensor::Empty({kScopes, kExperts}, DType::kI64);
    layer.score_sums =
        testing::Uniform({kScopes, kExperts}, DType::kF64, fmt::format("s{}", l), 0.0, 2.0);
    for (std::int64_t i = 0; i < kScopes * kExperts; ++i) {
      layer.counts.data<std::int64_t>()[i] = (i * 7 + l * 13) % 5;
      total[static_cast<std::size_t>(i)] += (i * 7 + l * 13) % 5;
      scores[static_cast<std::size_t>(i)] += layer.score_sums.data<double>()[i];
    }
  }
  const double inv_tokens = 1.0 / 1000;
  double expected = 0;
  std::vector<double> expected_grad;
  for (std::int64_t r = 0; r < kScopes; ++r) {
    double assignments = 0, products = 0;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const auto i = static_cast<std::size_t>(r * kExperts + e);
      assignments += static_cast<double>(total[i]);
      products += static_cast<double>(total[i]) * scores[i];
    }
    const double all = assignments / kTopK, mine = all / kLayers;
    expected += mine * inv_tokens * kExperts / (all * all) * products;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      expected_grad.push_back(
          0.25 * mine * inv_tokens * kExperts / (all * all) *
          static_cast<double>(total[static_cast<std::size_t>(r * kExperts + e)]));
    }
  }
  const double gamma = 2 * check::Gamma(kLayers + kExperts + 20, DType::kF64);  // all terms ≥ 0
  ForEach(DType::kF64, [&](const Context& ctx) {
    const Tensor value = Poisoned({}), grad = Poisoned({kScopes, kExperts});
    LoadBalancingLoss(ctx, layers, kTopK, 0.25, Tensor::Scalar(inv_tokens), value, grad);
    EXPECT_NEAR(value.item(), expected, gamma * expected);
    for (std::size_t i = 0; i < expected_grad.size(); ++i) {
      EXPECT_NEAR(ElementAsDouble(grad, static_cast<std::int64_t>(i)), expected_grad[i],
                  gamma * expected_grad[i]);
    }
  });
}

TEST(LayerLoadBalancingLoss, IsAKthOfTheOtherForOneLayer) {
  RouterOutputs layer;
  layer.counts = Counts({1, 4}, {5, 3, 2, 2});
  layer.score_sums = testing::Uniform({1, 4}, DType::kF64, "s");
  ForEach(DType::kF64, [&](const Context& ctx) {
    const Tensor all = Poisoned({}), all_grad = Poisoned({1, 4});
    const Tensor own = Poisoned({}), own_grad = Poisoned({1, 4});
    const Tensor inv_tokens = Tensor::Scalar(1.0 / 8);
    LoadBalancingLoss(ctx, {&layer, 1}, 2, 0.5, inv_tokens, all, all_grad);
    LayerLoadBalancingLoss(ctx, layer, 2, 0.5, inv_tokens, own, own_grad);
    EXPECT_EQ(own.item(), all.item() / 2);
    for (std::int64_t e = 0; e < 4; ++e) {
      EXPECT_EQ(ElementAsDouble(own_grad, e), ElementAsDouble(all_grad, e) / 2);
    }
  });
}

TEST(RouterZLoss, IsTheMeanOverTheTokensOfTheGlobalBatch) {
  const std::vector<double> sums = {3, 5};
  ForEach(DType::kF64, [&](const Context& ctx) {
    const Tensor value = Poisoned({}), grad = Poisoned({2});
    RouterZLoss(ctx, Tensor::FromSpan<double>({2}, sums), 0.5, Tensor::Scalar(1.0 / 16), value,
                grad);
    EXPECT_EQ(value.item(), 0.5);
    for (const double g : grad.span<double>()) EXPECT_EQ(g, 0.5 / 16);
  });
}

// Closed form: u·sign(mean − count), with the comparison exact; equal counts do not move.
TEST(ExpertBias, ClosedForm) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    ForEach(dtype, [&](const Context& ctx) {
      const Tensor bias = Tensor::Zeros({4}, dtype);
      for (int step = 0; step < 3; ++step) {
        UpdateExpertBias(ctx, Counts({4}, {5, 3, 2, 2}), 0.25, bias);  // mean 3
      }
      const double expected[] = {-0.75, 0, 0.75, 0.75};
      for (std::int64_t e = 0; e < 4; ++e) EXPECT_EQ(ElementAsDouble(bias, e), expected[e]);
    });
  }
  // Beyond 2^53 a mean in floating point would not tell.
  const Tensor large = Counts({2}, {(std::int64_t{1} << 60) + 1, std::int64_t{1} << 60});
  ForEach(DType::kF32, [&](const Context& ctx) {
    const Tensor bias = Tensor::Zeros({2}, DType::kF32);
    UpdateExpertBias(ctx, large, 1, bias);
    EXPECT_EQ(bias.data<float>()[0], -1);
    EXPECT_EQ(bias.data<float>()[1], 1);
  });
  EXPECT_THROW(UpdateExpertBias(Context(), large, 1, Tensor::Zeros({3}, DType::kF32)), Error);
}

TEST(AddCounts, SumsRows) {
  ForEach(DType::kF64, [&](const Context& ctx) {
    const Tensor to = Counts({2}, {100, 200});
    AddCounts(ctx, Counts({3, 2}, {1, 2, 3, 4, 5, 6}), to);
    EXPECT_EQ(to.data<std::int64_t>()[0], 109);
    EXPECT_EQ(to.data<std::int64_t>()[1], 212);
    AddCounts(ctx, Tensor::Empty({0, 2}, DType::kI64), to);
    EXPECT_EQ(to.data<std::int64_t>()[0], 109);
    const Tensor one = Counts({}, {7});
    AddCounts(ctx, one, one.Reshape({1}));
    EXPECT_EQ(*one.data<std::int64_t>(), 14);
  });
  EXPECT_THROW(AddCounts(Context(), Counts({3}, {1, 2, 3}), Counts({2}, {1, 2})), Error);
}

}  // namespace
}  // namespace cistron::ops
