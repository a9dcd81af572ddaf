// Sequential, its ops and the fuser: fused against unfused bit for bit, gradients against central
// differences, plans, refusals, and what Saved refuses.
#include "cistron/nn/sequential.h"

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
#include "cistron/ops/split_sizes.h"
#include "cistron/quant/autocast.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::nn {
namespace {

using testing::Agrees;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Pass {
  Tensor y, dx, dscale;
  std::vector<Tensor> gradients;
  std::int64_t saved_bytes = 0;
};

// `accumulate`: two passes one after another, gradients added.
Pass TrainPass(Experts& e, const Tensor& x, const Tensor& counts, const Tensor& scale,
               const Tensor& dy, bool accumulate = false,
               const ops::Context& ctx = ops::Context()) {
  Pass p;
  e.store.ZeroGradients();
  for (auto& parameter : e.store.parameters()) {
    if (parameter.grad) FillPoison(parameter.grad);
  }
  for (int i = 0; i < (accumulate ? 2 : 1); ++i) {
    Saved saved;
    p.y = e.layers.Forward(ctx, x, {.split_sizes = counts, .scale = scale}, &saved);
    p.saved_bytes = saved.bytes();
    p.dscale = ctx.Empty({x.dim(0)}, ComputeType(x.dtype()));
    p.dx = e.layers.Backward(ctx, dy, {.scale = ops::Write(p.dscale)}, saved);
    EXPECT_TRUE(saved.empty());
  }
  for (const auto& parameter : e.store.parameters()) p.gradients.push_back(parameter.grad.Clone());
  return p;
}

std::vector<std::vector<std::int64_t>> Counts() {
  // The last one fills two waves of the fused ops.
  return {{0, 1, 7, 33},    {0, 0, 129, 0},
          {32, 32, 32, 32}, {0, 0, 0, 0},
          {17, 60, 5, 44},  {99, 0, 101, 100, 97, 1, 120, 111, 103, 90, 93, 96, 127, 85, 0}};
}

double Norm(const Tensor& t) {
  double sum = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) sum += ElementAsDouble(t, i) * ElementAsDouble(t, i);
  return std::sqrt(sum);
}
double Distance(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double d = ElementAsDouble(a, i) - ElementAsDouble(b, i);
    sum += d * d;
  }
  return std::sqrt(sum);
}

// Trap format-mixup: against fp64, nothing is further off than twice the scalar reference at the
// same precision; codes of one format read as another would be off by the value itself.
TEST(GroupedMlp, FormatMixup) {
  const std::vector<std::int64_t> counts = {17, 0, 60, 33};
  const Tensor splits = Tensor::FromSpan<std::int64_t>({4}, counts);
  const Tensor x = testing::Normal({110, kHidden}, DType::kF32, "x");
  const Tensor scale = testing::Uniform({110}, DType::kF32, "scale", 0.2, 1.0);
  // Small, as gradients are: e5m2 and e4m3 read for each other differ by orders of magnitude.
  const Tensor dy = testing::Normal({110, kHidden}, DType::kF32, "dy", 1e-3);
  const auto wide = [](const Tensor& t) {
    Tensor w = Tensor::Empty(t.shape(), DType::kF64);
    Convert(t, w);
    return w;
  };
  Experts exact_experts(4, DType::kF64);
  Experts seed(4, DType::kF32);  // the same weights in every precision
  for (const auto& p : seed.store.parameters()) exact_experts.store.Assign(p.spec.name, p.master);
  const Pass exact = TrainPass(exact_experts, wide(x), splits, wide(scale), wide(dy));
  for (const quant::Recipe& recipe : kRecipes) {
    if (!quant::Quantizes(recipe)) continue;
    SCOPED_TRACE(quant::Name(recipe));
    const auto run = [&](const ops::Context& ctx, bool fuse) {
      Experts e(4, DType::kF32);
      e.layers.EnableFusion(fuse);
      quant::ScalingStates states;
      const quant::Autocast scope(recipe, {.states = &states});
      // Delayed scaling has its scales after a step.
      TrainPass(e, x, splits, scale, dy, false, ctx);
      states.EndStep(ctx);
      return TrainPass(e, x, splits, scale, dy, false, ctx);
    };
    const Pass ref = run(ops::Context().WithImpl("ref"), false);
    for (const bool fuse : {false, true}) {
      const Pass got = run(ops::Context(), fuse);
      const auto check = [&](const char* name, const Tensor& g, const Tensor& r, const Tensor& e) {
        EXPECT_LE(Distance(g, e), 2 * Distance(r, e)) << name;
        // Four bits or three a factor, a few factors: a tenth of the value, not the value.
        EXPECT_LT(Distance(r, e), 0.2 * Norm(e)) << name;
      };
      check("y", got.y, ref.y, exact.y);
      check("dx", got.dx, ref.dx, exact.dx);
      check("dscale", got.dscale, ref.dscale, exact.dscale);
      for (std::size_t i = 0; i < got.gradients.size(); ++i) {
        check("dw", got.gradients[i], ref.gradients[i], exact.gradients[i]);
      }
    }
  }
}

