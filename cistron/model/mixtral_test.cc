#include "cistron/model/mixtral.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/model/local_mixtral.h"

namespace cistron::model {
namespace {

constexpr std::uint64_t kSeed = 20240611;

MixtralConfig TinyConfig() {
  MixtralConfig c;
  c.vocab_size = 11;
  c.hidden_size = 12;
  c.intermediate_size = 7;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 3;
  c.num_key_value_heads = 1;
  c.num_local_experts = 4;
  c.num_experts_per_tok = 2;
  c.max_position_embeddings = 16;
  c.initializer_range = 0.4;  // far from zero, so that every path matters
  c.router_aux_loss_coef = 0.3;
  c.output_router_logits = true;
  return c;
}

// Sequences of the given lengths with random tokens and uneven weights; labels are the next token.
data::Batch MakeBatch(const std::vector<std::int64_t>& lengths, std::int64_t vocab,
                      std::uint64_t first_token = 0, std::int64_t padding = 0) {
  data::Batch b;
  std::int64_t sum = 0;
  for (const std::int64_t n : lengths) sum += n;
  const std::int64_t tokens = sum + padding;
  b.sequences = ops::PackedFromLengths(lengths, tokens);
  b.tokens = Tensor::Zeros({tokens}, DType::kI64);
  b.labels = Tensor::Empty({tokens}, DType::kI64);
  b.weights = Tensor::Zeros({tokens}, DType::kF32);
  const RandomStream stream(kSeed, "tokens");
  std::int64_t* token = b.tokens.data<std::int64_t>();
  std::int64_t* label = b.labels.data<std::int64_t>();
  float* weight = b.weights.data<float>();
  for (std::int64_t t = 0; t < tokens; ++t) label[t] = -100;
  std::int64_t t = 0;
  for (const std::int64_t n : lengths) {
    for (std::int64_t i = 0; i < n; ++i, ++t) {
      const std::uint64_t index = first_token + static_cast<std::uint64_t>(t);
      token[t] = static_cast<std::int64_t>(stream.Below(index, static_cast<std::uint64_t>(vocab)));
      if (i > 0) {
        label[t - 1] = token[t];
        weight[t - 1] = 0.5f + stream.Uniform(4 * index);
      }
    }
  }
  if (padding > 0) {
    b.token_mask = Tensor::Zeros({tokens}, DType::kU8);
    for (std::int64_t i = 0; i < sum; ++i) b.token_mask.data<std::uint8_t>()[i] = 1;
  }
  return b;
}

double WeightSum(const std::vector<data::Batch>& batches) {
  double sum = 0;
  for (const data::Batch& b : batches) {
    for (const float w : b.weights.span<float>()) sum += w;
  }
  return sum;
}

std::int64_t RoutedTokens(const std::vector<data::Batch>& batches) {
  std::int64_t n = 0;
  for (const data::Batch& b : batches) {
    const auto cu = b.sequences.cu_seqlens.span<std::int64_t>();
    n += cu.back();
  }
  return n;
}

// Loss of the global batch made of micro-batches; gradients are left in the store.
double Loss(LocalMixtral& m, const std::vector<data::Batch>& batches) {
  const ops::Context ctx;
  const double weights = WeightSum(batches);
  const LossScale scale{Tensor::Scalar(1 / weights),
                        Tensor::Scalar(1 / static_cast<double>(RoutedTokens(batches)))};
  LossSums sums = LossSums::Zeros(ctx, m.model.config());
  m.store.ZeroGradients();
  for (const data::Batch& b : batches) m.model.TrainMicroBatch(b, scale, sums);
  const double coefficient =
      m.model.config().output_router_logits ? m.model.config().router_aux_loss_coef : 0;
  return sums.weighted_nll.item() / weights + coefficient * sums.aux_loss.item();
}

std::vector<Tensor> Gradients(const LocalMixtral& m) {
  std::vector<Tensor> grads;
  for (const auto& p : m.store.parameters()) grads.push_back(p.grad.Clone());
  return grads;
}

// Central differences of the whole model in fp64. Truncation is O(h²) of a smooth loss with
// derivatives of order one, rounding is O(u/h): h = 1e-5 gives 1e-10 and 2e-11; 1e-7 leaves room
// for the third derivative.
void CheckModelGradient(const MixtralConfig& config) {
  LocalMixtral m(ops::Context(), config, DType::kF64);
  m.store.Initialize(kSeed, config.initializer_range);
  const std::vector<data::Batch> batches = {MakeBatch({5, 1, 9}, config.vocab_size)};
  Loss(m, batches);
  const std::vector<Tensor> grads = Gradients(m);
  constexpr double kStep = 1e-5;
  for (std::size_t p = 0; p < grads.size(); ++p) {
    auto& parameter = m.store.parameters()[p];
    const auto values = parameter.master.span<double>();
    const std::size_t stride = std::max<std::size_t>(1, values.size() / 12);
    for (std::size_t i = 0; i < values.size(); i += stride) {
      const double x = values[i];
      values[i] = x + kStep;
      const double up = Loss(m, batches);
      values[i] = x - kStep;
      const double down = Loss(m, batches);
      values[i] = x;
      EXPECT_NEAR((up - down) / (2 * kStep), grads[p].span<double>()[i], 1e-7)
          << parameter.spec.name << " element " << i;
    }
  }
}

TEST(Mixtral, GradientByCentralDifferences) {
  CheckModelGradient(TinyConfig());
}

TEST(Mixtral, GradientByCentralDifferencesPerSequenceAuxiliaryLoss) {
  MixtralConfig c = TinyConfig();
  c.aux_scope = AuxScope::kSequence;
  CheckModelGradient(c);
}

TEST(Mixtral, GradientByCentralDifferencesTiedWindowTop1) {
  MixtralConfig c = TinyConfig();
  c.tie_word_embeddings = true;
  c.sliding_window = 3;
  c.num_experts_per_tok = 1;
  c.head_dim = 6;
  CheckModelGradient(c);
}

// Two micro-batches give the gradients of one batch: in fp64 the orders of summation differ by
// roundings only.
void ExpectSplitInvariant(const MixtralConfig& config) {
  LocalMixtral m(ops::Context(), config, DType::kF64);
  m.store.Initialize(kSeed, config.initializer_range);
  const double whole = Loss(m, {MakeBatch({6, 3, 7, 2}, config.vocab_size)});
  const std::vector<Tensor> expected = Gradients(m);
  const double split =
      Loss(m, {MakeBatch({6, 3}, config.vocab_size), MakeBatch({7, 2}, config.vocab_size, 9)});
  EXPECT_NEAR(whole, split, 1e-13);
  const std::vector<Tensor> got = Gradients(m);
  for (std::size_t p = 0; p < got.size(); ++p) {
    const auto c = check::CompareToMaximum(m.store.parameters()[p].spec.name, got[p], expected[p],
                                           check::Gamma(1 << 12, DType::kF64));
    EXPECT_TRUE(c.ok) << c.message;
  }
}

TEST(Mixtral, AccumulationEqualsOneBatchWithoutAuxiliaryLoss) {
  MixtralConfig c = TinyConfig();
  c.output_router_logits = false;
  ExpectSplitInvariant(c);
}

TEST(Mixtral, AccumulationEqualsOneBatchWithSequenceAuxiliaryLoss) {
  MixtralConfig c = TinyConfig();
  c.aux_scope = AuxScope::kSequence;
  ExpectSplitInvariant(c);
}

// With the reference implementation every row is computed alone, so that the bits are the same;
// sums over rows meet added zeros only.
TEST(Mixtral, PaddedTailChangesNothing) {
  const MixtralConfig c = TinyConfig();
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    LocalMixtral m(ops::Context().WithImpl("ref"), c, dtype);
    m.store.Initialize(kSeed, c.initializer_range);
    const double plain = Loss(m, {MakeBatch({6, 9}, c.vocab_size)});
    const std::vector<Tensor> expected = Gradients(m);
    const double padded = Loss(m, {MakeBatch({6, 9}, c.vocab_size, 0, 5)});
    EXPECT_EQ(plain, padded);
    const std::vector<Tensor> got = Gradients(m);
    for (std::size_t p = 0; p < got.size(); ++p) {
      const auto cmp = check::Compare(m.store.parameters()[p].spec.name, got[p], expected[p], 0.0);
      EXPECT_TRUE(cmp.ok) << Name(dtype) << " " << cmp.message;
    }
  }
}

TEST(Mixtral, PackingDoesNotMixSequences) {
  const MixtralConfig c = TinyConfig();
  LocalMixtral m(ops::Context(), c, DType::kF64);
  m.store.Initialize(kSeed, c.initializer_range);
  const Tensor packed = m.model.Evaluate(MakeBatch({6, 9}, c.vocab_size));
  const Tensor first = m.model.Evaluate(MakeBatch({6}, c.vocab_size));
  const Tensor second = m.model.Evaluate(MakeBatch({9}, c.vocab_size, 6));
  EXPECT_TRUE(check::Compare("first", packed.Slice(0, 0, 6), first, 1e-13).ok);
  EXPECT_TRUE(check::Compare("second", packed.Slice(0, 6, 9), second, 1e-13).ok);
}

TEST(Mixtral, SecondBackwardNan) {
  MixtralConfig c = TinyConfig();
  LocalMixtral m(ops::Context(), c, DType::kF32);
  m.store.Initialize(kSeed, c.initializer_range);
  std::vector<Tensor> first;
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(std::isfinite(Loss(m, {MakeBatch({16, 16, 3}, c.vocab_size)})));
    const std::vector<Tensor> grads = Gradients(m);
    for (std::size_t p = 0; p < grads.size(); ++p) {
      if (step == 0) {
        first.push_back(grads[p]);
      } else {
        const auto cmp =
            check::CompareBitwise(m.store.parameters()[p].spec.name, grads[p], first[p]);
        EXPECT_TRUE(cmp.ok) << cmp.message;
      }
    }
  }
}

