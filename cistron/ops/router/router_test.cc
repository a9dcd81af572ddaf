#include "cistron/ops/router/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/router/router_cases.h"
#include "cistron/testing/golden_file.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::ForEachImplementation;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const testing::GoldenFile& Golden(int which) {
  static const testing::GoldenFile first(std::string(CISTRON_SOURCE_DIR) +
                                         "/tests/golden/numerics.safetensors");
  static const testing::GoldenFile second(std::string(CISTRON_SOURCE_DIR) +
                                          "/tests/golden/numerics2.safetensors");
  return which == 1 ? first : second;
}

// Outputs of a forward pass, poisoned, with a tail beyond every tensor.
struct Forward {
  RouterOutputs out;
  std::vector<Tensor> tails;

  Forward(const Context& ctx, const RouterConfig& config, const Tensor& logits,
          const Tensor& bias = {}, const Tensor& mask = {}, const PackedSequences& scopes = {}) {
    const std::int64_t tokens = logits.dim(0), experts = config.num_experts;
    const std::int64_t rows = scopes.cu_seqlens ? scopes.num_sequences() : 1;
    out.experts = Padded({tokens, config.top_k}, DType::kI32);
    out.probs = Padded({tokens, config.top_k}, ComputeType(logits.dtype()));
    out.counts = Padded({rows, experts}, DType::kI64);
    out.score_sums = Padded({rows, experts}, DType::kF64);
    out.z_sums = Padded({rows}, DType::kF64);
    out.nonfinite_tokens = Tensor::Empty({}, DType::kI64);
    FillPoison(out.nonfinite_tokens);
    RouterForward(ctx, config, logits, bias, mask, scopes, out);
    for (const Tensor& tail : tails) EXPECT_TRUE(testing::IsPoisoned(tail));
  }
  std::int64_t nonfinite() const { return *out.nonfinite_tokens.data<std::int64_t>(); }
  std::vector<std::int32_t> ExpertsOf(std::int64_t t) const {
    const std::int32_t* row = out.experts.data<std::int32_t>() + t * out.experts.dim(1);
    return {row, row + out.experts.dim(1)};
  }

 private:
  Tensor Padded(const Shape& shape, DType dtype) {
    testing::PaddedTensor padded = testing::MakePadded(shape, dtype, 2);
    tails.push_back(padded.tail);
    return padded.used;
  }
};

template <class F>
void ForEachRouter(DType dtype, const RouterConfig& config, F&& f) {
  ForEachImplementation(RouterImpls(), RouterProblem{dtype, config, 1}, f);
}

Tensor Matrix(std::int64_t rows, const std::vector<float>& values) {
  return Tensor::FromSpan<float>({rows, static_cast<std::int64_t>(values.size()) / rows}, values);
}

// Error of a probability in the compute type: the exponentials, their sum of at most E terms and
// the division. The exponent's argument errs by one rounding of at most `range`.
double ProbabilityBound(const RouterConfig& config, DType compute, double range = 32) {
  return check::Gamma(2 * config.num_experts + 8, compute) + range * check::UnitRoundoff(compute);
}

// --- golden values
// -----------------------------------------------------------------------------------