TEST(GroupedMlp, EqualsItsOpsBitForBitInEveryRecipe) {
  const ops::internal::ScopedWaveBytes two_waves(1 << 20);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const quant::Recipe& recipe : kRecipes) {
      for (const auto& counts : Counts()) {
        for (const bool accumulate : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {} counts {} accumulate {}", Name(dtype),
                                   quant::Name(recipe), ::testing::PrintToString(counts),
                                   accumulate));
          std::int64_t used = 0;
          for (const std::int64_t n : counts) used += n;
          const auto groups = static_cast<std::int64_t>(counts.size());
          const Tensor splits = Tensor::FromSpan<std::int64_t>({groups}, counts);
          const auto input = [&](const Shape& shape, DType type, const char* name) {
            return testing::Pad(testing::Normal(shape, type, name), 3).whole;
          };
          const Tensor x = input({used, kHidden}, dtype, "x");
          const Tensor scale = input({used}, DType::kF32, "scale");
          const Tensor dy = input({used, kHidden}, dtype, "dy");
          Experts fused(groups, dtype), unfused(groups, dtype);
          unfused.layers.EnableFusion(false);
          quant::ScalingStates states, other_states;
          Pass a, b;
          {
            const quant::Autocast scope(recipe, {.states = &states});
            ASSERT_EQ(fused.layers.MakePlan(ops::Context(), dtype, true).forward.size(), 1u);
            a = TrainPass(fused, x, splits, scale, dy, accumulate);
          }
          {
            const quant::Autocast scope(recipe, {.states = &other_states});
            ASSERT_EQ(unfused.layers.MakePlan(ops::Context(), dtype, true).forward.size(), 3u);
            b = TrainPass(unfused, x, splits, scale, dy, accumulate);
          }
          const auto rows = [&](const Tensor& t) { return t.Slice(0, 0, used); };
          EXPECT_TRUE(Agrees(check::CompareBitwise("y", rows(a.y), rows(b.y))));
          EXPECT_TRUE(Agrees(check::CompareBitwise("dx", rows(a.dx), rows(b.dx))));
          EXPECT_TRUE(Agrees(check::CompareBitwise("dscale", rows(a.dscale), rows(b.dscale))));
          for (std::size_t i = 0; i < a.gradients.size(); ++i) {
            EXPECT_TRUE(testing::IsFinite(a.gradients[i]));
            EXPECT_TRUE(Agrees(check::CompareBitwise(fused.store.parameters()[i].spec.name,
                                                     a.gradients[i], b.gradients[i])));
          }
          if (used > 0) {
            EXPECT_LT(a.saved_bytes, b.saved_bytes);
          }
        }
      }
    }
  }
}

