#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "cistron/check/compare.h"
#include "cistron/nn/attention.h"
#include "cistron/nn/load_balancing_loss.h"
#include "cistron/nn/parameter.h"
#include "cistron/nn/rotary_table.h"
#include "cistron/nn/saved.h"
#include "cistron/nn/token_dispatcher.h"
#include "cistron/ops/rope/rope.h"
#include "cistron/testing/poison.h"

namespace cistron::nn {
namespace {

TEST(Saved, RecordsComeBackInReverseAndOnce) {
  int a = 0, b = 0;  // stand for two modules
  Saved saved;
  saved.Push<int>(&a, "a") = 1;
  saved.Push<int>(&b, "b") = 2;
  EXPECT_THROW(saved.Pop<int>(&a, "a"), Error);    // b's record is newer
  EXPECT_THROW(saved.Pop<float>(&b, "b"), Error);  // of another kind
  try {
    saved.Pop<int>(&a, "b");
    ADD_FAILURE() << "two modules of one name are not one";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("b: the saved state belongs to another b;"), std::string::npos);
  }
  EXPECT_EQ(saved.Pop<int>(&b, "b"), 2);
  EXPECT_EQ(saved.Pop<int>(&a, "a"), 1);
  EXPECT_THROW(saved.Pop<int>(&a, "a"), Error);  // consumed twice
}

TEST(RotaryTable, IsAsLongAsNeededAndGrowingChangesNoValue) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    RotaryTable rotary(6, 1e4, dtype);
    const Tensor none = rotary.ForPositions(ops::Context(), 0);  // padding alone
    EXPECT_GE(none.dim(0), 1);
    const Tensor small = rotary.ForPositions(ops::Context(), 5);
    EXPECT_GE(small.dim(0), 5);
    EXPECT_LE(small.dim(0), 10);
    const Tensor kept = small.Clone();
    EXPECT_EQ(rotary.ForPositions(ops::Context(), 3).raw(), small.raw());
    const Tensor large = rotary.ForPositions(ops::Context(), 100);
    EXPECT_GE(large.dim(0), 100);
    EXPECT_LE(large.dim(0), 200);
    EXPECT_TRUE(testing::Agrees(check::CompareBitwise("kept", small, kept)));
    EXPECT_TRUE(
        testing::Agrees(check::CompareBitwise("grown", large.Slice(0, 0, small.dim(0)), small)));
    EXPECT_TRUE(testing::Agrees(
        check::CompareBitwise("whole", large, ops::RopeTable(large.dim(0), 6, 1e4, dtype))));
  }
}

TEST(SelfAttention, BackwardAfterTheParametersChangedIsRefused) {
  const ops::Context ctx;
  LocalParameterStore store(ctx, DType::kF32);
  const ops::AttentionConfig config{.num_heads = 2, .num_kv_heads = 1, .head_dim = 4};
  const SelfAttention attention(store, "attn.", 8, config,
                                std::make_shared<RotaryTable>(4, 1e4, DType::kF32));
  store.Initialize(1, 0.3);
  const ops::PackedSequences sequences = ops::UniformSequences(1, 3);
  const Tensor x = Tensor::Zeros({3, 8}, DType::kF32);
  Saved saved;
  attention.Forward(ctx, x, sequences, &saved);
  store.MarkChanged();
  EXPECT_THAT([&] { attention.Backward(ctx, x, sequences, saved); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("parameters changed")));
}

TEST(ParameterStore, MastersHoldTheExactValues) {
  LocalParameterStore store(ops::Context(), DType::kBF16);
  store.Register({.name = "w", .shape = {2}});
  const std::vector<float> exact = {1.0f + 0x1p-20f, -3.14159274f};
  store.Assign("w", Tensor::FromSpan<float>({2}, exact));
  const auto* p = store.Find("w");
  EXPECT_EQ(p->master.span<float>()[0], exact[0]);
  EXPECT_EQ(p->master.span<float>()[1], exact[1]);
  EXPECT_EQ(static_cast<float>(p->value.span<bf16>()[0]), 1.0f);
}