TEST(RouterGolden, ForwardAndStatistics) {
  for (const auto& problem :
       {std::pair<std::string, std::int64_t>{"33x16k4", 4}, {"64x8k2", 2}, {"7x128k8", 8}}) {
    const std::string& shape = problem.first;
    const std::int64_t top_k = problem.second;
    SCOPED_TRACE(shape);
    const auto get = [&](const std::string& key) -> const Tensor& {
      return Golden(1).Get("router." + shape + "." + key);
    };
    const Tensor& logits = get("in.logits");
    const double tokens = static_cast<double>(logits.dim(0));
    const std::int64_t experts = logits.dim(1);
    RouterConfig config{.num_experts = experts, .top_k = top_k};
    for (const auto& [score, key] :
         {std::pair{ScoreFunction::kSoftmaxBeforeTopK, std::string("softmax_pre.probs")},
          {ScoreFunction::kSoftmaxAfterTopK, std::string("softmax_post.probs")}}) {
      config.score = score;
      ForEachRouter(DType::kF32, config, [&, &probs = key](const Context& ctx) {
        const Forward f(ctx, config, logits);
        EXPECT_TRUE(
            Agrees(check::CompareBitwise("experts", f.out.experts, get("softmax.topk_experts"))));
        EXPECT_TRUE(Agrees(check::CompareToMaximum(probs, f.out.probs, get(probs),
                                                   ProbabilityBound(config, DType::kF32))));
        EXPECT_TRUE(Agrees(check::CompareBitwise("counts", f.out.counts.Reshape({experts}),
                                                 get("tokens_per_expert"))));
        double aux = 0;
        for (std::int64_t e = 0; e < experts; ++e) {
          aux += ElementAsDouble(f.out.counts, e) * ElementAsDouble(f.out.score_sums, e) / tokens;
        }
        aux *= static_cast<double>(experts) / (static_cast<double>(top_k) * tokens);
        const double bound = ProbabilityBound(config, DType::kF32);
        EXPECT_NEAR(aux, get("aux_loss_unit").item(), bound * aux);
        EXPECT_NEAR(ElementAsDouble(f.out.z_sums, 0) / tokens, get("z_loss_unit").item(),
                    2 * bound * get("z_loss_unit").item());
        EXPECT_EQ(f.nonfinite(), 0);
      });
    }
    config.score = ScoreFunction::kSigmoid;
    ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
      const Forward f(ctx, config, logits, get("in.expert_bias"));
      EXPECT_TRUE(Agrees(
          check::CompareBitwise("experts", f.out.experts, get("sigmoid_bias.topk_experts"))));
      EXPECT_TRUE(Agrees(check::CompareToMaximum("probs", f.out.probs, get("sigmoid_bias.probs"),
                                                 ProbabilityBound(config, DType::kF32))));
    });
  }
}

TEST(RouterGolden, EdgesChooseOnRawLogits) {
  const Tensor& logits = Golden(2).Get("router_edge.24x16.in.logits");
  const Tensor& expected = Golden(2).Get("router_edge.24x16.k4.topk_experts");
  RouterConfig config{.num_experts = 16, .top_k = 4};
  for (const ScoreFunction score :
       {ScoreFunction::kSoftmaxBeforeTopK, ScoreFunction::kSoftmaxAfterTopK}) {
    config.score = score;
    ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
      EXPECT_TRUE(Agrees(
          check::CompareBitwise("experts", Forward(ctx, config, logits).out.experts, expected)));
    });
  }
}

TEST(RouterGolden, Groups) {
  const Tensor& logits = Golden(2).Get("router_group.40x32.in.logits");
  const Tensor& bias = Golden(2).Get("router_group.40x32.in.expert_bias");
  RouterConfig grouped{.score = ScoreFunction::kSigmoid,
                       .num_experts = 32,
                       .top_k = 8,
                       .num_groups = 8,
                       .groups_kept = 4};
  RouterConfig single{.score = ScoreFunction::kSigmoid, .num_experts = 32, .top_k = 1};
  for (const auto& [config, key] :
       {std::pair{grouped, std::string("groups8kept4.k8")}, {single, std::string("k1")}}) {
    ForEachRouter(DType::kF32, config, [&, &c = config, &name = key](const Context& ctx) {
      const Forward f(ctx, c, logits, bias);
      EXPECT_TRUE(Agrees(
          check::CompareBitwise("experts", f.out.experts,
                                Golden(2).Get("router_group.40x32." + name + ".topk_experts"))));
      EXPECT_TRUE(Agrees(check::CompareToMaximum(
          "probs", f.out.probs, Golden(2).Get("router_group.40x32." + name + ".probs"),
          ProbabilityBound(c, DType::kF32))));
    });
  }
}

