// The layers of Sequential by themselves, and how a store keeps quantised weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "cistron/check/compare.h"
#include "cistron/nn/experts_case.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/linear.h"
#include "cistron/nn/quantize.h"
#include "cistron/nn/rms_norm.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/ops/grouped_mlp/row_pieces.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/split_sizes.h"
#include "cistron/quant/autocast.h"
#include "cistron/quant/quantizer.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::nn {
namespace {

using testing::Agrees;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(GroupedLinear, NeedsANameInAStoreThatItShares) {
  LocalParameterStore store(ops::Context(), DType::kF32);
  GroupedLinearOptions options = OneGroup(4, 4);
  options.store = &store;
  EXPECT_THAT([&] { GroupedLinear{options}; }, ThrowsMessage<Error>(HasSubstr("needs a name")));
}

TEST(GroupedLinear, DelayedWeightGradientsAreTheSame) {
  const ops::Context ctx;
  const Tensor x = testing::Normal({9, 16}, DType::kF32, "x");
  const Tensor dy = testing::Normal({9, 24}, DType::kF32, "dy");
  const Tensor counts = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{4, 5});
  const auto gradient = [&](bool delay) {
    const GroupedLinear layer(
        {.num_groups = 2, .in_features = 16, .out_features = 24, .delay_weight_gradients = delay});
    for (int i = 0; i < 2; ++i) {
      Saved saved;
      layer.Forward(ctx, x, {.split_sizes = counts}, &saved);
      layer.Backward(ctx, dy, {}, saved);
    }
    EXPECT_EQ(layer.own_store()->parameters()[0].has_grad, !delay);
    layer.ComputeWeightGradients(ctx);
    return layer.own_store()->parameters()[0].grad;
  };
  EXPECT_TRUE(Agrees(check::CompareBitwise("dw", gradient(true), gradient(false))));
}

// Gradients of the weights before an update must not reach the step after it.
TEST(GroupedLinear, DelayedWeightGradientsOfOlderParametersAreRefused) {
  const ops::Context ctx;
  const Tensor x = testing::Normal({9, 16}, DType::kF32, "x");
  const Tensor dy = testing::Normal({9, 24}, DType::kF32, "dy");
  const Tensor counts = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{4, 5});
  const GroupedLinear layer({.num_groups = 2,
                             .in_features = 16,
                             .out_features = 24,
                             .delay_weight_gradients = true,
                             .name = "fc"});
  const auto pass = [&] {
    Saved saved;
    layer.Forward(ctx, x, {.split_sizes = counts}, &saved);
    layer.Backward(ctx, dy, {}, saved);
  };
  pass();
  layer.own_store()->MarkChanged();
  pass();
  EXPECT_THAT(
      [&] { layer.ComputeWeightGradients(ctx); },
      ThrowsMessage<Error>(AllOf(HasSubstr("fc"), HasSubstr("before the optimiser's update"))));
  EXPECT_FALSE(layer.own_store()->parameters()[0].has_grad);
  pass();  // the layer goes on
  layer.ComputeWeightGradients(ctx);
  EXPECT_TRUE(layer.own_store()->parameters()[0].has_grad);
}

// dy is quantised in backward: the delayed product needs no scope, and takes no later scale.
TEST(GroupedLinear, DelayedWeightGradientsTakeTheScalesOfTheirBackward) {
  const ops::Context ctx;
  const Tensor x = testing::Normal({9, 16}, DType::kF32, "x");
  const Tensor dy = testing::Normal({9, 24}, DType::kF32, "dy");
  const Tensor counts = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{4, 5});
  for (const quant::Recipe& recipe : kRecipes) {
    SCOPED_TRACE(quant::Name(recipe));
    const auto gradient = [&](bool delay) {
      const GroupedLinear layer({.num_groups = 2,
                                 .in_features = 16,
                                 .out_features = 24,
                                 .delay_weight_gradients = delay,
                                 .name = "fc"});
      quant::ScalingStates states;
      for (int step = 0; step < 2; ++step) {
        layer.own_store()->ZeroGradients();
        {
          const quant::Autocast scope(recipe, {.states = &states});
          Saved saved;
          layer.Forward(ctx, x, {.split_sizes = counts}, &saved);
          layer.Backward(ctx, dy, {.input = false}, saved);
        }
        states.EndStep(ctx);
        layer.ComputeWeightGradients(ctx);
      }
      return layer.own_store()->parameters()[0].grad;
    };
    EXPECT_TRUE(Agrees(check::CompareBitwise("dw", gradient(true), gradient(false))));
  }
}

