// The MoE layer by itself: routings that break other layers, the shared expert, and what it
// computes against a sum over experts written out.
#include "cistron/nn/moe_layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "cistron/check/compare.h"
#include "cistron/nn/load_balancing_loss.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::nn {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Layer {
  Layer(const MoeLayer::Config& config, DType dtype)
      : store(ops::Context(), dtype),
        dispatcher(config.router.num_experts),
        moe(store, dispatcher, "mlp.", config) {
    store.Initialize(11, 0.4);
  }
  LocalParameterStore store;
  LocalTokenDispatcher dispatcher;
  MoeLayer moe;
};

struct Pass {
  Tensor y, dx;
  MoeLayer::Routing routing;
};

Pass RunPass(Layer& layer, const Tensor& x, const Tensor& dy, const Tensor& mask = {}) {
  const ops::Context ctx;
  Saved saved;
  Pass p;
  layer.store.ZeroGradients();
  for (auto& parameter : layer.store.parameters()) {
    if (parameter.grad) FillPoison(parameter.grad);
  }
  p.y = layer.moe.Forward(ctx, x, mask, {}, MoeLayer::Statistics::kLoadAndZ, {}, p.routing, &saved);
  p.dx = layer.moe.Backward(ctx, dy, mask, {}, {}, saved);
  EXPECT_TRUE(saved.empty());
  return p;
}

bool AllFinite(const Tensor& t) {
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    if (!std::isfinite(ElementAsDouble(t, i))) return false;
  }
  return true;
}

// Every token chooses the experts of one fixed order: logits are rows of x, made by the router's
// weight, so the gate weight alone decides when x has a constant column.
void ChooseAlways(Layer& layer, const std::vector<std::int64_t>& order) {
  auto* gate = layer.store.Find("mlp.gate.weight");
  FillZero(gate->master);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t at = order[i] * gate->spec.shape[1];
    gate->master.data<float>()[at] = 10.0f * static_cast<float>(order.size() - i);
  }
  if (gate->value.raw() != gate->master.raw()) Convert(gate->master, gate->value);
  layer.store.MarkChanged();
}

Tensor Input(std::int64_t tokens, std::int64_t hidden, DType dtype) {
  const Tensor x = testing::Normal({tokens, hidden}, DType::kF32, "x");
  for (std::int64_t t = 0; t < tokens; ++t) x.data<float>()[t * hidden] = 1;
  return ConvertTo(x, dtype);
}

// zero-token-expert: first, middle and last experts without tokens, and all tokens on one.
TEST(MoeLayer, ZeroTokenExpert) {
  constexpr std::int64_t kTokens = 33, kHidden = 8, kFfn = 6, kExperts = 5;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t chosen : {0, 2, 4}) {
      SCOPED_TRACE(fmt::format("{} expert {}", Name(dtype), chosen));
      Layer layer({.hidden = kHidden, .ffn = kFfn, .router = {.num_experts = kExperts, .top_k = 1}},
                  dtype);
      ChooseAlways(layer, {chosen});
      const Tensor x = Input(kTokens, kHidden, dtype);
      const Tensor dy = testing::Normal({kTokens, kHidden}, dtype, "dy");
      for (int pass = 0; pass < 2; ++pass) {  // the second meets poisoned gradients
        const Pass p = RunPass(layer, x, dy);
        EXPECT_EQ(p.routing.router.counts.data<std::int64_t>()[chosen], kTokens);
        EXPECT_TRUE(AllFinite(p.y) && AllFinite(p.dx));
        for (const char* name : {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}) {
          const Tensor& grad = layer.store.Find(name)->grad;
          for (std::int64_t e = 0; e < kExperts; ++e) {
            double sum = 0;
            for (const float v : grad.Select(e).span<float>()) sum += std::abs(v);
            EXPECT_TRUE(std::isfinite(sum));
            EXPECT_EQ(sum != 0, e == chosen) << name << " expert " << e;
          }
        }
      }
    }
  }
}