// Where the first layer has a bias GroupedMLP refuses and the last two ops fuse in each direction;
// both layers may have one.
TEST(SwiGluLinear, EqualsItsOpsBitForBit) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const bool second_bias : {false, true}) {
      for (const auto& counts : Counts()) {
        SCOPED_TRACE(fmt::format("{} bias {} counts {}", Name(dtype), second_bias,
                                 ::testing::PrintToString(counts)));
        std::int64_t used = 0;
        for (const std::int64_t n : counts) used += n;
        const auto groups = static_cast<std::int64_t>(counts.size());
        const Tensor splits = Tensor::FromSpan<std::int64_t>({groups}, counts);
        const auto input = [&](const Shape& shape, DType type, const char* name) {
          return testing::Pad(testing::Normal(shape, type, name), 3).whole;
        };
        const Tensor x = input({used, kHidden}, dtype, "x");
        const Tensor dy = input({used, kHidden}, dtype, "dy");
        const Tensor scale = input({used}, ComputeType(dtype), "scale");
        Experts fused(groups, dtype, {.bias = true}, {.bias = second_bias});
        Experts unfused(groups, dtype, {.bias = true}, {.bias = second_bias});
        unfused.layers.EnableFusion(false);
        const fuse::Plan plan = fused.layers.MakePlan(ops::Context(), dtype, true);
        ASSERT_EQ(plan.forward.size(), 2u);
        ASSERT_EQ(plan.backward.size(), 2u);
        const Pass a = TrainPass(fused, x, splits, scale, dy);
        const Pass b = TrainPass(unfused, x, splits, scale, dy);
        const auto rows = [&](const Tensor& t) { return t.Slice(0, 0, used); };
        EXPECT_TRUE(Agrees(check::CompareBitwise("y", rows(a.y), rows(b.y))));
        EXPECT_TRUE(Agrees(check::CompareBitwise("dx", rows(a.dx), rows(b.dx))));
        EXPECT_TRUE(Agrees(check::CompareBitwise("dscale", rows(a.dscale), rows(b.dscale))));
        for (std::size_t i = 0; i < a.gradients.size(); ++i) {
          EXPECT_TRUE(Agrees(check::CompareBitwise(fused.store.parameters()[i].spec.name,
                                                   a.gradients[i], b.gradients[i])));
        }
        // Without a backward nothing is kept, and the result is the same.
        const Tensor y = fused.layers.Forward(ops::Context(), x,
                                              {.split_sizes = splits, .scale = scale}, nullptr);
        EXPECT_TRUE(Agrees(check::CompareBitwise("y", rows(y), rows(b.y))));
      }
    }
  }
}

TEST(SwiGluLinear, RefusesQuantisedLayersWithAReason) {
  Experts e(2, DType::kF32, {.bias = true});
  const quant::Autocast scope(quant::MXFP8BlockScaling{});
  EXPECT_EQ(e.layers.MakePlan(ops::Context(), DType::kF32, true).backward.size(), 3u);
  const std::string text = e.layers.Explain(ops::Context(), DType::kF32);
  for (const char* direction : {"forward", "backward"}) {
    EXPECT_THAT(text, HasSubstr(fmt::format(
                          "SwiGLULinear ({}): down: its recipe is MXFP8BlockScaling, whose "
                          "products take whole tensors; remedy: let GroupedMLP fire",
                          direction)));
  }
}

// Whatever gradients are wanted: what nobody needs is not quantised, and leaves no amax.
TEST(GroupedMlp, LeavesTheScalingStatesThatItsOpsLeave) {
  const ops::Context ctx;
  const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, std::array<std::int64_t, 3>{2, 0, 3});
  const Tensor x = testing::Normal({5, kHidden}, DType::kF32, "x");
  const Tensor scale = testing::Uniform({5}, DType::kF32, "scale", 0.2, 1.0);
  for (const bool input : {true, false}) {
    for (const bool weights : {true, false}) {
      SCOPED_TRACE(fmt::format("input {} weights {}", input, weights));
      const auto states_of = [&](bool fuse) {
        Experts e(3);
        e.layers.EnableFusion(fuse);
        quant::ScalingStates states;
        const quant::Autocast scope(quant::DelayedScaling{.amax_history_len = 3},
                                    {.states = &states});
        for (int step = 0; step < 2; ++step) {
          Saved saved;
          e.layers.Forward(ctx, x, {.split_sizes = splits, .scale = scale}, &saved);
          const Tensor dscale = ctx.Empty({5}, DType::kF32);
          e.layers.Backward(
              ctx, x, {.input = input, .weights = weights, .scale = ops::Write(dscale)}, saved);
          states.EndStep(ctx);
        }
        return states.Tensors();
      };
      const auto fused = states_of(true), unfused = states_of(false);
      ASSERT_EQ(fused.size(), unfused.size());
      for (std::size_t i = 0; i < fused.size(); ++i) {
        EXPECT_EQ(fused[i].name, unfused[i].name);
        EXPECT_TRUE(
            Agrees(check::CompareBitwise(fused[i].name, fused[i].tensor, unfused[i].tensor)));
      }
    }
  }
}

