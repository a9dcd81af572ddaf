// The model with each option of the router that Mixtral lacks: gradients, splits, padding, biases,
// jitter, and what reads and writes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/model/hugging_face.h"
#include "cistron/model/tiny_mixtral.h"
#include "cistron/ops/router/router.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/poison.h"

namespace cistron::model {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;

struct Option {
  const char* name;
  MixtralConfig config;
};

// The tiny model without the auxiliary loss of Hugging Face, and with one thing changed.
std::vector<Option> Options() {
  MixtralConfig base = TinyConfig();
  base.output_router_logits = false;
  std::vector<Option> all;
  const auto add = [&](const char* name, auto&& change) {
    all.push_back({name, base});
    change(all.back().config);
  };
  const auto sigmoid = [](MixtralConfig& c) { c.scoring_func = ScoringFunc::kSigmoid; };
  add("before top-k", [](MixtralConfig& c) {
    c.moe_router_pre_softmax = true;
    c.norm_topk_prob = false;
  });
  add("not normalised", [](MixtralConfig& c) { c.norm_topk_prob = false; });
  add("sigmoid", sigmoid);
  add("sigmoid, scaled", [&](MixtralConfig& c) {
    sigmoid(c);
    c.norm_topk_prob = false;
    c.routed_scaling_factor = 2.5;
  });
  add("bias", [&](MixtralConfig& c) {
    sigmoid(c);
    c.moe_router_enable_expert_bias = true;
    c.moe_router_bias_update_rate = 0.05;
  });
  add("groups", [&](MixtralConfig& c) {
    sigmoid(c);
    c.num_local_experts = 8;
    c.n_group = 4;
    c.topk_group = 2;
  });
  add("jitter", [](MixtralConfig& c) { c.router_jitter_noise = 0.3; });
  add("aux of each layer", [](MixtralConfig& c) { c.moe_aux_loss_coeff = 0.5; });
  add("both aux", [](MixtralConfig& c) {
    c.output_router_logits = true;
    c.moe_aux_loss_coeff = 0.5;
  });
  add("z", [](MixtralConfig& c) { c.moe_z_loss_coeff = 0.2; });
  add("shared", [](MixtralConfig& c) { c.n_shared_experts = 2; });
  add("all", [&](MixtralConfig& c) {
    sigmoid(c);
    c.output_router_logits = true;
    c.num_local_experts = 8;
    c.n_group = 4;
    c.topk_group = 2;
    c.routed_scaling_factor = 1.5;
    c.moe_router_enable_expert_bias = true;
    c.router_jitter_noise = 0.2;
    c.moe_aux_loss_coeff = 0.5;
    c.moe_z_loss_coeff = 0.2;
    c.n_shared_experts = 1;
  });
  return all;
}

std::unique_ptr<LocalMixtral> Make(const MixtralConfig& c, DType dtype,
                                   const std::string& impl = "") {
  const ops::Context ctx = impl.empty() ? ops::Context() : ops::Context().WithImpl(impl);
  auto m = std::make_unique<LocalMixtral>(ctx, c, dtype);
  m->store.Initialize(kSeed, c.initializer_range);
  for (const auto& b : m->store.buffers()) {  // a bias that matters
    for (std::int64_t e = 0; e < b.value.numel(); ++e) {
      DispatchFloat("test", b.value.dtype(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        b.value.data<T>()[e] = static_cast<T>(0.1f * static_cast<float>(e % 3));
      });
    }
  }
  return m;
}

// Along a random direction of all weights. A step of 2^-14 keeps every top-k choice, which the
// sizes of the differences would show.
TEST(RouterOptions, GradientByCentralDifferences) {
  for (const AuxScope scope : {AuxScope::kBatch, AuxScope::kSequence}) {
    for (Option option : Options()) {
      SCOPED_TRACE(option.name);
      option.config.aux_scope = scope;
      const auto m = Make(option.config, DType::kF64);
      const std::vector<data::Batch> batches = {MakeBatch({5, 1, 9}, option.config.vocab_size)};
      Loss(*m, batches);
      std::vector<Tensor> at;
      for (const auto& p : m->store.parameters()) at.push_back(p.master);
      const std::vector<Tensor> gradients = Gradients(*m);
      EXPECT_TRUE(Agrees(testing::CheckGradientAlong(option.name, [&] { return Loss(*m, batches); },
                                                     at, gradients, {.step = 0x1p-14})));
    }
  }
}

// The check above would also pass for an option that changes nothing.
TEST(RouterOptions, EachChangesLossOrGradients) {
  MixtralConfig base = TinyConfig();
  base.output_router_logits = false;
  const auto plain = Make(base, DType::kF64);
  const std::vector<data::Batch> batches = {MakeBatch({5, 1, 9}, base.vocab_size)};
  const double loss = Loss(*plain, batches);
  for (const Option& option : Options()) {
    const auto m = Make(option.config, DType::kF64);
    EXPECT_GT(std::abs(Loss(*m, batches) - loss), 1e-6) << option.name;
  }
}

// With aux_scope=sequence nothing depends on the accumulation split; in fp64 the orders
// of summation differ by roundings only.
TEST(RouterOptions, AccumulationEqualsOneBatchWithSequenceScope) {
  for (Option option : Options()) {
    SCOPED_TRACE(option.name);
    option.config.aux_scope = AuxScope::kSequence;
    const std::int64_t vocab = option.config.vocab_size;
    const auto m = Make(option.config, DType::kF64);
    LossSums sums, sums_split;
    const double whole = Loss(*m, {MakeBatch({6, 3, 7, 2}, vocab)}, &sums);
    const std::vector<Tensor> expected = Gradients(*m);
    const double split =
        Loss(*m, {MakeBatch({6, 3}, vocab), MakeBatch({7, 2}, vocab, 9)}, &sums_split);
    EXPECT_NEAR(whole, split, 1e-13);
    EXPECT_TRUE(
        Agrees(check::CompareBitwise("counts", sums_split.expert_counts, sums.expert_counts)));
    const std::vector<Tensor> got = Gradients(*m);
    for (std::size_t p = 0; p < got.size(); ++p) {
      EXPECT_TRUE(Agrees(check::CompareToMaximum(m->store.parameters()[p].spec.name, got[p],
                                                 expected[p], check::Gamma(1 << 12, DType::kF64))));
    }
  }
}

// padded-tail: padding is not routed, not given to the shared expert, and counts in no loss. With
// the reference every row is computed alone, so that the bits are the same.
TEST(RouterOptions, PaddedTail) {
  for (const Option& option : Options()) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("{} {}", option.name, Name(dtype)));
      const auto m = Make(option.config, dtype, "ref");
      LossSums sums, padded_sums;
      const std::int64_t vocab = option.config.vocab_size;
      const double plain = Loss(*m, {MakeBatch({6, 9}, vocab)}, &sums);
      const std::vector<Tensor> expected = Gradients(*m);
      const double padded = Loss(*m, {MakeBatch({6, 9}, vocab, 0, 5)}, &padded_sums);
      EXPECT_EQ(plain, padded);
      EXPECT_TRUE(
          Agrees(check::CompareBitwise("counts", padded_sums.expert_counts, sums.expert_counts)));
      EXPECT_TRUE(
          Agrees(check::CompareBitwise("aux", padded_sums.layer_aux_loss, sums.layer_aux_loss)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("z", padded_sums.z_loss, sums.z_loss)));
      const std::vector<Tensor> got = Gradients(*m);
      for (std::size_t p = 0; p < got.size(); ++p) {
        EXPECT_TRUE(
            Agrees(check::Compare(m->store.parameters()[p].spec.name, got[p], expected[p], 0.0)));
      }
    }
  }
}