TEST(Mixtral, InitialWeightsDependOnSeedAndNameAlone) {
  MixtralConfig c = TinyConfig();
  LocalMixtral a(ops::Context(), c, DType::kF32);
  a.store.Initialize(kSeed, 0.02);
  c.num_hidden_layers = 1;
  LocalMixtral b(ops::Context(), c, DType::kBF16);
  b.store.Initialize(kSeed, 0.02);
  for (const auto& p : b.store.parameters()) {
    const auto* other = a.store.Find(p.spec.name);
    ASSERT_NE(other, nullptr);
    EXPECT_TRUE(check::CompareBitwise(p.spec.name, p.master, other->master).ok);
  }
  // A shard draws its own part of the global tensor: trap rank-seeded-experts.
  const auto* experts = a.store.Find("model.layers.0.mlp.experts.down_proj");
  const std::int64_t per_expert = experts->master.numel() / c.num_local_experts;
  const Tensor shard = Tensor::Empty({per_expert}, DType::kF32);
  nn::DrawNormal(kSeed, experts->spec.name, 0.02, 2 * per_expert, shard);
  EXPECT_TRUE(
      check::CompareBitwise("expert 2", shard, experts->master.Select(2).Reshape({per_expert})).ok);
}

TEST(Mixtral, SequenceLongerThanTheModelIsRefused) {
  const MixtralConfig c = TinyConfig();
  LocalMixtral m(ops::Context(), c, DType::kF32);
  m.store.Initialize(kSeed, c.initializer_range);
  EXPECT_THROW(m.model.Evaluate(MakeBatch({17}, c.vocab_size)), Error);
}

}  // namespace
}  // namespace cistron::model