// Before anything is computed: a slice of a wave is no place to find out.
TEST(GroupedMlp, SizesOfExtraInputsAndGradientsAreChecked) {
  const ops::Context ctx;
  const Tensor splits = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{2, 3});
  const Tensor x = testing::Normal({5, kHidden}, DType::kF32, "x");
  const auto row = [](std::int64_t n, DType dtype = DType::kF32) {
    return Tensor::Zeros({n}, dtype);
  };
  const auto message = [&](const Tensor& scale, const Tensor& dy, const Tensor& dscale) {
    Experts e(2);
    Saved saved;
    try {
      e.layers.Forward(ctx, x, {.split_sizes = splits, .scale = scale}, &saved);
      e.layers.Backward(ctx, dy, {.scale = ops::Write(dscale)}, saved);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.message(), HasSubstr("GroupedMLP (gate_up"));
      for (const auto& p : e.store.parameters()) EXPECT_FALSE(p.has_grad);
      return error.message();
    }
    return std::string("no error");
  };
  for (const quant::Recipe& recipe : kRecipes) {
    if (!quant::Quantizes(recipe)) continue;
    SCOPED_TRACE(quant::Name(recipe));
    quant::ScalingStates states;
    const quant::Autocast scope(recipe, {.states = &states});
    EXPECT_EQ(message(row(5), x, row(5)), "no error");
    EXPECT_THAT(message(row(4), x, row(5)), HasSubstr("scale is f32 [4], expected f32 [5]"));
    EXPECT_THAT(message(row(6), x, row(5)), HasSubstr("scale is f32 [6], expected f32 [5]"));
    EXPECT_THAT(message(row(5, DType::kF64), x, row(5)), HasSubstr("scale is f64"));
    EXPECT_THAT(message(row(5), x, row(6)), HasSubstr("dscale is f32 [6], expected f32 [5]"));
    EXPECT_THAT(message(row(5), x.Slice(0, 0, 4), row(5)), HasSubstr("dy is f32 [4, 40]"));
    const Tensor wide = Tensor::Zeros({5, kHidden + 1}, DType::kF32);
    EXPECT_THAT(message(row(5), wide, row(5)), HasSubstr("dy is f32 [5, 41]"));
  }
}

// ⟨dy, y⟩ as a function of every input and parameter, in fp64.
TEST(GroupedMlp, GradientsAgreeWithCentralDifferences) {
  for (const bool fuse : {true, false}) {
    for (const bool bias : {false, true}) {
      SCOPED_TRACE(fmt::format("fuse {} bias {}", fuse, bias));
      Experts e(3, DType::kF64, {.bias = bias}, {.bias = bias, .scaled_bias = bias});
      e.layers.EnableFusion(fuse);
      const ops::Context ctx;
      const Tensor counts =
          Tensor::FromSpan<std::int64_t>({3}, std::array<std::int64_t, 3>{2, 0, 3});
      const Tensor x = testing::Normal({5, kHidden}, DType::kF64, "x");
      const Tensor scale = testing::Uniform({5}, DType::kF64, "scale", 0.2, 1.0);
      const Tensor dy = testing::Normal({5, kHidden}, DType::kF64, "dy");
      const ExtraInputs extra{
          .split_sizes = counts, .scale = scale, .bias_scale = bias ? scale : Tensor()};
      const auto value = [&] {
        const Tensor y = e.layers.Forward(ctx, x, extra, nullptr);
        double sum = 0;
        for (std::int64_t i = 0; i < y.numel(); ++i) {
          sum += y.data<double>()[i] * dy.data<double>()[i];
        }
        return sum;
      };
      Saved saved;
      e.layers.Forward(ctx, x, extra, &saved);
      const Tensor dscale = ctx.Empty({5}, DType::kF64), dbias_scale = ctx.Empty({5}, DType::kF64);
      BackwardOutputs out{.scale = ops::Write(dscale)};
      if (bias) out.bias_scale = ops::Write(dbias_scale);
      const Tensor dx = e.layers.Backward(ctx, dy, out, saved);
      // |dy·y| summed: what the roundings of f are relative to.
      double magnitude = 0;
      const Tensor y = e.layers.Forward(ctx, x, extra, nullptr);
      for (std::int64_t i = 0; i < y.numel(); ++i) {
        magnitude += std::abs(y.data<double>()[i] * dy.data<double>()[i]);
      }
      if (bias) {  // one tensor is both
        for (std::int64_t i = 0; i < 5; ++i)
          dscale.data<double>()[i] += dbias_scale.data<double>()[i];
      }
      const auto check = [&](const std::string& name, const Tensor& t, const Tensor& gradient) {
        EXPECT_TRUE(
            Agrees(testing::CheckGradient(name, value, t, gradient, {.magnitude = magnitude})));
      };
      check("x", x, dx);
      check("scale", scale, dscale);
      for (const auto& p : e.store.parameters()) check(p.spec.name, p.value, p.grad);
    }
  }
}