// second-backward-nan
TEST(RouterOptions, SecondBackwardNan) {
  for (const Option& option : Options()) {
    SCOPED_TRACE(option.name);
    const auto m = Make(option.config, DType::kF32);
    const std::vector<data::Batch> batches = {MakeBatch({16, 3}, option.config.vocab_size, 0, 2)};
    const double first = Loss(*m, batches);
    const std::vector<Tensor> expected = Gradients(*m);
    for (int pass = 0; pass < 2; ++pass) {
      EXPECT_EQ(Loss(*m, batches), first);
      const std::vector<Tensor> got = Gradients(*m);
      for (std::size_t p = 0; p < got.size(); ++p) {
        EXPECT_TRUE(Agrees(check::CompareBitwise("gradient", got[p], expected[p])));
      }
    }
  }
}

// Closed forms from the router's logits: a layer's z-loss, and its load-balancing loss, which for a
// model of one layer is a K-th of Hugging Face's.
TEST(AuxiliaryLosses, ClosedForms) {
  MixtralConfig c = TinyConfig();
  c.num_hidden_layers = 1;
  c.moe_aux_loss_coeff = 0.5;
  c.moe_z_loss_coeff = 0.2;
  const auto m = Make(c, DType::kF64);
  const data::Batch batch = MakeBatch({5, 1, 9}, c.vocab_size);
  LossSums sums;
  Loss(*m, {batch}, &sums);
  EXPECT_NEAR(ElementAsDouble(sums.layer_aux_loss, 0) * static_cast<double>(c.num_experts_per_tok),
              sums.aux_loss.item(), 1e-14);
  const Tensor logits = m->model.ComputeLogits(batch).router_logits[0];
  double z = 0;
  for (std::int64_t t = 0; t < logits.dim(0); ++t) {
    double sum = 0;
    for (const double l : logits.Select(t).span<double>()) sum += std::exp(l);
    z += std::log(sum) * std::log(sum) / static_cast<double>(logits.dim(0));
  }
  EXPECT_NEAR(ElementAsDouble(sums.z_loss, 0), z, 1e-14);
}