TEST(RouterGolden, Gradients) {
  const auto get = [](const std::string& key) -> const Tensor& {
    return Golden(2).Get("router_grad.40x32." + key);
  };
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Tensor logits = ConvertTo(get("in.logits"), dtype);
    const Tensor dprobs = ConvertTo(get("in.dprobs"), dtype);
    const Tensor dlogits = Tensor::Empty({40, 32}, dtype);
    RouterConfig config{.num_experts = 32, .top_k = 4};
    // The largest gradient is of order 1 while cancelling terms are no larger than Σ|dprobs|·p.
    const double bound = 4 * ProbabilityBound(config, dtype);
    for (const auto& [score, key] :
         {std::pair{ScoreFunction::kSoftmaxBeforeTopK, std::string("softmax_pre")},
          {ScoreFunction::kSoftmaxAfterTopK, std::string("softmax_post")},
          {ScoreFunction::kSigmoid, std::string("sigmoid")}}) {
      config.score = score;
      ForEachRouter(dtype, config, [&, &name = key](const Context& ctx) {
        const Forward f(ctx, config, logits);
        FillPoison(dlogits);
        RouterBackward(ctx, config, dprobs, logits, f.out.experts, {}, {}, {}, {}, Write(dlogits));
        EXPECT_TRUE(
            Agrees(check::CompareToMaximum(name, dlogits, get("k4." + name + ".dlogits"), bound)));
      });
    }
    config.score = ScoreFunction::kSoftmaxAfterTopK;
    ForEachRouter(dtype, config, [&](const Context& ctx) {
      const Forward f(ctx, config, logits);
      // aux = E/(K·T) Σ count·score_sum/T;  z = z_sum / T
      const Tensor aux_grad = Tensor::Empty({1, 32}, DType::kF64);
      for (std::int64_t e = 0; e < 32; ++e) {
        aux_grad.data<double>()[e] = 32.0 / (4.0 * 40.0) * ElementAsDouble(f.out.counts, e) / 40.0;
      }
      const Tensor z_grad = Tensor::Empty({1}, DType::kF64);
      *z_grad.data<double>() = 1.0 / 40.0;
      RouterBackward(ctx, config, {}, logits, {}, {}, {}, aux_grad, {}, Write(dlogits));
      // Differences count − mean cancel up to the spread of the counts.
      EXPECT_TRUE(Agrees(
          check::CompareToMaximum("aux", dlogits, get("k4.aux_loss_unit.dlogits"), 4 * bound)));
      RouterBackward(ctx, config, {}, logits, {}, {}, {}, {}, z_grad, Write(dlogits));
      EXPECT_TRUE(Agrees(check::CompareToMaximum("z", dlogits, get("z_loss_unit.dlogits"), bound)));
    });
  }
}

// --- choice
// --------------------------------------------------------------------------------------------

TEST(Router, TiesGoToTheLowerExpertAndZeroHasNoSign) {
  const RouterConfig config{.num_experts = 6, .top_k = 4};
  ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
    const Forward f(ctx, config,
                    Matrix(3, {1, 1, 1, 1, 1, 1,          //
                               -0.0f, 0, 2, 0, -0.0f, 2,  //
                               -kInf, 3, -kInf, 3, -kInf, -kInf}));
    EXPECT_EQ(f.ExpertsOf(0), (std::vector<std::int32_t>{0, 1, 2, 3}));
    EXPECT_EQ(f.ExpertsOf(1), (std::vector<std::int32_t>{2, 5, 0, 1}));
    EXPECT_EQ(f.ExpertsOf(2), (std::vector<std::int32_t>{1, 3, 0, 2}));
    EXPECT_EQ(f.nonfinite(), 1);
    EXPECT_EQ(ElementAsDouble(f.out.probs, 3), 0.25);
    EXPECT_EQ(ElementAsDouble(f.out.probs, 8), 0.5);
    EXPECT_EQ(ElementAsDouble(f.out.probs, 10), 0.0);
  });
}