TEST(MoeLayer, BackwardAfterTheParametersChangedIsRefused) {
  const ops::Context ctx;
  Layer layer({.hidden = 8, .ffn = 6, .router = {.num_experts = 4, .top_k = 2}}, DType::kF32);
  const Tensor x = Input(5, 8, DType::kF32);
  Saved saved;
  MoeLayer::Routing routing;
  layer.moe.Forward(ctx, x, {}, {}, MoeLayer::Statistics::kNone, {}, routing, &saved);
  layer.store.MarkChanged();
  EXPECT_THAT([&] { layer.moe.Backward(ctx, x, {}, {}, {}, saved); },
              ThrowsMessage<Error>(HasSubstr("parameters changed")));
}

// one-token, many-experts: 1 token of 512 experts, K 32.
TEST(MoeLayer, OneTokenManyExperts) {
  Layer layer({.hidden = 8, .ffn = 4, .router = {.num_experts = 512, .top_k = 32}}, DType::kF32);
  const Pass p =
      RunPass(layer, Input(1, 8, DType::kF32), testing::Normal({1, 8}, DType::kF32, "dy"));
  EXPECT_TRUE(AllFinite(p.y) && AllFinite(p.dx));
  double sum = 0;
  std::set<std::int32_t> experts;
  for (const std::int32_t e : p.routing.router.experts.span<std::int32_t>()) experts.insert(e);
  for (const float v : p.routing.router.probs.span<float>()) sum += v;
  EXPECT_EQ(experts.size(), 32u);
  EXPECT_NEAR(sum, 1, 1e-6);
}

// No tokens at all, and none that is not padding.
TEST(MoeLayer, NoTokens) {
  Layer layer({.hidden = 8, .ffn = 4, .router = {.num_experts = 4, .top_k = 2}, .shared_ffn = 4},
              DType::kF32);
  for (const std::int64_t tokens : {0, 3}) {
    const Tensor mask = Tensor::Zeros({tokens}, DType::kU8);
    const Tensor x = testing::Normal({tokens, 8}, DType::kF32, "x");
    const Pass p = RunPass(layer, x, Tensor::Zeros({tokens, 8}, DType::kF32), mask);
    for (const float v : p.y.span<float>()) EXPECT_EQ(v, 0);
    for (const float v : p.dx.span<float>()) EXPECT_EQ(v, 0);
    for (const auto& parameter : layer.store.parameters()) {
      for (const float v : parameter.grad.span<float>()) EXPECT_EQ(v, 0);
    }
  }
}

// nan-logits: a token whose logits are NaN or infinite has K distinct experts all the same, and is
// counted; its neighbours compute what they would without it.
TEST(MoeLayer, NanLogits) {
  constexpr std::int64_t kTokens = 6, kHidden = 8, kExperts = 5, kTopK = 3;
  for (const ops::ScoreFunction score :
       {ops::ScoreFunction::kSoftmaxAfterTopK, ops::ScoreFunction::kSoftmaxBeforeTopK,
        ops::ScoreFunction::kSigmoid}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Layer layer({.hidden = kHidden,
                   .ffn = 4,
                   .router = {.score = score, .num_experts = kExperts, .top_k = kTopK},
                   .expert_bias = score == ops::ScoreFunction::kSigmoid},
                  dtype);
      const Tensor good = testing::Normal({kTokens, kHidden}, dtype, "x");
      const Tensor dy = testing::Normal({kTokens, kHidden}, dtype, "dy");
      const Tensor bad = good.Clone();
      const auto poison = [&](std::int64_t token, double value) {
        DispatchFloat("test", dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          bad.data<T>()[token * kHidden] = T(static_cast<float>(value));
        });
      };
      poison(1, std::numeric_limits<double>::quiet_NaN());
      poison(4, std::numeric_limits<double>::infinity());
      const Pass a = RunPass(layer, good, dy), b = RunPass(layer, bad, dy);
      EXPECT_EQ(*a.routing.router.nonfinite_tokens.data<std::int64_t>(), 0);
      EXPECT_EQ(*b.routing.router.nonfinite_tokens.data<std::int64_t>(), 2);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        std::set<std::int32_t> experts;
        for (const std::int32_t e : b.routing.router.experts.Select(t).span<std::int32_t>()) {
          EXPECT_GE(e, 0);
          EXPECT_LT(e, kExperts);
          experts.insert(e);
        }
        EXPECT_EQ(experts.size(), static_cast<std::size_t>(kTopK)) << "token " << t;
        if (t == 1 || t == 4) continue;
        EXPECT_TRUE(AllFinite(b.y.Select(t)) && AllFinite(b.dx.Select(t)));
      }
    }
  }
}

