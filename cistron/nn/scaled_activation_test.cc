// GroupedLinear → ScaledActivation → GroupedLinear of every kind.
#include "cistron/nn/scaled_activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/nn/sequential.h"
#include "cistron/quant/autocast.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::nn {
namespace {

using testing::Agrees;

constexpr std::int64_t kHidden = 7, kFfn = 6, kExperts = 4;

struct Experts {
  Experts(std::unique_ptr<BasicOp> activation, bool gated, DType dtype)
      : store(ops::Context(), dtype) {
    layers.Append(
        std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = kExperts,
                                                             .in_features = kHidden,
                                                             .out_features = (gated ? 2 : 1) * kFfn,
                                                             .out_parts = gated ? 2 : 1,
                                                             .name = "gate_up",
                                                             .store = &store}));
    layers.Append(std::move(activation));
    layers.Append(std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = kExperts,
                                                                       .in_features = kFfn,
                                                                       .out_features = kHidden,
                                                                       .name = "down",
                                                                       .store = &store}));
    store.Initialize(7, 0.5);
  }
  Experts(const ops::ActivationConfig& config, DType dtype)
      : Experts(std::make_unique<ScaledActivation>(config), ops::IsGated(config.kind), dtype) {}

  LocalParameterStore store;
  Sequential layers;
};

const Tensor& Counts() {
  static const std::int64_t counts[] = {0, 1, 7, 3};
  static const Tensor t = Tensor::FromSpan<std::int64_t>({kExperts}, counts);
  return t;
}
constexpr std::int64_t kRows = 11;

TEST(ScaledActivationOp, GradientByCentralDifferences) {
  for (const ops::ActivationKind kind : ops::kActivationKinds) {
    for (const std::int64_t g : {0, 2}) {
      if (g > 0 && !ops::IsGated(kind)) continue;
      SCOPED_TRACE(fmt::format("{} interleave {}", ops::Name(kind), g));
      Experts e({.kind = kind, .glu_interleave_size = g}, DType::kF64);
      const ops::Context ctx;
      const Tensor x = testing::Normal({kRows, kHidden}, DType::kF64, "x");
      const Tensor scale = testing::Uniform({kRows}, DType::kF64, "scale");
      const Tensor dy = testing::Normal({kRows, kHidden}, DType::kF64, "dy");
      const auto loss = [&] {
        e.store.MarkChanged();
        const Tensor y = e.layers.Forward(ctx, x, {.split_sizes = Counts(), .scale = scale}, {});
        double sum = 0;
        for (std::int64_t i = 0; i < y.numel(); ++i) {
          sum += y.span<double>()[static_cast<std::size_t>(i)] * dy.data<double>()[i];
        }
        return sum;
      };
      Saved saved;
      e.layers.Forward(ctx, x, {.split_sizes = Counts(), .scale = scale}, &saved);
      const Tensor dscale = Tensor::Empty({kRows}, DType::kF64);
      const Tensor dx = e.layers.Backward(ctx, dy, {.scale = ops::Write(dscale)}, saved);
      std::vector<Tensor> at = {x, scale}, gradients = {dx, dscale};
      for (const auto& p : e.store.parameters()) {
        at.push_back(p.master);
        gradients.push_back(p.grad.Clone());
      }
      EXPECT_TRUE(Agrees(testing::CheckGradientAlong("experts", loss, at, gradients)));
      // An expert without tokens has a gradient of zeros.
      const Tensor none = gradients[2].Select(0);
      for (const double v : none.span<double>()) EXPECT_EQ(v, 0);
    }
  }
}