// Experts that are given are kept, with the probabilities of their logits; the reference alone
// takes them.
TEST(Router, GivenExperts) {
  const RouterConfig config{.num_experts = 4, .top_k = 2, .given_experts = true};
  const Tensor logits = Matrix(1, {1, 3, 2, 0});
  const Tensor experts = Tensor::FromSpan<std::int32_t>({1, 2}, std::vector<std::int32_t>{1, 3});
  const RouterOutputs out{.experts = experts,
                          .probs = Tensor::Empty({1, 2}, DType::kF32),
                          .counts = Tensor::Empty({1, 4}, DType::kI64)};
  const auto forward = [&](const char* impl) {
    RouterForward(Context().WithImpl(impl), config, logits, {}, {}, {}, out);
  };
  forward("ref");
  EXPECT_EQ(experts.data<std::int32_t>()[0], 1);
  EXPECT_EQ(experts.data<std::int32_t>()[1], 3);
  const double p = 1 / (1 + std::exp(-3.0));
  EXPECT_NEAR(ElementAsDouble(out.probs, 0), p, 1e-6);
  EXPECT_NEAR(ElementAsDouble(out.probs, 1), 1 - p, 1e-6);
  EXPECT_EQ(out.counts.data<std::int64_t>()[3], 1);
  EXPECT_EQ(out.counts.data<std::int64_t>()[2], 0);
  EXPECT_THROW(forward("cpu"), Error);
  experts.data<std::int32_t>()[1] = 4;
  EXPECT_THROW(forward("ref"), Error);
}

// nan-logits: K distinct experts of the range, and the tokens are counted.
TEST(Router, NanLogits) {
  for (const ScoreFunction score : {ScoreFunction::kSoftmaxBeforeTopK,
                                    ScoreFunction::kSoftmaxAfterTopK, ScoreFunction::kSigmoid}) {
    for (const std::int64_t experts : {1, 5, 8, 33, 512}) {
      const std::int64_t k = std::min<std::int64_t>(experts, 32), tokens = 21;
      const RouterConfig config{.score = score, .num_experts = experts, .top_k = k};
      const Tensor logits = testing::Normal({tokens, experts}, DType::kF32, "logits");
      float* l = logits.data<float>();
      std::fill(l, l + experts, kNaN);
      std::fill(l + experts, l + 2 * experts, -kInf);
      std::fill(l + 2 * experts, l + 3 * experts, kInf);
      l[3 * experts] = kNaN;
      l[5 * experts + experts - 1] = kInf;
      for (std::int64_t e = 0; e < experts; ++e) l[4 * experts + e] = e % 2 ? kNaN : -kInf;
      ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
        const Forward f(ctx, config, logits);
        EXPECT_EQ(f.nonfinite(), 6);
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::vector<std::int32_t> chosen = f.ExpertsOf(t);
          EXPECT_EQ(std::set(chosen.begin(), chosen.end()).size(), chosen.size()) << "token " << t;
          for (const std::int32_t e : chosen) EXPECT_TRUE(e >= 0 && e < experts);
        }
        if (experts > 1) {
          // NaN after everything else, −inf included.
          EXPECT_NE(f.ExpertsOf(3)[0], 0);
          EXPECT_EQ(f.ExpertsOf(4)[0], 0);
          EXPECT_EQ(f.ExpertsOf(0)[0], 0);
        }
      });
    }
  }
}

// bias-cancels: with a bias of 10^6 the sum s + b keeps four bits of s; the probability keeps all.
TEST(Router, BiasCancels) {
  const RouterConfig config{
      .score = ScoreFunction::kSigmoid, .num_experts = 4, .top_k = 2, .normalize = false};
  const Tensor logits = Matrix(1, {0.3f, -1.0f, 0.5f, 2.0f});
  const Tensor bias = Tensor::FromSpan<float>({4}, std::vector<float>{1e6f, 1e6f, 0, 0});
  ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
    const Forward f(ctx, config, logits, bias);
    EXPECT_EQ(f.ExpertsOf(0), (std::vector<std::int32_t>{0, 1}));
    const double bound = ProbabilityBound(config, DType::kF32);
    EXPECT_NEAR(ElementAsDouble(f.out.probs, 0), 1 / (1 + std::exp(-0.3)), bound);
    EXPECT_NEAR(ElementAsDouble(f.out.probs, 1), 1 / (1 + std::exp(1.0)), bound);
  });
}

