// Recipes, autocast scopes, and the state of delayed scaling.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/check/compare.h"
#include "cistron/quant/autocast.h"
#include "cistron/quant/quantizer.h"

namespace cistron::quant {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Recipe, LayoutsFollowTheRole) {
  const auto layout = [](const Recipe& r, TensorRole role) {
    const QuantizedLayout l = LayoutOf(r, role);
    return std::pair{l.scaling, l.format};
  };
  EXPECT_EQ(layout(MXFP8BlockScaling{}, TensorRole::kOutputGradient),
            std::pair(Scaling::kMxfp8, DType::kE4M3));
  EXPECT_EQ(layout(MXFP8BlockScaling{.weights_2d = true}, TensorRole::kWeight),
            std::pair(Scaling::kMxfp8Block32x32, DType::kE4M3));
  EXPECT_EQ(layout(DelayedScaling{}, TensorRole::kOutputGradient),
            std::pair(Scaling::kTensor, DType::kE5M2));
  EXPECT_EQ(layout(Float8CurrentScaling{}, TensorRole::kInput),
            std::pair(Scaling::kTensor, DType::kE4M3));
  EXPECT_EQ(layout(Float8BlockScaling{}, TensorRole::kWeight),
            std::pair(Scaling::kBlock128x128, DType::kE4M3));
  EXPECT_EQ(
      layout(Float8BlockScaling{.fp8_format = Fp8Format::kHybrid}, TensorRole::kOutputGradient),
      std::pair(Scaling::kBlock1x128, DType::kE5M2));
  EXPECT_THROW(LayoutOf(BF16{}, TensorRole::kInput), Error);
}

// Every bf16 value from 2^-115 to 1.75·2^127 as the largest of a block; the others are anything
// below it.
Tensor RowsOfEveryAmax(std::int64_t width) {
  const std::int64_t first = (127 - 115) * 128, last = 254 * 128 + 96;
  const Tensor x = Tensor::Empty({last - first + 1, width}, DType::kBF16);
  const RandomStream stream(1, "quant_test", 0);
  auto* const at = static_cast<std::uint16_t*>(x.raw());
  for (std::int64_t row = 0; row < x.dim(0); ++row) {
    const auto amax = static_cast<std::uint64_t>(first + row);
    for (std::int64_t i = 0; i < width; ++i) {
      const auto n = static_cast<std::uint64_t>(row * width + i);
      // A magnitude up to 16 binades below, and a sign.
      const std::uint64_t less =
          i == 0 ? 0 : stream.Below(2 * n, std::min<std::uint64_t>(amax, 16 * 128));
      at[row * width + i] =
          static_cast<std::uint16_t>((amax - less) | stream.Below(2 * n + 1, 2) << 15);
    }
  }
  return x;
}

Tensor CodedAndDecoded(const Tensor& x, const QuantizedLayout& layout, bool power_of_two) {
  const ops::Context ctx;
  const QuantizedTensor q = ops::EmptyQuantized(ctx, x.shape(), Tensor(), layout, {true, false});
  ops::Quantize(ctx, x, power_of_two, {}, q);
  const Tensor y = ctx.Empty(x.shape(), x.dtype());
  ops::Dequantize(ctx, q, Direction::kRowwise, ops::Write(y));
  return y;
}

TEST(Recipe, RowCodesAreThoseOfTheDecodedRows) {
  for (const Recipe& recipe : {Recipe(MXFP8BlockScaling{}), Recipe(Float8BlockScaling{}),
                               Recipe(Float8BlockScaling{.fp8_format = Fp8Format::kHybrid})}) {
    const QuantizedLayout layout = RowCodesOf(recipe).value();
    const Tensor bf16 = RowsOfEveryAmax(BlockSize(layout.scaling) + 3);  // and a ragged block
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Tensor x = ConvertTo(bf16, dtype);
      const Tensor decoded = CodedAndDecoded(x, layout, true);
      EXPECT_TRUE(
          check::CompareBitwise("again", CodedAndDecoded(decoded, layout, true), decoded).ok)
          << Name(recipe) << " of " << Name(dtype);
      // With other scales the largest value is rounded, and with it the scale. (bf16 rounds it
      // back.)
      if (layout.scaling != Scaling::kBlock1x128 || dtype != DType::kF32) continue;
      const Tensor other = CodedAndDecoded(x, layout, false);
      EXPECT_FALSE(check::CompareBitwise("again", CodedAndDecoded(other, layout, false), other).ok);
    }
  }
  EXPECT_FALSE(RowCodesOf(BF16{}));
  EXPECT_FALSE(RowCodesOf(DelayedScaling{}));
  EXPECT_FALSE(RowCodesOf(Float8CurrentScaling{.power_of_two_scales = true}));
  EXPECT_FALSE(RowCodesOf(Float8BlockScaling{.power_of_two_scales = false}));
}