TEST(Fuser, RefusalsNameOpReasonAndRemedy) {
  const auto explain = [](const GroupedLinearOptions& first, const GroupedLinearOptions& second,
                          const quant::AutocastOptions& options = {}) {
    Experts e(2, DType::kF32, first, second);
    const quant::Autocast scope(quant::MXFP8BlockScaling{}, options);
    const fuse::Plan plan = e.layers.MakePlan(ops::Context(), DType::kF32, true);
    EXPECT_TRUE(std::none_of(plan.forward.begin(), plan.forward.end(),
                             [](const fuse::PlanStep& s) { return s.joint; }));
    return e.layers.Explain(ops::Context(), DType::kF32);
  };
  EXPECT_THAT(explain({.bias = true}, {}),
              HasSubstr("gate_up: it has a bias; remedy: build it with bias = false"));
  EXPECT_THAT(explain({}, {.per_expert_weights = true}),
              HasSubstr("down: its experts' weights are tensors of their own"));
  EXPECT_THAT(explain({}, {.delay_weight_gradients = true}),
              HasSubstr("down: its weight gradients are delayed"));
  EXPECT_THAT(explain({}, {.in_features = 32}),
              HasSubstr("down: 2 groups of 32 → 40 do not follow"));
  EXPECT_THAT(explain({}, {}, {.high_precision = {.patterns = {"down"}}}),
              HasSubstr("its recipe is BF16, that of gate_up is MXFP8BlockScaling"));
}

// Both directions in the order in which they run; strict names all that does not fire.
TEST(Fuser, ExplainsBackwardAsItRunsAndStrictNamesEveryRefusal) {
  Experts e(2, DType::kF32, {.bias = true}, {.per_expert_weights = true});
  EXPECT_THAT(e.layers.Explain(ops::Context(), DType::kF32),
              HasSubstr("forward:\n  GroupedLinear gate_up\n  ScaledSwiGLU scaled_swiglu\n"
                        "  GroupedLinear down\nbackward, as it runs:\n  GroupedLinear down\n"
                        "  ScaledSwiGLU scaled_swiglu\n  GroupedLinear gate_up\n"));
  EXPECT_THAT([&] { e.layers.Explain(ops::Context().WithStrict(), DType::kF32); },
              ::testing::ThrowsMessage<Error>(::testing::AllOf(
                  HasSubstr("strict: GroupedMLP (joint) does not fire: gate_up: it has a bias; "
                            "remedy: build it"),
                  HasSubstr("\nstrict: SwiGLULinear (forward) does not fire: down: "),
                  HasSubstr("\nstrict: SwiGLULinear (backward) does not fire: down: "))));
}

TEST(Fuser, PatternThatIsNotThereSaysWhichOpEndsIt) {
  LocalParameterStore store(ops::Context(), DType::kF32);
  Sequential layers;
  EXPECT_THAT(layers.Explain(ops::Context(), DType::kF32), HasSubstr("no op begins"));
  layers.Append(std::make_unique<GroupedLinear>(GroupedLinearOptions{
      .num_groups = 2, .in_features = 8, .out_features = 16, .name = "first", .store = &store}));
  EXPECT_THAT(layers.Explain(ops::Context(), DType::kF32),
              HasSubstr("first: the ops end here, GroupedLinear → ScaledSwiGLU → GroupedLinear "
                        "wants ScaledSwiGLU next"));
  layers.Append(std::make_unique<Linear>(store, "other", 8, 16));
  EXPECT_THAT(layers.Explain(ops::Context(), DType::kF32), HasSubstr("other: it is a Linear"));
}

TEST(Fuser, PlanChangesWithRecipeAndExpandsToTheOps) {
  Experts e(2);
  const ops::Context ctx;
  EXPECT_THAT(e.layers.Explain(ctx, DType::kF32),
              AllOf(HasSubstr("GroupedMLP = GroupedLinear gate_up → ScaledSwiGLU scaled_swiglu → "
                              "GroupedLinear down"),
                    HasSubstr("SwiGLULinear (forward): not needed: GroupedMLP has these ops\n"),
                    HasSubstr("SwiGLULinear (backward): not needed: GroupedMLP has these ops\n")));
  const quant::Autocast scope(quant::MXFP8BlockScaling{},
                              {.high_precision = {.patterns = {"down"}}});
  fuse::Plan plan = e.layers.MakePlan(ctx, DType::kF32, true);
  // The recipe of the last layer is now another than the first's: the last two ops still fuse.
  EXPECT_EQ(plan.forward.size(), 2u);
  EXPECT_EQ(plan.backward.size(), 2u);
  EXPECT_NO_THROW(fuse::CheckExpands(plan, 3));
  plan.backward.pop_back();
  EXPECT_THROW(fuse::CheckExpands(plan, 3), Error);
}

