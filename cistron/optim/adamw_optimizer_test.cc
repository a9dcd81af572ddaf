// Which parameters decay.
#include "cistron/optim/adamw_optimizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

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

}  // namespace
}  // namespace cistron::optim