std::string Describe(const RouterCase& v) {
  return fmt::format("score {} E {} K {} groups {}/{} normalize {} T {}",
                     static_cast<int>(v.config.score), v.config.num_experts, v.config.top_k,
                     v.config.groups_kept, v.config.num_groups, v.config.normalize, v.tokens);
}

Tensor BiasFor(const RouterConfig& config, DType dtype) {
  if (config.score != ScoreFunction::kSigmoid) return {};
  return testing::Normal({config.num_experts}, dtype, "bias", 0.3);
}

// Every implementation against the reference: the same experts and counts bit for bit,
// probabilities and statistics within rounding.
TEST(Router, ImplementationsAgree) {
  for (const RouterCase& v : RouterCases()) {
    SCOPED_TRACE(Describe(v));
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor logits = testing::Normal({v.tokens, v.config.num_experts}, dtype, "logits", 2.0);
      const Tensor bias = BiasFor(v.config, DType::kF32);
      const Tensor mask = Tensor::Empty({v.tokens}, DType::kU8);
      testing::FillIntegers(mask, "mask", 0, 4);  // three in four are routed
      const std::int64_t lengths[] = {v.tokens / 3, 0, v.tokens / 2};
      const PackedSequences packed = PackedFromLengths(lengths, v.tokens);
      for (const PackedSequences& scopes : {PackedSequences{}, packed}) {
        const Forward ref(Context().WithImpl("ref"), v.config, logits, bias, mask, scopes);
        ForEachRouter(dtype, v.config, [&](const Context& ctx) {
          const Forward f(ctx, v.config, logits, bias, mask, scopes);
          EXPECT_TRUE(Agrees(check::CompareBitwise("experts", f.out.experts, ref.out.experts)));
          EXPECT_TRUE(Agrees(check::CompareBitwise("counts", f.out.counts, ref.out.counts)));
          const double bound = 2 * ProbabilityBound(v.config, DType::kF32);
          EXPECT_TRUE(Agrees(check::Compare("probs", f.out.probs, ref.out.probs,
                                            bound * v.config.routed_scaling)));
          EXPECT_TRUE(Agrees(check::Compare("score_sums", f.out.score_sums, ref.out.score_sums,
                                            bound * static_cast<double>(v.tokens))));
          EXPECT_TRUE(
              Agrees(check::CompareToMaximum("z_sums", f.out.z_sums, ref.out.z_sums, 2 * bound)));
          EXPECT_EQ(f.nonfinite(), 0);
        });
      }
    }
  }
}

// --- gradients
// -----------------------------------------------------------------------------------------

struct Upstream {
  Tensor dprobs, aux_grad, z_grad;
};

Upstream MakeUpstream(const RouterCase& v, DType compute, std::int64_t rows) {
  return {testing::Normal({v.tokens, v.config.top_k}, compute, "dprobs"),
          testing::Normal({rows, v.config.num_experts}, DType::kF64, "aux_grad"),
          testing::Normal({rows}, DType::kF64, "z_grad", 0.1)};
}

// The function of which RouterBackward is the gradient, for a fixed choice of experts.
double Objective(const Forward& f, const Upstream& up) {
  double sum = 0;
  const auto add = [&](const Tensor& a, const Tensor& b) {
    for (std::int64_t i = 0; i < a.numel(); ++i)
      sum += ElementAsDouble(a, i) * ElementAsDouble(b, i);
  };
  add(f.out.probs, up.dprobs);
  add(f.out.score_sums, up.aux_grad);
  add(f.out.z_sums, up.z_grad);
  return sum;
}

