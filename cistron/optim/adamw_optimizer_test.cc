// Which parameters decay, and what the norm of gradients is made of.
#include "cistron/optim/adamw_optimizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cistron/check/compare.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/linear.h"
#include "cistron/nn/rms_norm.h"

namespace cistron::optim {
namespace {

// Names of the parameters that an update without gradient makes smaller.
std::vector<std::string> Decaying(const AdamWOptions& options) {
  const ops::Context ctx;
  nn::LocalParameterStore store(ctx, DType::kF32);
  store.Register({.name = "embedding", .shape = {3, 4}, .is_embedding = true});
  const nn::Linear linear(store, "linear", 4, 4);
  const nn::RmsNorm norm(store, "norm", 4, 1e-5);
  const nn::GroupedLinear experts({.num_groups = 2,
                                   .in_features = 4,
                                   .out_features = 4,
                                   .bias = true,
                                   .name = "experts",
                                   .bias_name = "experts_bias",
                                   .store = &store});
  AdamWOptimizer optimizer(ctx, store, options);
  for (std::size_t i = 0; i < store.parameters().size(); ++i) {
    auto& p = store.parameters()[i];
    const std::vector<float> ones(static_cast<std::size_t>(p.master.numel()), 1.0f);
    Convert(Tensor::FromSpan<float>(p.spec.shape, ones), p.master);
    FillZero(store.GradientOutput(static_cast<nn::ParameterId>(i)).tensor);
  }
  optimizer.ComputeGradNorm();
  optimizer.Update(0.5);
  std::vector<std::string> decaying;
  for (const auto& p : store.parameters()) {
    const float w = p.master.span<float>()[0];
    EXPECT_TRUE(w == 1.0f || w == 0.875f) << p.spec.name << " " << w;
    if (w < 1) decaying.push_back(p.spec.name);
  }
  return decaying;
}

using Names = std::vector<std::string>;

TEST(AdamWOptimizer, MatricesDecayNormsBiasesAndEmbeddingsDoNot) {
  EXPECT_EQ(Decaying({.adamw = {.weight_decay = 0.25}}), (Names{"linear", "experts"}));
}
TEST(AdamWOptimizer, EmbeddingsDecayOnRequest) {
  EXPECT_EQ(Decaying({.adamw = {.weight_decay = 0.25}, .decay_embeddings = true}),
            (Names{"embedding", "linear", "experts"}));
}
TEST(AdamWOptimizer, AllDecayOnRequest) {
  EXPECT_EQ(Decaying({.adamw = {.weight_decay = 0.25}, .decay_all = true}),
            (Names{"embedding", "linear", "norm", "experts", "experts_bias"}));
}

// Counts calls of ops.
class Counter final : public ops::OpRecorder {
 public:
  void Begin(std::string_view op, std::string_view) override { ++calls_[std::string(op)]; }
  int Of(const std::string& op) const {
    const auto it = calls_.find(op);
    return it == calls_.end() ? 0 : it->second;
  }

 private:
  std::map<std::string, int> calls_;
};

// Vectors between matrices whose gradients are in bf16: two launches in all, and each parameter is
// updated as by a gradient of the same values in fp32.
TEST(AdamWOptimizer, GradientsOfTwoTypesTakeTwoUpdates) {
  const auto train = [](DType gradients, Counter& counter) {
    const ops::Context ctx = ops::Context().WithRecorder(&counter);
    nn::LocalParameterStore store(ctx, DType::kBF16);
    store.SetGradientDType(gradients);
    for (int i = 0; i < 3; ++i) {
      store.Register({.name = fmt::format("norm{}", i), .shape = {8}, .decays = false});
      store.Register({.name = fmt::format("linear{}", i), .shape = {8, 8}});
    }
    store.Initialize(1, 0.1);
    AdamWOptimizer optimizer(ctx, store, {.adamw = {.weight_decay = 0.25}});
    for (std::size_t i = 0; i < store.parameters().size(); ++i) {
      const Shape& shape = store.parameters()[i].spec.shape;
      const ops::Output out = store.GradientOutput(static_cast<nn::ParameterId>(i));
      EXPECT_EQ(out.tensor.dtype(), shape.rank() == 2 ? gradients : DType::kF32);
      std::vector<float> values(static_cast<std::size_t>(shape.numel()));
      for (std::size_t k = 0; k < values.size(); ++k) {  // exact in bf16
        values[k] = static_cast<float>(static_cast<int>((7 * i + 5 * k) % 31) - 15) / 8.0f;
      }
      Convert(Tensor::FromSpan<float>(shape, values), out.tensor);
    }
    const double norm = optimizer.ComputeGradNorm();
    optimizer.Update(0.01);
    std::vector<Tensor> state;
    for (const auto& s : optimizer.State()) state.push_back(s.tensor.Clone());
    return std::pair{norm, state};
  };
  Counter one, two;
  const auto [norm32, state32] = train(DType::kF32, one);
  const auto [norm16, state16] = train(DType::kBF16, two);
  EXPECT_EQ(one.Of("adamw"), 1);
  EXPECT_EQ(two.Of("adamw"), 2);
  EXPECT_EQ(norm16, norm32);  // sums of multiples of 1/64 are exact
  ASSERT_EQ(state16.size(), state32.size());
  for (std::size_t i = 0; i < state16.size(); ++i) {
    EXPECT_TRUE(check::CompareBitwise("state", state16[i], state32[i]).ok);
  }
}

// Partial sums that are offered stand for the gradient until it is written to again.
TEST(AdamWOptimizer, NormTakesOfferedSquareSums) {
  const ops::Context ctx;
  nn::LocalParameterStore store(ctx, DType::kF32);
  const nn::Linear a(store, "a", 2, 1), b(store, "b", 2, 1);
  AdamWOptimizer optimizer(ctx, store, {});
  const auto write = [&](nn::ParameterId id, float x, float y) {
    Convert(Tensor::FromSpan<float>({2, 1}, std::vector{x, y}), store.GradientOutput(id).tensor);
  };
  write(0, 3, 4);
  write(1, 5, 1);
  EXPECT_EQ(optimizer.ComputeGradNorm(), std::sqrt(51.0));
  // Not this gradient's own, so that it shows which of the two is taken.
  store.OfferSquareSums(0, Tensor::FromSpan<double>({2}, std::vector{70.0, 4.0}));
  EXPECT_EQ(optimizer.ComputeGradNorm(), 10.0);
  store.OfferSquareSums(1, Tensor::FromSpan<double>({1}, std::vector{7.0}));
  EXPECT_EQ(optimizer.ComputeGradNorm(), 9.0);
  write(0, 3, 4);
  EXPECT_EQ(optimizer.ComputeGradNorm(), std::sqrt(32.0));
}

}  // namespace
}  // namespace cistron::optim