TEST(Recipe, OptionsOutOfRangeAreNamed) {
  EXPECT_THAT([] { Autocast scope(DelayedScaling{.amax_history_len = 0}); },
              ThrowsMessage<Error>(HasSubstr("amax_history_len = 0")));
  EXPECT_THAT([] { Autocast scope(DelayedScaling{.margin = -1}); },
              ThrowsMessage<Error>(HasSubstr("margin = -1")));
  EXPECT_THAT([] { Autocast scope(DelayedScaling{}); }, ThrowsMessage<Error>(HasSubstr("states")));
  AutocastOptions options;
  options.high_precision.first = -1;
  EXPECT_THAT([&] { Autocast scope(MXFP8BlockScaling{}, options); },
              ThrowsMessage<Error>(HasSubstr("first = -1, last = 0")));
  options.high_precision = {};
  options.high_precision.last = -2;
  EXPECT_THAT([&] { Autocast scope(MXFP8BlockScaling{}, options); },
              ThrowsMessage<Error>(HasSubstr("last = -2")));
}

TEST(Autocast, InnermostScopeCountsAndEnds) {
  EXPECT_EQ(RecipeFor("w"), Recipe(BF16{}));
  {
    const Autocast outer(MXFP8BlockScaling{});
    EXPECT_EQ(Name(RecipeFor("w")), "MXFP8BlockScaling");
    {
      const Autocast inner(Float8CurrentScaling{});
      EXPECT_EQ(Name(RecipeFor("w")), "Float8CurrentScaling");
    }
    EXPECT_EQ(Name(RecipeFor("w")), "MXFP8BlockScaling");
  }
  EXPECT_EQ(RecipeFor("w"), Recipe(BF16{}));
}

TEST(Autocast, FirstLastAndNamedLayersStayHigh) {
  const Autocast scope(
      MXFP8BlockScaling{},
      {.high_precision = {
           .first = 1, .last = 2, .num_layers = 6, .patterns = {"*.o_proj.*", "x"}}});
  const auto high = [](const char* name) { return !Quantizes(RecipeFor(name)); };
  EXPECT_TRUE(high("model.layers.0.mlp.experts.down_proj"));
  EXPECT_FALSE(high("model.layers.1.mlp.experts.down_proj"));
  EXPECT_FALSE(high("model.layers.3.self_attn.q_proj.weight"));
  EXPECT_TRUE(high("model.layers.4.self_attn.q_proj.weight"));
  EXPECT_TRUE(high("model.layers.5.self_attn.q_proj.weight"));
  EXPECT_TRUE(high("model.layers.2.self_attn.o_proj.weight"));
  EXPECT_TRUE(high("x"));
  EXPECT_FALSE(high("xy"));
}

class DelayedTest : public ::testing::Test {
 protected:
  // Quantises [1, 2] values in an own scope and returns the scale that was used.
  float Use(float a, float b, bool record = true, TensorRole role = TensorRole::kInput) {
    const Autocast scope(recipe_, {.states = &states_, .record_amax = record});
    const Tensor x = Tensor::FromSpan<float>({1, 2}, std::array{a, b});
    const QuantizedTensor q = QuantizeOperand(ctx_, recipe_, {.role = role, .name = "w", .x = x});
    return 1.0f / q.rowwise.scales.data<float>()[0];
  }
  ops::Context ctx_;
  ScalingStates states_;
  DelayedScaling recipe_{.amax_history_len = 2};
};

// Trap eval-moves-scales: accumulation does not advance the history either.
TEST_F(DelayedTest, MicroBatchesTakeTheLargerAmaxAndTheNextStepUsesIt) {
  EXPECT_EQ(Use(1, -7), 1.0f);
  EXPECT_EQ(Use(3, 2), 1.0f);  // second micro-batch of the step
  states_.EndStep(ctx_);
  EXPECT_EQ(Use(14, 1), 64.0f);  // 448 / 7
  states_.EndStep(ctx_);
  EXPECT_EQ(Use(1, 1), 32.0f);
}

// Trap eval-moves-scales.
TEST_F(DelayedTest, EvaluationUsesTheScaleAndLeavesNothing) {
  Use(7, 0);
  states_.EndStep(ctx_);
  EXPECT_EQ(Use(1e6f, 0, /*record=*/false), 64.0f);
  states_.EndStep(ctx_);
  EXPECT_EQ(Use(1, 1), 64.0f);
}

TEST_F(DelayedTest, StateIsDataThatComesBack) {
  Use(7, 0);
  states_.EndStep(ctx_);
  ScalingStates copy;
  for (const auto& [name, tensor] : states_.Tensors()) copy.Restore(name, tensor);
  Use(3, 5);
  states_.EndStep(ctx_);
  const auto expected = states_.Tensors();
  states_ = std::move(copy);
  Use(3, 5);
  states_.EndStep(ctx_);
  const auto got = states_.Tensors();
  ASSERT_EQ(got.size(), 2u);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].name, expected[i].name);
    EXPECT_TRUE(check::CompareBitwise(got[i].name, got[i].tensor, expected[i].tensor));
  }
}