// The plain SwiGLU kind does what ScaledSwiGLU does, bit for bit; only ScaledSwiGLU fuses, and
// Explain says so.
TEST(ScaledActivationOp, PlainSwiGluEqualsScaledSwiGlu) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Experts a({.kind = ops::ActivationKind::kSwiGlu}, dtype);
    Experts b(std::make_unique<ScaledSwiGLU>(), true, dtype);
    const ops::Context ctx;
    const Tensor x = testing::Pad(testing::Normal({kRows, kHidden}, dtype, "x"), 2).whole;
    const Tensor scale = testing::Pad(testing::Uniform({kRows}, DType::kF32, "s"), 2).whole;
    const auto run = [&](const Experts& e) {
      return e.layers.Forward(ctx, x, {.split_sizes = Counts(), .scale = scale}, nullptr)
          .Slice(0, 0, kRows);
    };
    EXPECT_TRUE(Agrees(check::CompareBitwise("y", run(a), run(b))));
    EXPECT_EQ(b.layers.MakePlan(ctx, dtype, true).forward.size(), 1u);
    EXPECT_EQ(a.layers.MakePlan(ctx, dtype, true).forward.size(), 3u);
    EXPECT_THAT(a.layers.Explain(ctx, dtype), ::testing::HasSubstr("ScaledActivation"));
  }
}

// In the interleaved layout it is the kind of ScaledActivation; what fuses says why it does not.
TEST(ScaledActivationOp, InterleavedScaledSwiGluDoesNotFuse) {
  constexpr std::int64_t kInterleave = 3;
  Experts a({.kind = ops::ActivationKind::kSwiGlu, .glu_interleave_size = kInterleave},
            DType::kF32);
  Experts b(std::make_unique<ScaledSwiGLU>("act", kInterleave), true, DType::kF32);
  const ops::Context ctx;
  const Tensor x = testing::Normal({kRows, kHidden}, DType::kF32, "x");
  const Tensor scale = testing::Uniform({kRows}, DType::kF32, "s");
  const Tensor dy = testing::Normal({kRows, kHidden}, DType::kF32, "dy");
  const auto run = [&](const Experts& e) {
    Saved saved;
    const Tensor y = e.layers.Forward(ctx, x, {.split_sizes = Counts(), .scale = scale}, &saved);
    const Tensor dscale = Tensor::Empty({kRows}, DType::kF32);
    const Tensor dx = e.layers.Backward(ctx, dy, {.scale = ops::Write(dscale)}, saved);
    return std::array{y, dx, dscale};
  };
  const auto first = run(a), second = run(b);
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(Agrees(check::CompareBitwise("pass", first[i], second[i])));
  }
  EXPECT_THAT(b.layers.Explain(ctx, DType::kF32),
              ::testing::HasSubstr("act: its gate and up columns alternate; remedy: build it with "
                                   "glu_interleave_size = 0"));
}

