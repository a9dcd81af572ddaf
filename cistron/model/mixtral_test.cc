#include "cistron/model/mixtral.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/model/tiny_mixtral.h"

namespace cistron::model {
namespace {

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