TEST_F(DelayedTest, StateServesOneFormatAndOneOwner) {
  const int first = 0, second = 0;
  states_.Get("a", recipe_, DType::kE4M3, 1, &first);
  EXPECT_NO_THROW(states_.Get("a", recipe_, DType::kE4M3, 1, &first));
  EXPECT_NO_THROW(states_.Get("b", recipe_, DType::kE4M3, 1, &second));
  EXPECT_THAT([&] { states_.Get("a", recipe_, DType::kE4M3, 1, &second); },
              ThrowsMessage<Error>(HasSubstr("two layers have tensors named a")));
  EXPECT_THAT([&] { states_.Get("a", recipe_, DType::kE5M2, 1, &first); },
              ThrowsMessage<Error>(HasSubstr("the state of a is that of a tensor in e4m3")));
  // What was restored is anybody's until it is used.
  ScalingStates copy;
  for (const auto& [name, tensor] : states_.Tensors()) copy.Restore(name, tensor);
  EXPECT_NO_THROW(copy.Get("a", recipe_, DType::kE5M2, 1, &second));
}

TEST_F(DelayedTest, VersionIsNewWheneverScalesMayBe) {
  const std::uint64_t made = states_.version();
  EXPECT_NE(ScalingStates().version(), made);
  states_.EndStep(ctx_);
  EXPECT_EQ(states_.version(), made);  // nothing was recorded, no scale moved
  Use(7, 0);
  EXPECT_EQ(states_.version(), made);
  states_.EndStep(ctx_);
  const std::uint64_t stepped = states_.version();
  EXPECT_NE(stepped, made);
  states_.Restore("w/scale", Tensor::Zeros({1}, DType::kF32));
  const std::uint64_t restored = states_.version();
  EXPECT_NE(restored, stepped);
  const ScalingStates moved = std::move(states_);
  EXPECT_NE(moved.version(), restored);
  EXPECT_NE(states_.version(), restored);
  EXPECT_TRUE(states_.Tensors().empty());
}

// Another rank whose amax is 14 for every dense tensor and 28 for experts.
class TwoRanks final : public AmaxReducer {
 public:
  void Max(const Tensor& amax, TensorSharing sharing) override {
    for (float& a : amax.span<float>()) {
      a = std::max(a, sharing == TensorSharing::kAll ? 14.0f : 28.0f);
    }
    ++calls;
  }
  int calls = 0;
};

TEST_F(DelayedTest, AmaxOfOtherRanksCountsOnceAStep) {
  TwoRanks ranks;
  const auto use = [&](bool is_expert) {
    const Autocast scope(recipe_, {.states = &states_, .amax_reducer = &ranks});
    const Tensor x = Tensor::FromSpan<float>({1, 2}, std::array{7.0f, 1.0f});
    const QuantizedTensor q = QuantizeOperand(
        ctx_, recipe_, {.name = is_expert ? "e" : "d", .is_expert = is_expert, .x = x});
    return 1.0f / q.rowwise.scales.data<float>()[0];
  };
  EXPECT_EQ(use(false), 1.0f);
  EXPECT_EQ(use(true), 1.0f);
  EXPECT_EQ(use(true), 1.0f);  // a second micro-batch
  EXPECT_EQ(ranks.calls, 0);
  states_.EndStep(ctx_, &ranks);
  EXPECT_EQ(ranks.calls, 2);     // dense tensors together, experts together
  EXPECT_EQ(use(false), 32.0f);  // 448 / 14
  EXPECT_EQ(use(true), 16.0f);
}

TEST(CurrentScaling, AmaxIsThatOfAllRanksButForWeights) {
  TwoRanks ranks;
  const ops::Context ctx;
  const Tensor x = Tensor::FromSpan<float>({1, 2}, std::array{7.0f, 1.0f});
  const auto scale = [&](const QuantizeRequest& request, AmaxReducer* reducer) {
    const Autocast scope(Float8CurrentScaling{}, {.amax_reducer = reducer});
    const QuantizedTensor q = QuantizeOperand(ctx, Float8CurrentScaling{}, request);
    return 1.0f / q.rowwise.scales.data<float>()[0];
  };
  EXPECT_EQ(scale({.x = x}, nullptr), 64.0f);
  EXPECT_EQ(scale({.x = x}, &ranks), 32.0f);
  EXPECT_EQ(scale({.is_expert = true, .x = x}, &ranks), 16.0f);
  EXPECT_EQ(scale({.role = TensorRole::kWeight, .x = x}, &ranks), 64.0f);
}

TEST_F(DelayedTest, StateOfAnotherHistoryLengthIsRefused) {
  Use(7, 0);
  recipe_.amax_history_len = 3;
  EXPECT_THAT([&] { Use(7, 0); }, ThrowsMessage<Error>(HasSubstr("history of 3")));
}

}  // namespace
}  // namespace cistron::quant