// The gradient of a batch with the bias in place is that of its choice: the bias itself enters no
// probability (bias-cancels), and moves by the counts of the global batch, once.
TEST(ExpertBias, MovesByTheCountsOfTheGlobalBatch) {
  MixtralConfig c = TinyConfig();
  c.scoring_func = ScoringFunc::kSigmoid;
  c.moe_router_enable_expert_bias = true;
  c.moe_router_bias_update_rate = 0.125;  // exact in every dtype
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    LocalMixtral m(ops::Context(), c, dtype);
    m.store.Initialize(kSeed, c.initializer_range);
    LossSums sums;
    Loss(m, {MakeBatch({6, 3}, c.vocab_size), MakeBatch({7, 2}, c.vocab_size, 9)}, &sums);
    m.model.UpdateExpertBias(sums);
    const std::int64_t mean = 18 * c.num_experts_per_tok / c.num_local_experts;
    ASSERT_EQ(m.store.buffers().size(), 2u);
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      const auto& buffer = m.store.buffers()[static_cast<std::size_t>(layer)];
      EXPECT_EQ(buffer.name,
                fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", layer));
      EXPECT_EQ(buffer.value.dtype(), ComputeType(dtype));
      const auto counts = sums.expert_counts.Select(layer).span<std::int64_t>();
      for (std::size_t e = 0; e < counts.size(); ++e) {
        const double expected = counts[e] < mean ? 0.125 : counts[e] > mean ? -0.125 : 0;
        EXPECT_EQ(ElementAsDouble(buffer.value, static_cast<std::int64_t>(e)), expected);
      }
    }
    EXPECT_EQ(m.store.FindBuffer("model.layers.0.mlp.gate.e_score_correction_bias"),
              &m.store.buffers()[0]);
  }
}

// It balances: after steps without any other change the load is even within what ties and the last
// move of u leave.
TEST(ExpertBias, EvensTheLoad) {
  MixtralConfig c = TinyConfig();
  c.scoring_func = ScoringFunc::kSigmoid;
  c.moe_router_enable_expert_bias = true;
  c.moe_router_bias_update_rate = 0.01;
  LocalMixtral m(ops::Context(), c, DType::kF32);
  m.store.Initialize(kSeed, c.initializer_range);
  const auto spread = [](const LossSums& sums) {
    const auto n = sums.expert_counts.Select(0).span<std::int64_t>();
    return *std::max_element(n.begin(), n.end()) - *std::min_element(n.begin(), n.end());
  };
  const std::vector<data::Batch> batches = {MakeBatch({16, 16, 16, 16}, c.vocab_size)};
  LossSums sums;
  Loss(m, batches, &sums);
  const std::int64_t before = spread(sums);
  for (int step = 0; step < 100; ++step) {
    m.model.UpdateExpertBias(sums);
    Loss(m, batches, &sums);
  }
  EXPECT_LT(2 * spread(sums), before);
}

TEST(Jitter, IsOfTrainingAloneAndChangesWithTheStep) {
  MixtralConfig c = TinyConfig();
  const auto plain = Make(c, DType::kF64);
  c.router_jitter_noise = 0.3;
  const auto noisy = Make(c, DType::kF64);
  const data::Batch batch = MakeBatch({6, 9}, c.vocab_size);
  EXPECT_TRUE(Agrees(
      check::CompareBitwise("nll", noisy->model.Evaluate(batch), plain->model.Evaluate(batch))));
  const double first = Loss(*noisy, {batch}, nullptr, 1);
  EXPECT_NE(first, Loss(*plain, {batch}));
  EXPECT_NE(first, Loss(*noisy, {batch}, nullptr, 2));
  EXPECT_EQ(first, Loss(*noisy, {batch}, nullptr, 1));
  // Without the run's seed and step there is no noise to draw.
  LossSums sums = LossSums::Zeros(ops::Context(), c);
  const LossScale scale{Tensor::Scalar(1.0), Tensor::Scalar(1.0)};
  EXPECT_THAT([&] { noisy->model.TrainMicroBatch(batch, scale, sums); },
              ::testing::ThrowsMessage<Error>(HasSubstr("router_jitter_noise = 0.3")));
}