// With one expert, whose probability is 1, a shared expert of the same weights doubles output and
// input gradient, and has the expert's gradients; masked rows are 0.
TEST(MoeLayer, SharedExpertIsAnExpertThatAllTokensUse) {
  constexpr std::int64_t kTokens = 9, kHidden = 8, kFfn = 6, kPadding = 2;
  const ops::RouterConfig one = {.num_experts = 1, .top_k = 1};
  Layer plain({.hidden = kHidden, .ffn = kFfn, .router = one}, DType::kF64);
  Layer shared({.hidden = kHidden, .ffn = kFfn, .router = one, .shared_ffn = kFfn}, DType::kF64);
  for (const char* name : {"gate_up_proj", "down_proj"}) {
    const std::string routed = std::string("mlp.experts.") + name;
    shared.store.Assign(std::string("mlp.shared_experts.") + name,
                        shared.store.Find(routed)->master);
  }
  EXPECT_TRUE(shared.store.Find("mlp.experts.down_proj")->spec.is_expert);
  EXPECT_FALSE(shared.store.Find("mlp.shared_experts.down_proj")->spec.is_expert);
  const Tensor x = testing::Normal({kTokens + kPadding, kHidden}, DType::kF64, "x");
  Tensor dy = testing::Normal({kTokens + kPadding, kHidden}, DType::kF64, "dy");
  FillZero(x.Slice(0, kTokens, kPadding));
  FillZero(dy.Slice(0, kTokens, kPadding));
  const Tensor mask = Tensor::Zeros({kTokens + kPadding}, DType::kU8);
  for (std::int64_t t = 0; t < kTokens; ++t) mask.data<std::uint8_t>()[t] = 1;
  const Pass a = RunPass(plain, x, dy, mask), b = RunPass(shared, x, dy, mask);
  const auto doubled = [](const Tensor& t) {
    const Tensor twice = t.Clone();
    for (double& v : twice.span<double>()) v *= 2;
    return twice;
  };
  EXPECT_TRUE(Agrees(check::CompareToMaximum("y", b.y, doubled(a.y), 1e-14)));
  EXPECT_TRUE(Agrees(check::CompareToMaximum("dx", b.dx, doubled(a.dx), 1e-14)));
  for (const char* name : {"gate_up_proj", "down_proj"}) {
    EXPECT_TRUE(Agrees(check::CompareToMaximum(
        name, shared.store.Find(std::string("mlp.shared_experts.") + name)->grad,
        plain.store.Find(std::string("mlp.experts.") + name)->grad, 1e-14)));
  }
  EXPECT_NE(shared.moe.shared_expert(), nullptr);
  EXPECT_EQ(plain.moe.shared_expert(), nullptr);
  EXPECT_EQ(shared.moe.shared_expert()->MakePlan(ops::Context(), DType::kF32, true).forward.size(),
            1u);  // it fuses
}

TEST(RouterZLoss, IsTheMeanOverTheTokensOfTheGlobalBatch) {
  ops::RouterOutputs layer;
  const std::vector<double> sums = {3, 5};
  layer.z_sums = Tensor::FromSpan<double>({2}, sums);
  const RouterZLoss z = ComputeRouterZLoss(ops::Context(), layer, 0.5, Tensor::Scalar(1.0 / 16));
  EXPECT_EQ(z.value.item(), 0.5);
  for (const double g : z.grad.span<double>()) EXPECT_EQ(g, 0.5 / 16);
}

}  // namespace
}  // namespace cistron::nn