// Another window being fused is no reason: none of the kinds that the pattern wants is there.
TEST(Fuser, OpsTakenElsewhereDoNotHideThatAWindowIsMissing) {
  const Sequential layers{GroupedLinear(OneGroup(8, 8)), ScaledSwiGLU(),
                          GroupedLinear(OneGroup(4, 8))};
  EXPECT_THAT(layers.Explain(ops::Context(), DType::kF32), HasSubstr("not needed: GroupedMLP"));
  const Sequential pair{ScaledSwiGLU(), GroupedLinear(OneGroup(4, 8))};
  const std::string text = pair.Explain(ops::Context(), DType::kF32);
  EXPECT_THAT(text, HasSubstr("SwiGLULinear = "));
  EXPECT_THAT(text, HasSubstr("GroupedMLP (joint): 1.weight: the ops end here"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("not needed")));
}

TEST(Fuser, PlanChangesWithTheGradientMask) {
  const ops::Context ctx;
  const Tensor x = testing::Normal({5, 8}, DType::kF32, "x");
  const Tensor dy = testing::Normal({5, 8}, DType::kF32, "dy");
  const ExtraInputs extra{
      .split_sizes = Tensor::FromSpan<std::int64_t>({1}, std::array<std::int64_t, 1>{5}),
      .scale = testing::Uniform({5}, DType::kF32, "scale", 0.2, 1.0)};
  GroupedLinearOptions with_bias = OneGroup(4, 8);  // keeps GroupedMLP away
  with_bias.bias = true;
  const auto make = [&] {
    return Sequential{ScaledSwiGLU(), GroupedLinear(with_bias), ScaledSwiGLU(),
                      GroupedLinear(OneGroup(4, 8))};
  };
  const Sequential layers = make();
  // The first window need not make its input's gradient; the second is in front of the first.
  EXPECT_EQ(layers.MakePlan(ctx, DType::kF32, true).backward.size(), 2u);
  const fuse::Plan masked = layers.MakePlan(ctx, DType::kF32, true, /*input_gradient=*/false);
  EXPECT_EQ(masked.forward.size(), 2u);
  ASSERT_EQ(masked.backward.size(), 3u);
  EXPECT_EQ(masked.backward[0].fused, nullptr);
  EXPECT_NE(masked.backward[2].fused, nullptr);
  EXPECT_THAT(layers.Explain(ctx, DType::kF32, true, false),
              HasSubstr("SwiGLULinear (backward): scaled_swiglu: the gradient of its input is not "
                        "wanted"));
  Sequential unfused = make();
  unfused.EnableFusion(false);
  const auto run = [&](const Sequential& s, bool input) {
    Saved saved;
    s.Forward(ctx, x, extra, &saved);
    const Tensor dscale = ctx.Empty({5}, DType::kF32);
    const Tensor dx = s.Backward(ctx, dy, {.input = input, .scale = ops::Write(dscale)}, saved);
    EXPECT_EQ(static_cast<bool>(dx), input);
    return dscale;
  };
  const Tensor expected = run(unfused, true);
  for (const bool input : {true, false, true}) {
    EXPECT_TRUE(Agrees(check::CompareBitwise("dscale", run(layers, input), expected)));
  }
  // Joint steps stand: they take the records of the forward pass that left them.
  Experts e(2);
  const fuse::Plan joint = e.layers.MakePlan(ctx, DType::kF32, true);
  const fuse::Plan joint_masked = fuse::WithInputGradient(
      joint, std::vector<const BasicOp*>{&e.layers.op(0), &e.layers.op(1), &e.layers.op(2)}, false);
  EXPECT_EQ(joint_masked.backward.front().fused, joint.forward.front().fused);
}