// The table of docs/router.md, through the op with the router that each config makes.
TEST(RouterDocs, WorkedExample) {
  const std::vector<double> l = {2, 1, 0, -1};
  const Tensor logits = Tensor::FromSpan<double>({1, 4}, l);
  struct Row {
    ops::RouterConfig config;
    std::vector<double> bias;
    std::vector<std::int32_t> experts;
    std::vector<double> probs;
  };
  constexpr auto kSigmoid = ops::ScoreFunction::kSigmoid;
  const ops::RouterConfig base{.num_experts = 4, .top_k = 2};
  const auto with = [&](auto&& change) {
    ops::RouterConfig c = base;
    change(c);
    return c;
  };
  const ops::RouterConfig sigmoid = with([](auto& c) { c.score = kSigmoid; });
  const Row rows[] = {
      {base, {}, {0, 1}, {0.7311, 0.2689}},
      {with([](auto& c) { c.score = ops::ScoreFunction::kSoftmaxBeforeTopK; }),
       {},
       {0, 1},
       {0.6439, 0.2369}},
      {sigmoid, {}, {0, 1}, {0.5464, 0.4536}},
      {with([](auto& c) {
         c.score = kSigmoid;
         c.normalize = false;
         c.routed_scaling = 2.5;
       }),
       {},
       {0, 1},
       {2.2020, 1.8276}},
      {sigmoid, {0, -0.3, 0, 0}, {0, 2}, {0.6379, 0.3621}},
      {with([](auto& c) {
         c.score = kSigmoid;
         c.num_groups = 2;
       }),
       {},
       {0, 1},
       {0.5464, 0.4536}},
  };
  for (const Row& row : rows) {
    const ops::RouterOutputs out{.experts = Tensor::Empty({1, 2}, DType::kI32),
                                 .probs = Tensor::Empty({1, 2}, DType::kF64)};
    const Tensor bias = row.bias.empty() ? Tensor() : Tensor::FromSpan<double>({4}, row.bias);
    ops::RouterForward(ops::Context(), row.config, logits, bias, {}, {}, out);
    for (std::size_t k = 0; k < 2; ++k) {
      EXPECT_EQ(out.experts.span<std::int32_t>()[k], row.experts[k]);
      EXPECT_NEAR(out.probs.span<double>()[k], row.probs[k], 5e-5);
    }
  }
}

TEST(RouterOptions, ParametersOfTheStoreAreThoseOfTheNames) {
  for (const Option& option : Options()) {
    SCOPED_TRACE(option.name);
    const auto m = Make(option.config, DType::kF32);
    const auto names = MixtralParameters(option.config);
    ASSERT_EQ(m->store.parameters().size(), names.size());
    std::int64_t count = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
      EXPECT_EQ(m->store.parameters()[i].spec.name, names[i].name);
      EXPECT_EQ(m->store.parameters()[i].spec.shape, names[i].shape);
      count += names[i].shape.numel();
    }
    EXPECT_EQ(ParameterCount(option.config), count);
    const auto buffers = MixtralBuffers(option.config);
    ASSERT_EQ(m->store.buffers().size(), buffers.size());
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      EXPECT_EQ(m->store.buffers()[i].name, buffers[i].name);
      EXPECT_EQ(m->store.buffers()[i].value.shape(), buffers[i].shape);
    }
  }
}

TEST(RouterOptions, ExplainShowsTheSharedExpert) {
  const MixtralConfig c = Options().back().config;
  EXPECT_THAT(Make(c, DType::kF32)->model.ExplainExperts(), HasSubstr("shared_experts."));
}