TEST(RouterBackward, CentralDifferences) {
  for (RouterCase v : RouterCases()) {
    v.tokens = std::min<std::int64_t>(v.tokens, 7);
    SCOPED_TRACE(Describe(v));
    const std::int64_t experts = v.config.num_experts;
    const Tensor logits = testing::Normal({v.tokens, experts}, DType::kF64, "logits");
    const Tensor bias = BiasFor(v.config, DType::kF64);
    const Tensor mask = Tensor::Empty({v.tokens}, DType::kU8);
    for (std::int64_t t = 0; t < v.tokens; ++t) mask.data<std::uint8_t>()[t] = t != 1;
    const std::int64_t lengths[] = {v.tokens / 3, v.tokens / 2};
    const PackedSequences scopes = PackedFromLengths(lengths, v.tokens);
    const Context ctx = Context().WithImpl("ref");
    const Forward start(ctx, v.config, logits, bias, mask, scopes);
    const Upstream up = MakeUpstream(v, DType::kF64, 2);
    const Tensor dlogits = Tensor::Empty(logits.shape(), DType::kF64);
    FillPoison(dlogits);
    RouterBackward(ctx, v.config, up.dprobs, logits, start.out.experts, mask, scopes, up.aux_grad,
                   up.z_grad, Write(dlogits));
    double* l = logits.data<double>();
    const std::int64_t stride = std::max<std::int64_t>(1, logits.numel() / 50);
    for (std::int64_t i = 0; i < logits.numel(); i += stride) {
      const double before = l[i], h = 0x1p-14;
      l[i] = before + h;
      const Forward above(ctx, v.config, logits, bias, mask, scopes);
      l[i] = before - h;
      const Forward below(ctx, v.config, logits, bias, mask, scopes);
      l[i] = before;
      // A change of the choice is a jump, not a slope.
      if (!check::CompareBitwise("experts", above.out.experts, start.out.experts) ||
          !check::CompareBitwise("experts", below.out.experts, start.out.experts)) {
        continue;
      }
      const double slope = (Objective(above, up) - Objective(below, up)) / (2 * h);
      // Truncation: third derivatives of this objective stay below ~32, times h²/6. Rounding: the
      // terms of the objective sum to less than 2^12 in magnitude, times 2^-53 and E roundings over
      // 2h.
      const double bound = 32 * h * h / 6 + 0x1p12 * 0x1p-53 * static_cast<double>(experts) / h;
      EXPECT_NEAR(ElementAsDouble(dlogits, i), slope, bound) << "logit " << i;
    }
  }
}

TEST(RouterBackward, ImplementationsAgree) {
  for (const RouterCase& v : RouterCases()) {
    SCOPED_TRACE(Describe(v));
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Shape shape{v.tokens, v.config.num_experts};
      const Tensor logits = testing::Normal(shape, dtype, "logits", 2.0);
      const Tensor mask = Tensor::Empty({v.tokens}, DType::kU8);
      testing::FillIntegers(mask, "mask", 0, 4);
      const std::int64_t lengths[] = {v.tokens / 3, 0, v.tokens / 2};
      for (const bool by_sequence : {false, true}) {
        const PackedSequences scopes =
            by_sequence ? PackedFromLengths(lengths, v.tokens) : PackedSequences{};
        const Upstream up = MakeUpstream(v, DType::kF32, by_sequence ? 3 : 1);
        const Context ref_ctx = Context().WithImpl("ref");
        const Forward f(ref_ctx, v.config, logits, BiasFor(v.config, DType::kF32), mask, scopes);
        // The reference in fp64 on the same values; its choice is that of f.
        const Tensor exact = Tensor::Empty(shape, DType::kF64);
        RouterBackward(ref_ctx, v.config, ConvertTo(up.dprobs, DType::kF64),
                       ConvertTo(logits, DType::kF64), f.out.experts, mask, scopes, up.aux_grad,
                       up.z_grad, Write(exact));
        const Tensor start = testing::Normal(shape, dtype, "start");
        ForEachRouter(dtype, v.config, [&](const Context& ctx) {
          const testing::PaddedTensor written = testing::MakePadded(shape, dtype, 2);
          const Tensor accumulated = start.Clone();
          RouterBackward(ctx, v.config, up.dprobs, logits, f.out.experts, mask, scopes, up.aux_grad,
                         up.z_grad, Write(written.used));
          RouterBackward(ctx, v.config, up.dprobs, logits, f.out.experts, mask, scopes, up.aux_grad,
                         up.z_grad, Accumulate(accumulated));
          EXPECT_TRUE(testing::IsPoisoned(written.tail));
          // Each term is a product of values below 8 (upstream) and probabilities with the error of
          // ProbabilityBound; K + E of them are summed in the inner products.
          const double terms = 8 * v.config.routed_scaling * 4;
          const double error = terms * ProbabilityBound(v.config, DType::kF32);
          const double rounding = check::UnitRoundoff(dtype);
          EXPECT_TRUE(Agrees(check::Compare("dlogits", written.used, exact, [&](std::int64_t i) {
            return error + rounding * std::abs(ElementAsDouble(exact, i));
          })));
          const Tensor sum = Tensor::Empty(shape, DType::kF64);
          for (std::int64_t i = 0; i < sum.numel(); ++i) {
            sum.data<double>()[i] = ElementAsDouble(start, i) + ElementAsDouble(exact, i);
          }
          EXPECT_TRUE(Agrees(check::Compare("+= dlogits", accumulated, sum, [&](std::int64_t i) {
            return error + (rounding + check::UnitRoundoff(DType::kF32)) *
                               (std::abs(sum.data<double>()[i]) + error);
          })));
          for (std::int64_t t = 0; t < v.tokens; ++t) {
            if (mask.data<std::uint8_t>()[t] != 0) continue;
            EXPECT_TRUE(
                Agrees(check::CompareBitwise("masked", accumulated.Select(t), start.Select(t))));
            for (std::int64_t e = 0; e < v.config.num_experts; ++e) {
              EXPECT_EQ(ElementAsDouble(written.used.Select(t), e), 0);
            }
          }
        });
      }
    }
  }
}