TEST(Sequential, GateAndUpAreQuantisedApartWithoutBeingAsked) {
  Experts e(2), one_part(2, DType::kF32, {.out_parts = 1});
  EXPECT_EQ(e.store.parameters()[0].spec.row_parts, 2);
  EXPECT_EQ(e.store.parameters()[1].spec.row_parts, 1);
  EXPECT_EQ(one_part.store.parameters()[0].spec.row_parts, 1);
  const quant::Autocast scope(quant::MXFP8BlockScaling{});
  EXPECT_THAT(one_part.layers.Explain(ops::Context(), DType::kF32),
              HasSubstr("gate_up: its gate and up rows are quantised as one part"));
  // A width that two parts do not divide is refused where the ops meet.
  Sequential odd{GroupedLinear({.num_groups = 1, .in_features = 4, .out_features = 7})};
  EXPECT_THAT([&] { odd.Append(std::make_unique<ScaledSwiGLU>()); },
              ThrowsMessage<Error>(HasSubstr("out_parts = 2 does not divide out_features = 7")));
}

TEST(Sequential, LayersOfOneNameDoNotShareDelayedScales) {
  quant::ScalingStates states;
  const quant::Autocast scope(quant::DelayedScaling{}, {.states = &states});
  const Sequential one{GroupedLinear(OneGroup(8, 8, "fc")), GroupedLinear(OneGroup(8, 8, "fc"))};
  EXPECT_THAT([&] { one.Explain(ops::Context(), DType::kF32); },
              ThrowsMessage<Error>(HasSubstr("two ops are named fc")));
  // Unnamed layers of two sequences have the names of their positions in both.
  const Sequential first{GroupedLinear(OneGroup(8, 8))}, second{GroupedLinear(OneGroup(8, 8))};
  const Tensor x = testing::Normal({3, 8}, DType::kF32, "x");
  const ExtraInputs extra{.split_sizes =
                              Tensor::FromSpan<std::int64_t>({1}, std::array<std::int64_t, 1>{3})};
  EXPECT_NO_THROW(first.Forward(ops::Context(), x, extra, nullptr));
  EXPECT_NO_THROW(first.Forward(ops::Context(), x, extra, nullptr));
  EXPECT_THAT([&] { second.Forward(ops::Context(), x, extra, nullptr); },
              ThrowsMessage<Error>(HasSubstr("two layers have tensors named 0.weight")));
  // By itself a layer has no position.
  const GroupedLinear bare(OneGroup(8, 8));
  EXPECT_THAT([&] { bare.Forward(ops::Context(), x, extra, nullptr); },
              ThrowsMessage<Error>(HasSubstr("set options.name")));
}

TEST(Sequential, UnnamedLayersTakeTheirPositionAndDrawWeightsOfTheirOwn) {
  GroupedLinearOptions with_bias = OneGroup(8, 8);
  with_bias.bias = true;
  const Sequential layers{GroupedLinear(OneGroup(8, 16)),
                          ScaledSwiGLU(),
                          GroupedLinear(OneGroup(8, 16)),
                          Quantize(),
                          Quantize(),
                          GroupedLinear(OneGroup(16, 8, "named")),
                          GroupedLinear(with_bias)};
  const auto store = [&](std::size_t i) -> const LocalParameterStore& {
    return *dynamic_cast<const GroupedLinear&>(layers.op(i)).own_store();
  };
  EXPECT_EQ(layers.op(0).name(), "0.weight");
  EXPECT_EQ(layers.op(2).name(), "2.weight");
  EXPECT_EQ(layers.op(3).name(), "3.quantize");
  EXPECT_EQ(layers.op(4).name(), "4.quantize");
  EXPECT_EQ(layers.op(5).name(), "named");
  EXPECT_NE(store(6).Find("6.bias"), nullptr);
  const Tensor a = store(0).Find("0.weight")->master, b = store(2).Find("2.weight")->master;
  EXPECT_FALSE(check::CompareBitwise("w", a, b).ok);
  // The draw is that of the name, in every run.
  const Tensor drawn = Tensor::Empty(b.shape(), DType::kF32);
  DrawNormal(0, "2.weight", 0.02, 0, drawn);
  EXPECT_TRUE(Agrees(check::CompareBitwise("w", b, drawn)));
}

TEST(Sequential, NamingALayerKeepsWeightsThatWereAssigned) {
  auto layer = std::make_unique<GroupedLinear>(OneGroup(4, 4));
  const Tensor w = testing::Normal({1, 4, 4}, DType::kF32, "w");
  layer->own_store()->Assign(layer->name(), w);
  Sequential layers;
  layers.Append(std::move(layer));
  const auto& store = *dynamic_cast<const GroupedLinear&>(layers.op(0)).own_store();
  EXPECT_TRUE(Agrees(check::CompareBitwise("w", store.Find("0.weight")->master, w)));
}