TEST(RouterOptions, ReadBackFromJson) {
  for (const Option& option : Options()) {
    SCOPED_TRACE(option.name);
    const std::string text = ToJson(option.config, "float32");
    const MixtralConfig again = ParseMixtralConfig(text, "config.json");
    EXPECT_EQ(ToJson(again, "float32"), text);
    EXPECT_EQ(again.scoring_func, option.config.scoring_func);
    EXPECT_EQ(again.moe_router_pre_softmax, option.config.moe_router_pre_softmax);
    EXPECT_EQ(again.norm_topk_prob, option.config.norm_topk_prob);
    EXPECT_EQ(again.routed_scaling_factor, option.config.routed_scaling_factor);
    EXPECT_EQ(again.n_group, option.config.n_group);
    EXPECT_EQ(again.topk_group, option.config.topk_group);
    EXPECT_EQ(again.moe_router_enable_expert_bias, option.config.moe_router_enable_expert_bias);
    EXPECT_EQ(again.moe_router_bias_update_rate, option.config.moe_router_bias_update_rate);
    EXPECT_EQ(again.moe_aux_loss_coeff, option.config.moe_aux_loss_coeff);
    EXPECT_EQ(again.moe_z_loss_coeff, option.config.moe_z_loss_coeff);
    EXPECT_EQ(again.router_jitter_noise, option.config.router_jitter_noise);
    EXPECT_EQ(again.n_shared_experts, option.config.n_shared_experts);
  }
  // A Mixtral's file says nothing of them.
  const std::string plain = ToJson(TinyConfig(), "float32");
  for (const char* name : {"scoring_func", "norm_topk_prob", "n_group", "moe_", "shared"}) {
    EXPECT_EQ(plain.find(name), std::string::npos) << name;
  }
}

TEST(RouterOptions, ExportNamesWhatMixtralLacks) {
  EXPECT_TRUE(OptionsThatMixtralLacks(TinyConfig()).empty());
  MixtralConfig c = Options().back().config;
  c.norm_topk_prob = false;
  EXPECT_THAT(
      [&] { SaveHuggingFace("/nonexistent/never", c, {}, {}); },
      ::testing::ThrowsMessage<Error>(::testing::AllOf(
          HasSubstr("scoring_func = sigmoid"), HasSubstr("norm_topk_prob = false"),
          HasSubstr("routed_scaling_factor = 1.5"), HasSubstr("n_group = 4"),
          HasSubstr("moe_router_enable_expert_bias = true"), HasSubstr("n_shared_experts = 1"))));
  // What only training sees is Mixtral all the same.
  MixtralConfig trained = TinyConfig();
  trained.moe_z_loss_coeff = trained.moe_aux_loss_coeff = trained.router_jitter_noise = 0.1;
  EXPECT_TRUE(OptionsThatMixtralLacks(trained).empty());
}

TEST(RouterOptions, WhatDoesNotFitIsRefusedByName) {
  const auto refusal = [](auto&& change) {
    MixtralConfig c = TinyConfig();
    change(c);
    return [c] { Validate(c); };
  };
  const auto names = [](const char* text) {
    return ::testing::ThrowsMessage<Error>(HasSubstr(text));
  };
  using C = MixtralConfig;
  const auto sigmoid = [](C& c) { c.scoring_func = ScoringFunc::kSigmoid; };
  EXPECT_THAT(refusal([](C& c) { c.moe_router_pre_softmax = true; }),
              names("set norm_topk_prob = false"));
  EXPECT_THAT(refusal([&](C& c) {
                sigmoid(c);
                c.moe_router_pre_softmax = true;
              }),
              names("moe_router_pre_softmax = true is for scoring_func = softmax"));
  EXPECT_THAT(refusal([](C& c) { c.moe_router_enable_expert_bias = true; }),
              names("moe_router_enable_expert_bias = true needs scoring_func = sigmoid; set it"));
  EXPECT_THAT(refusal([](C& c) { c.n_group = 2; }), names("n_group = 2 needs scoring_func"));
  EXPECT_THAT(refusal([&](C& c) {
                sigmoid(c);
                c.n_group = 3;
              }),
              names("n_group = 3 does not divide num_local_experts = 4"));
  EXPECT_THAT(refusal([&](C& c) {
                sigmoid(c);
                c.n_group = 4;
                c.topk_group = 4;
              }),
              names("topk_group = 4 does not divide num_experts_per_tok = 2"));
  EXPECT_THAT(refusal([&](C& c) {
                sigmoid(c);
                c.n_group = 4;
              }),
              names("groups of 1 experts"));
  EXPECT_THAT(refusal([](C& c) { c.topk_group = 2; }), names("topk_group = 2 exceeds n_group = 1"));
  EXPECT_THAT(refusal([](C& c) { c.router_jitter_noise = 1; }), names("router_jitter_noise is 1"));
  EXPECT_THAT(refusal([](C& c) { c.moe_z_loss_coeff = -1; }), names("moe_z_loss_coeff is -1"));
  EXPECT_THAT(refusal([](C& c) { c.moe_aux_loss_coeff = NAN; }), names("moe_aux_loss_coeff"));
  EXPECT_THAT(refusal([](C& c) { c.routed_scaling_factor = 0; }), names("routed_scaling_factor"));
  EXPECT_THAT(refusal([](C& c) { c.n_shared_experts = -1; }), names("n_shared_experts is -1"));
}

}  // namespace
}  // namespace cistron::model