// One weight an expert gives the codes, the sums and the gradients of one weight for all.
TEST(GroupedLinear, PerExpertWeightsAreTheSame) {
  const ops::Context ctx;
  const Tensor x = testing::Normal({47, 40}, DType::kF32, "x");
  const Tensor dy = testing::Normal({47, 64}, DType::kF32, "dy");
  const Tensor counts = Tensor::FromSpan<std::int64_t>({3}, std::array<std::int64_t, 3>{34, 0, 13});
  for (const quant::Recipe& recipe : kRecipes) {
    SCOPED_TRACE(quant::Name(recipe));
    GroupedLinearOptions options{
        .num_groups = 3, .in_features = 40, .out_features = 64, .out_parts = 2, .name = "w"};
    const GroupedLinear stacked(options);
    options.per_expert_weights = true;
    const GroupedLinear each(options);
    const Tensor w = testing::Normal({3, 64, 40}, DType::kF32, "w", 0.2);
    stacked.own_store()->Assign(options.name, w);
    for (std::int64_t e = 0; e < 3; ++e) {
      each.own_store()->Assign(fmt::format("{}{}", options.name, e), w.Select(e));
    }
    const auto run = [&](const GroupedLinear& layer) {
      quant::ScalingStates states;
      const quant::Autocast scope(recipe, {.states = &states});
      Saved saved;
      const Tensor y = layer.Forward(ctx, x, {.split_sizes = counts}, &saved);
      return std::pair{y, layer.Backward(ctx, dy, {}, saved)};
    };
    const auto [y, dx] = run(stacked);
    const auto [each_y, each_dx] = run(each);
    EXPECT_TRUE(Agrees(check::CompareBitwise("y", each_y, y)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dx", each_dx, dx)));
    for (std::int64_t e = 0; e < 3; ++e) {
      EXPECT_TRUE(Agrees(check::CompareBitwise(
          "dw", each.own_store()->parameters()[static_cast<std::size_t>(e)].grad,
          stacked.own_store()->parameters()[0].grad.Select(e))));
    }
  }
}

TEST(GroupedLinear, BadInputNamesOpAndValues) {
  const GroupedLinear layer({.num_groups = 2, .in_features = 16, .out_features = 24, .name = "fc"});
  const ops::Context ctx;
  const Tensor x = testing::Normal({9, 16}, DType::kF32, "x");
  const auto run = [&](const Tensor& input, const std::vector<std::int64_t>& counts) {
    return [&layer, &ctx, input, counts] {
      layer.Forward(ctx, input,
                    {.split_sizes = Tensor::FromSpan<std::int64_t>(
                         {static_cast<std::int64_t>(counts.size())}, counts)},
                    nullptr);
    };
  };
  EXPECT_THAT(run(testing::Normal({9, 8}, DType::kF32, "x"), {4, 5}),
              ThrowsMessage<Error>(AllOf(HasSubstr("fc"), HasSubstr("[M, 16]"))));
  EXPECT_THAT(run(x, {4, 5, 0}), ThrowsMessage<Error>(HasSubstr("split_sizes")));
  EXPECT_THAT(run(x, {4, -5}), ThrowsMessage<Error>(HasSubstr("split_sizes[1] = -5 is negative")));
  EXPECT_THAT(run(x, {4, 6}),
              ThrowsMessage<Error>(AllOf(HasSubstr("sum to more than the 9 rows"),
                                         HasSubstr("split_sizes[1] = 6 after 4 rows"))));
  quant::ScalingStates states;
  const quant::Autocast scope(quant::DelayedScaling{}, {.states = &states});
  const auto with = [&](const Tensor& counts) {
    return [&layer, &ctx, x, counts] { layer.Forward(ctx, x, {.split_sizes = counts}, nullptr); };
  };
  EXPECT_THAT(with(Tensor::Zeros({1, 2}, DType::kI64)),
              ThrowsMessage<Error>(HasSubstr("fc: split_sizes is i64 [1, 2], expected i64 [2]")));
  EXPECT_THAT(with(Tensor::Zeros({2}, DType::kI32)),
              ThrowsMessage<Error>(HasSubstr("fc: split_sizes is i32 [2], expected i64 [2]")));
  EXPECT_TRUE(states.Tensors().empty());
}

// In every recipe the layer itself says so, before a product of it does.
TEST(Layers, WrongInputsAndGradientsAreNamedByTheLayer) {
  const ops::Context ctx;
  const Tensor x = testing::Normal({9, 16}, DType::kF32, "x");
  const Tensor counts = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{4, 3});
  const Tensor wrong[] = {Tensor(), Tensor::Zeros({9}, DType::kF32),
                          Tensor::Zeros({9, 23}, DType::kF32)};
  for (const quant::Recipe& recipe : kRecipes) {
    SCOPED_TRACE(quant::Name(recipe));
    quant::ScalingStates states;
    const quant::Autocast scope(recipe, {.states = &states});
    const auto backward = [&](const BasicOp& op, const Tensor& dy) {
      return [&op, &ctx, x, dy, counts] {
        Saved saved;
        op.Forward(ctx, x, {.split_sizes = counts}, &saved);
        op.Backward(ctx, dy, {}, saved);
      };
    };
    LocalParameterStore store(ctx, DType::kF32);
    const Linear linear(store, "dense", 24, 16);
    const GroupedLinear grouped(
        {.num_groups = 2, .in_features = 16, .out_features = 24, .bias = true, .name = "fc"});
    for (const Tensor& t : wrong) {
      EXPECT_THAT([&] { linear.Forward(ctx, t, {}, nullptr); },
                  ThrowsMessage<Error>(HasSubstr("dense: x is " + Describe(t))));
      EXPECT_THAT(backward(linear, t),
                  ThrowsMessage<Error>(HasSubstr("dense: dy is " + Describe(t))));
      EXPECT_THAT(backward(grouped, t),
                  ThrowsMessage<Error>(HasSubstr("fc: dy is " + Describe(t))));
    }
    // Rows enough for the groups, but not those of forward.
    EXPECT_THAT(backward(grouped, Tensor::Zeros({8, 24}, DType::kF32)),
                ThrowsMessage<Error>(HasSubstr("fc: dy is f32 [8, 24], expected [9, 24]")));
    EXPECT_THAT([&] { Quantize({.name = "q"}).Forward(ctx, Tensor(), {}, nullptr); },
                ThrowsMessage<Error>(HasSubstr("q: x is an undefined tensor, expected [M, K]")));
  }
}

TEST(Quantize, ALinearBehindItGetsTheSameValues) {
  const ops::Context ctx;
  LocalParameterStore store(ctx, DType::kBF16);
  Sequential plain, with;
  plain.Append(std::make_unique<Linear>(store, "w", 24, 64));
  with.Append(std::make_unique<Quantize>());
  store.Initialize(1, 0.2);
  const Tensor x = testing::Normal({33, 64}, DType::kBF16, "x");
  for (const quant::Recipe& recipe :
       {quant::Recipe(quant::BF16{}), quant::Recipe(quant::MXFP8BlockScaling{})}) {
    const quant::Autocast scope(recipe);
    Saved saved;
    const Tensor rounded = with.Forward(ctx, x, {}, &saved);
    EXPECT_TRUE(Agrees(check::CompareBitwise("y", plain.Forward(ctx, rounded, {}, nullptr),
                                             plain.Forward(ctx, x, {}, nullptr))));
    EXPECT_EQ(check::CompareBitwise("x", rounded, x).ok, !quant::Quantizes(recipe));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dx", with.Backward(ctx, x, {}, saved), x)));
  }
}

// The gradient's values are those of an output gradient: in a hybrid format e5m2, not e4m3.
TEST(Quantize, BackwardRoundsAsAnOutputGradientIs) {
  const ops::Context ctx;
  Sequential layers;
  layers.Append(std::make_unique<Quantize>(QuantizeOptions{.backward = true}));
  const Tensor x = testing::Normal({33, 64}, DType::kBF16, "x");
  const Tensor dy = testing::Normal({33, 64}, DType::kBF16, "dy");
  const quant::Recipe recipe = quant::Float8CurrentScaling{.fp8_format = quant::Fp8Format::kHybrid};
  const auto rounded = [&](const Tensor& t, quant::TensorRole role) {
    const QuantizedTensor q = quant::QuantizeOperand(
        ctx, recipe, {.role = role, .x = t, .copies = {.rowwise = true, .columnwise = false}});
    Tensor out = ctx.Empty(t.shape(), t.dtype());
    ops::Dequantize(ctx, q, Direction::kRowwise, ops::Write(out));
    return out;
  };
  const quant::Autocast scope(recipe);
  Saved saved;
  const Tensor y = layers.Forward(ctx, x, {}, &saved);
  EXPECT_TRUE(Agrees(check::CompareBitwise("y", y, rounded(x, quant::TensorRole::kInput))));
  const Tensor dx = layers.Backward(ctx, dy, {}, saved);
  EXPECT_TRUE(
      Agrees(check::CompareBitwise("dx", dx, rounded(dy, quant::TensorRole::kOutputGradient))));
  EXPECT_FALSE(check::CompareBitwise("dx", dx, rounded(dy, quant::TensorRole::kInput)));
}

TEST(RmsNorm, IsAnOpOfSequential) {
  const ops::Context ctx;
  LocalParameterStore store(ctx, DType::kF64);
  Sequential layers;
  layers.Append(std::make_unique<RmsNorm>(store, "norm", 24, 1e-5));
  layers.Append(std::make_unique<Linear>(store, "w", 16, 24));
  store.Initialize(1, 0.3);
  const Tensor x = testing::Normal({5, 24}, DType::kF64, "x");
  const Tensor dy = testing::Normal({5, 16}, DType::kF64, "dy");
  const auto value = [&] {
    const Tensor y = layers.Forward(ctx, x, {}, nullptr);
    double sum = 0;
    for (std::int64_t i = 0; i < y.numel(); ++i) sum += y.data<double>()[i] * dy.data<double>()[i];
    return sum;
  };
  Saved saved;
  layers.Forward(ctx, x, {}, &saved);
  const Tensor dx = layers.Backward(ctx, dy, {}, saved);
  const testing::GradientCheckOptions options{.magnitude = 100};
  EXPECT_TRUE(Agrees(testing::CheckGradient("x", value, x, dx, options)));
  for (const auto& p : store.parameters()) {
    EXPECT_TRUE(Agrees(testing::CheckGradient(p.spec.name, value, p.value, p.grad, options)));
  }
}

// Weights are quantised once an update, however many micro-batches use them.
TEST(ParameterStore, QuantisesAWeightOnceForEachChange) {
  Experts e(2);
  const quant::Recipe recipe = quant::MXFP8BlockScaling{};
  const Tensor first = e.store.AcquireQuantized(0, recipe).rowwise.codes;
  EXPECT_EQ(e.store.AcquireQuantized(0, recipe).rowwise.codes.raw(), first.raw());
  const Tensor before = first.Clone();
  testing::FillNormal(e.store.parameters()[0].master, "changed");
  e.store.MarkChanged();
  const Tensor after = e.store.AcquireQuantized(0, recipe).rowwise.codes;
  EXPECT_FALSE(check::CompareBitwise("codes", after, before));
}

// Not from the weights that are rounded to bf16: two roundings are not one.
TEST(ParameterStore, QuantisesTheMaster) {
  const ops::Context ctx;
  Experts e(2, DType::kBF16);
  const auto& p = e.store.parameters()[0];
  for (const quant::Recipe& recipe : kRecipes) {
    if (!quant::Quantizes(recipe)) continue;
    SCOPED_TRACE(quant::Name(recipe));
    const auto codes = [&](const Tensor& w) {
      quant::ScalingStates states;
      const quant::Autocast scope(recipe, {.states = &states});
      return quant::QuantizeOperand(ctx, recipe,
                                    {.role = quant::TensorRole::kWeight,
                                     .name = "w",
                                     .x = w,
                                     .row_parts = p.spec.row_parts})
          .rowwise.codes;
    };
    quant::ScalingStates states;
    const quant::Autocast scope(recipe, {.states = &states});
    const Tensor got = e.store.AcquireQuantized(0, recipe).rowwise.codes;
    EXPECT_TRUE(Agrees(check::CompareBitwise("codes", got, codes(p.master))));
    EXPECT_FALSE(check::CompareBitwise("codes", got, codes(p.value)));
  }
}

// A frozen weight gets the scale that its first amax gave, and its history moves on.
TEST(ParameterStore, QuantisesAWeightAnewWhenItsDelayedScaleMoved) {
  Experts e(2);
  const quant::Recipe recipe = quant::DelayedScaling{};
  std::unique_ptr<quant::ScalingStates> states = std::make_unique<quant::ScalingStates>();
  const auto scale = [&] {
    const quant::Autocast scope(recipe, {.states = states.get()});
    const float first = e.store.AcquireQuantized(0, recipe).rowwise.scales.data<float>()[0];
    EXPECT_EQ(e.store.AcquireQuantized(0, recipe).rowwise.scales.data<float>()[0], first);
    return 1 / first;
  };
  EXPECT_EQ(scale(), 1.0f);
  states->EndStep(ops::Context());
  const float moved = scale();
  EXPECT_GT(moved, 1.0f);  // the weights are smaller than 448
  // Other states, be they at the same address, have their own scales.
  *states = quant::ScalingStates();
  EXPECT_EQ(scale(), 1.0f);
  states->EndStep(ops::Context());
  EXPECT_EQ(scale(), moved);
  states.reset();
  states = std::make_unique<quant::ScalingStates>();
  EXPECT_EQ(scale(), 1.0f);
}

// Trap masters-from-quantised: quantising loses nothing of the masters.
TEST(ParameterStore, MastersFromQuantised) {
  Experts e(2);
  const Tensor before = e.store.parameters()[0].master.Clone();
  e.store.AcquireQuantized(0, quant::MXFP8BlockScaling{});
  EXPECT_TRUE(Agrees(check::CompareBitwise("master", e.store.parameters()[0].master, before)));
}

}  // namespace
}  // namespace cistron::nn