TEST(ParameterStore, FirstGradientOfAStepIsWritten) {
  LocalParameterStore store(ops::Context(), DType::kF32);
  const ParameterId id = store.Register({.name = "w", .shape = {3}});
  EXPECT_EQ(store.GradientOutput(id).mode, ops::WriteMode::kWrite);
  EXPECT_EQ(store.GradientOutput(id).mode, ops::WriteMode::kAccumulate);
  store.ZeroGradients();
  EXPECT_EQ(store.GradientOutput(id).mode, ops::WriteMode::kWrite);
}

TEST(ParameterStore, RefusesUnknownNamesShapesAndDuplicates) {
  LocalParameterStore store(ops::Context(), DType::kF32);
  store.Register({.name = "w", .shape = {3}});
  EXPECT_THROW(store.Register({.name = "w", .shape = {3}}), Error);
  EXPECT_THROW(store.Assign("v", Tensor::Zeros({3}, DType::kF32)), Error);
  EXPECT_THROW(store.Assign("w", Tensor::Zeros({4}, DType::kF32)), Error);
}

// Closed form: two layers, two scopes, two experts, top-1.
TEST(LoadBalancingLoss, ClosedForm) {
  const ops::Context ctx;
  std::vector<ops::RouterOutputs> layers(2);
  const std::vector<std::vector<std::int64_t>> counts = {{3, 1, 0, 2}, {1, 3, 2, 0}};
  const std::vector<std::vector<double>> scores = {{2.5, 1.5, 0.75, 1.25}, {1.5, 2.5, 1.0, 1.0}};
  for (std::size_t l = 0; l < 2; ++l) {
    layers[l].counts = Tensor::FromSpan<std::int64_t>({2, 2}, counts[l]);
    layers[l].score_sums = Tensor::FromSpan<double>({2, 2}, scores[l]);
  }
  // Scope 0: n = 4 of N = 12 tokens, T = 8, C = (4, 4), S = (4, 4): aux = 2/64·32 = 1.
  // Scope 1: n = 2, T = 4, C = (2, 2), S = (1.75, 2.25): aux = 2/16·8 = 1.
  const LoadBalancingLoss loss =
      ComputeLoadBalancingLoss(ctx, layers, 1, 0.5, Tensor::Scalar(1.0 / 12));
  EXPECT_DOUBLE_EQ(loss.value.item(), 4.0 / 12 + 2.0 / 12);
  const auto grad = loss.score_grad.span<double>();
  EXPECT_DOUBLE_EQ(grad[0], 0.5 * (4.0 / 12) * 2 / 64 * 4);
  EXPECT_DOUBLE_EQ(grad[3], 0.5 * (2.0 / 12) * 2 / 16 * 2);
}

TEST(LoadBalancingLoss, ScopeWithoutTokensContributesNothing) {
  std::vector<ops::RouterOutputs> layers(1);
  layers[0].counts = Tensor::Zeros({1, 4}, DType::kI64);
  layers[0].score_sums = Tensor::Zeros({1, 4}, DType::kF64);
  const LoadBalancingLoss loss =
      ComputeLoadBalancingLoss(ops::Context(), layers, 2, 1.0, Tensor::Scalar(1.0));
  EXPECT_EQ(loss.value.item(), 0);
}

TEST(LocalTokenDispatcher, CombineOfDispatchSumsATokensRows) {
  const ops::Context ctx;
  LocalTokenDispatcher dispatcher(3);
  const std::vector<float> x = {1, 2, 10, 20};
  const std::vector<std::int32_t> experts = {2, 0, 2,
                                             -1};  // the second slot of token 1 is not routed
  const Tensor probs = Tensor::Zeros({2, 2}, DType::kF32);
  const auto d = dispatcher.Dispatch(ctx, Tensor::FromSpan<float>({2, 2}, x),
                                     Tensor::FromSpan<std::int32_t>({2, 2}, experts), probs, {});
  const auto sizes = d.rows.split_sizes.span<std::int64_t>();
  EXPECT_EQ(sizes[0], 1);
  EXPECT_EQ(sizes[1], 0);
  EXPECT_EQ(sizes[2], 2);
  const Tensor y = dispatcher.Combine(ctx, *d.state, d.rows.data);
  const std::vector<float> expected = {2, 4, 10, 20};
  EXPECT_TRUE(check::CompareBitwise("y", y, Tensor::FromSpan<float>({2, 2}, expected)).ok);
}

}  // namespace
}  // namespace cistron::nn