// --- statistics
// ----------------------------------------------------------------------------------------

TEST(Router, SequenceStatisticsAddUpToTheBatch) {
  const RouterConfig config{.num_experts = 8, .top_k = 2};
  const Tensor logits = testing::Normal({600, 8}, DType::kF32, "logits");
  const std::int64_t lengths[] = {1, 0, 299, 300};
  ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
    const Forward batch(ctx, config, logits);
    const Forward rows(ctx, config, logits, {}, {}, PackedFromLengths(lengths));
    double z = 0;
    for (std::int64_t r = 0; r < 4; ++r) z += ElementAsDouble(rows.out.z_sums, r);
    const double bound = 2 * check::Gamma(600, DType::kF64);
    EXPECT_NEAR(z, ElementAsDouble(batch.out.z_sums, 0), bound * z);
    for (std::int64_t e = 0; e < 8; ++e) {
      double count = 0, score = 0;
      for (std::int64_t r = 0; r < 4; ++r) {
        count += ElementAsDouble(rows.out.counts, r * 8 + e);
        score += ElementAsDouble(rows.out.score_sums, r * 8 + e);
      }
      EXPECT_EQ(count, ElementAsDouble(batch.out.counts, e));
      EXPECT_NEAR(score, ElementAsDouble(batch.out.score_sums, e), bound * score);
    }
    EXPECT_EQ(ElementAsDouble(rows.out.z_sums, 1), 0);
  });
}

// Padding counts nowhere: masked rows may hold anything.
TEST(Router, MaskedTokensCountNowhere) {
  const RouterConfig config{.num_experts = 8, .top_k = 2};
  const Tensor logits = testing::Normal({50, 8}, DType::kF32, "logits");
  const Tensor padded = testing::Pad(logits, 14).whole;  // NaN rows
  const Tensor mask = Tensor::Zeros({64}, DType::kU8);
  std::fill_n(mask.data<std::uint8_t>(), 50, std::uint8_t{1});
  ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
    const Forward plain(ctx, config, logits), f(ctx, config, padded, {}, mask);
    EXPECT_TRUE(Agrees(check::CompareBitwise("counts", f.out.counts, plain.out.counts)));
    EXPECT_TRUE(
        Agrees(check::CompareBitwise("score_sums", f.out.score_sums, plain.out.score_sums)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("z_sums", f.out.z_sums, plain.out.z_sums)));
    EXPECT_EQ(f.nonfinite(), 0);
    for (std::int64_t t = 50; t < 64; ++t) {
      EXPECT_EQ(f.ExpertsOf(t), (std::vector<std::int32_t>{-1, -1}));
      EXPECT_EQ(ElementAsDouble(f.out.probs, 2 * t), 0);
    }
  });
}