// Blocks of a recipe are those of gate and of up: where none meets both, the codes, and so the
// results, are those of the plain layout; where one would, the recipe is refused.
TEST(ScaledActivationOp, InterleavedGateAndUpKeepTheirBlocksOrAreRefused) {
  constexpr std::int64_t kIn = 40, kOut = 256;  // of each of gate and up
  const ops::Context ctx;
  const Tensor x = testing::Normal({kRows, kIn}, DType::kF32, "x");
  const Tensor dy = testing::Normal({kRows, kOut}, DType::kF32, "dy");
  const Tensor w = testing::Normal({1, 2 * kOut, kIn}, DType::kF32, "w");
  const std::int64_t rows[] = {kRows};
  const Tensor counts = Tensor::FromSpan<std::int64_t>({1}, rows);
  // Row of the plain weight that is row `i` of one in blocks of g.
  const auto plain_row = [](std::int64_t i, std::int64_t g) {
    return i / (2 * g) * g + i % g + (i / g % 2 == 1 ? kOut : 0);
  };
  struct Result {
    Tensor y, dx, dw;
  };
  const auto run = [&](const quant::Recipe& recipe, std::int64_t g, bool dense) {
    LocalParameterStore store(ctx, DType::kF32);
    Sequential layers;
    if (dense) {
      layers.Append(std::make_unique<Linear>(store, "w", 2 * kOut, kIn));
    } else {
      layers.Append(std::make_unique<GroupedLinear>(GroupedLinearOptions{.num_groups = 1,
                                                                         .in_features = kIn,
                                                                         .out_features = 2 * kOut,
                                                                         .name = "w",
                                                                         .store = &store}));
    }
    layers.Append(
        std::make_unique<ScaledActivation>(ops::ActivationConfig{.glu_interleave_size = g}));
    const Tensor stored = store.parameters()[0].master.Reshape({2 * kOut, kIn});
    for (std::int64_t i = 0; i < 2 * kOut; ++i) {
      CopyTo(w.Select(0).Select(g == 0 ? i : plain_row(i, g)), stored.Select(i));
    }
    store.MarkChanged();
    quant::ScalingStates states;
    const quant::Autocast scope(recipe, {.states = &states});
    Saved saved;
    Result r;
    r.y = layers.Forward(ctx, x, {.split_sizes = counts}, &saved);
    r.dx = layers.Backward(ctx, dy, {}, saved);
    const Tensor dw = store.parameters()[0].grad.Reshape({2 * kOut, kIn});
    r.dw = ctx.Empty(dw.shape(), dw.dtype());
    for (std::int64_t i = 0; i < 2 * kOut; ++i) {
      CopyTo(dw.Select(i), r.dw.Select(g == 0 ? i : plain_row(i, g)));
    }
    return r;
  };
  const std::pair<quant::Recipe, std::int64_t> recipes[] = {
      {quant::DelayedScaling{}, 1},       {quant::Float8CurrentScaling{}, 1},
      {quant::Float8BlockScaling{}, 128}, {quant::Float8BlockScaling{.weights_2d = false}, 128},
      {quant::MXFP8BlockScaling{}, 32},   {quant::MXFP8BlockScaling{.weights_2d = true}, 32}};
  for (const auto& row : recipes) {
    const quant::Recipe& recipe = row.first;  // not a binding: lambdas capture it
    const std::int64_t block = row.second;
    for (const bool dense : {false, true}) {
      const Result plain = run(recipe, 0, dense);
      for (const std::int64_t g : {1, 16, 32, 64, 128}) {
        SCOPED_TRACE(fmt::format("{} interleave {} dense {}", quant::Name(recipe), g, dense));
        if (g % block != 0) {
          EXPECT_THAT(
              [&] { run(recipe, g, dense); },
              ::testing::ThrowsMessage<Error>(::testing::AllOf(
                  ::testing::HasSubstr(fmt::format("w: gate and up alternate in blocks of {}", g)),
                  ::testing::HasSubstr(fmt::format("multiple of {}", block)),
                  ::testing::HasSubstr("BF16, DelayedScaling or Float8CurrentScaling"))));
          continue;
        }
        const Result got = run(recipe, g, dense);
        EXPECT_TRUE(Agrees(check::CompareBitwise("y", got.y, plain.y)));
        EXPECT_TRUE(Agrees(check::CompareBitwise("dw", got.dw, plain.dw)));
        // dx sums over the rows of the weight, here in another order.
        const double bound = check::Gamma(2 * kOut, DType::kF32) * 2 * kOut;
        EXPECT_TRUE(Agrees(check::CompareToMaximum("dx", got.dx, plain.dx, bound)));
      }
    }
  }
}

// Gate and up of a dense layer have blocks of their own too.
TEST(ScaledActivationOp, ADenseLayerBeforeItQuantisesGateAndUpApart) {
  LocalParameterStore store(ops::Context(), DType::kF32);
  Sequential layers;
  layers.Append(std::make_unique<Linear>(store, "w", 2 * kFfn, kHidden));
  layers.Append(std::make_unique<ScaledSwiGLU>());
  EXPECT_EQ(store.parameters()[0].spec.row_parts, 2);
}

TEST(ScaledActivationOp, ErrorsNameTheOp) {
  const ScaledActivation op({.kind = ops::ActivationKind::kGeGlu}, "layer 3");
  EXPECT_THAT(
      [&] {
        op.Forward(ops::Context(), Tensor::Zeros({2, 5}, DType::kF32), {}, nullptr);
      },
      ::testing::ThrowsMessage<Error>(::testing::HasSubstr("layer 3: x is f32 [2, 5]")));
}

}  // namespace
}  // namespace cistron::nn