// Trap silent-fallback.
TEST(Fuser, SilentFallback) {
  Experts e(2, DType::kF32, {.bias = true});
  const Tensor x = testing::Normal({4, kHidden}, DType::kF32, "x");
  const ExtraInputs extra{
      .split_sizes = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{1, 3})};
  EXPECT_NO_THROW(e.layers.Forward(ops::Context(), x, extra, nullptr));
  EXPECT_THAT(
      [&] { e.layers.Forward(ops::Context().WithStrict(), x, extra, nullptr); },
      ThrowsMessage<Error>(HasSubstr("GroupedMLP (joint) does not fire: gate_up: it has a bias")));
}

class SavedState : public ::testing::Test {
 protected:
  Saved Forward(Experts& e) {
    Saved saved;
    e.layers.Forward(ctx_, x_, {.split_sizes = counts_}, &saved);
    return saved;
  }
  ops::Context ctx_;
  Tensor x_ = testing::Normal({4, kHidden}, DType::kF32, "x");
  Tensor counts_ = Tensor::FromSpan<std::int64_t>({2}, std::array<std::int64_t, 2>{1, 3});
};

TEST_F(SavedState, IsConsumedOnceByItsOwner) {
  Experts e(2), other(2);
  Saved saved = Forward(e);
  EXPECT_THAT([&] { other.layers.Backward(ctx_, x_, {}, saved); },
              ThrowsMessage<Error>(HasSubstr("belongs to")));
  e.layers.Backward(ctx_, x_, {}, saved);
  EXPECT_THAT([&] { e.layers.Backward(ctx_, x_, {}, saved); },
              ThrowsMessage<Error>(HasSubstr("twice")));
}

TEST_F(SavedState, IsOfTheParametersOfItsForward) {
  for (const bool fuse : {true, false}) {
    Experts e(2);
    e.layers.EnableFusion(fuse);
    Saved saved = Forward(e);
    e.store.Initialize(3, 0.1);
    EXPECT_THAT([&] { e.layers.Backward(ctx_, x_, {}, saved); },
                ThrowsMessage<Error>(HasSubstr("parameters changed")));
  }
}

TEST_F(SavedState, OfANormAndOfALinearIsOfTheParametersOfItsForward) {
  LocalParameterStore store(ctx_, DType::kF32);
  const RmsNorm norm(store, "norm", kHidden, 1e-5);
  const Linear linear(store, "w", 8, kHidden);
  store.Initialize(1, 0.3);
  const Tensor dy = testing::Normal({4, 8}, DType::kF32, "dy");
  Saved saved;
  norm.Forward(ctx_, x_, Tensor(), &saved);
  norm.Forward(ctx_, x_, ExtraInputs{}, &saved);
  Operand input = linear.Input(x_);
  SavedOperand kept;
  linear.Forward(ctx_, input, &kept, ops::Write(ctx_.Empty({4, 8}, DType::kF32)));
  store.MarkChanged();
  const auto changed = ThrowsMessage<Error>(HasSubstr("parameters changed"));
  EXPECT_THAT([&] { norm.Backward(ctx_, x_, BackwardOutputs{}, saved); }, changed);
  EXPECT_THAT([&] { norm.Backward(ctx_, x_, Tensor(), saved); }, changed);
  EXPECT_THAT(
      [&] {
        linear.Backward(ctx_, dy, kept, ops::Write(ctx_.Empty({4, kHidden}, DType::kF32)));
      },
      changed);
}

TEST_F(SavedState, SeveralForwardsMayBeInFlight) {
  Experts e(2);
  Saved first = Forward(e), second = Forward(e);
  const Tensor a = e.layers.Backward(ctx_, x_, {}, first);
  const Tensor b = e.layers.Backward(ctx_, x_, {}, second);
  EXPECT_TRUE(Agrees(check::CompareBitwise("dx", a, b)));
}

TEST(Sequential, ExtraInputsThatNoOpTakesAreRefused) {
  Experts e(2);
  const Tensor x = testing::Normal({4, kHidden}, DType::kF32, "x");
  EXPECT_THAT([&] { e.layers.Forward(ops::Context(), x, {.bias_scale = x}, nullptr); },
              ThrowsMessage<Error>(HasSubstr("bias_scale was given, but no op takes it")));
}

}  // namespace
}  // namespace cistron::nn