// atomics: the bits depend neither on the run nor on the number of threads.
TEST(Router, Atomics) {
  const RouterConfig config{.num_experts = 8, .top_k = 2};
  const Tensor logits = testing::Normal({3001, 8}, DType::kF32, "logits");
  const std::int64_t lengths[] = {5, 1500, 1400};
  for (const PackedSequences& scopes : {PackedSequences{}, PackedFromLengths(lengths, 3001)}) {
    ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
      const testing::ThreadsForScope single(1);
      const Forward one(ctx, config, logits, {}, {}, scopes);
      for (const int threads : {1, 2, 3, 5}) {
        const testing::ThreadsForScope scope(threads);
        const Forward f(ctx, config, logits, {}, {}, scopes);
        EXPECT_TRUE(Agrees(check::CompareBitwise("experts", f.out.experts, one.out.experts)));
        EXPECT_TRUE(Agrees(check::CompareBitwise("probs", f.out.probs, one.out.probs)));
        EXPECT_TRUE(
            Agrees(check::CompareBitwise("score_sums", f.out.score_sums, one.out.score_sums)));
        EXPECT_TRUE(Agrees(check::CompareBitwise("z_sums", f.out.z_sums, one.out.z_sums)));
      }
    });
  }
}

TEST(Router, NoTokens) {
  const RouterConfig config{.num_experts = 8, .top_k = 2};
  ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
    const Tensor logits = Tensor::Empty({0, 8}, DType::kF32);
    const Forward f(ctx, config, logits);
    for (std::int64_t e = 0; e < 8; ++e) EXPECT_EQ(ElementAsDouble(f.out.counts, e), 0);
    EXPECT_EQ(ElementAsDouble(f.out.z_sums, 0), 0);
    RouterBackward(ctx, config, f.out.probs, logits, f.out.experts, {}, {}, {}, {},
                   Write(logits.Clone()));
  });
}

TEST(Router, LogitsOfAnySizeGiveProbabilities) {
  const RouterConfig config{.num_experts = 4, .top_k = 2};
  ForEachRouter(DType::kF32, config, [&](const Context& ctx) {
    const Forward f(ctx, config, Matrix(2, {3e38f, -3e38f, 3e38f, 0, 1e4f, 1e4f, -1e4f, 0}));
    EXPECT_EQ(f.ExpertsOf(0), (std::vector<std::int32_t>{0, 2}));
    for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(ElementAsDouble(f.out.probs, i), 0.5);
    EXPECT_EQ(f.nonfinite(), 0);
  });
}

TEST(Router, RefusesWrongConfigurations) {
  const Context ctx;
  const auto refuse = [&](const RouterConfig& config) {
    const Tensor logits = Tensor::Zeros({2, config.num_experts}, DType::kF32);
    RouterOutputs out;
    out.experts = Tensor::Empty({2, config.top_k}, DType::kI32);
    out.probs = Tensor::Empty({2, config.top_k}, DType::kF32);
    EXPECT_THROW(RouterForward(ctx, config, logits, {}, {}, {}, out), Error);
  };
  refuse({.num_experts = 4, .top_k = 5});
  refuse({.num_experts = 4, .top_k = 0});
  refuse({.num_experts = 64, .top_k = 33});
  refuse({.num_experts = 513, .top_k = 1});
  refuse({.num_experts = 8, .top_k = 2, .num_groups = 4, .groups_kept = 2});
  const ScoreFunction s = ScoreFunction::kSigmoid;
  refuse({.score = s, .num_experts = 9, .top_k = 2, .num_groups = 4, .groups_kept = 2});
  refuse({.score = s, .num_experts = 8, .top_k = 3, .num_groups = 4, .groups_kept = 2});
  refuse({.score = s, .num_experts = 8, .top_k = 8, .num_groups = 4, .groups_kept = 2});
}

}  // namespace
}  // namespace cistron::ops
