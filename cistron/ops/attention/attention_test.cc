// Attention: every implementation and instruction set against the fp64 reference under derived
// bounds, the reference's gradient against differences, and the promises of attention.h.
#include "cistron/ops/attention/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/attention/attention_cases.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/guarded_allocator.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/instruction_set.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;

// Contiguous copy of a matrix whose rows may be strided.
Tensor Dense(const Tensor& view) {
  const Tensor t = Tensor::Empty(view.shape(), view.dtype());
  const std::size_t size = SizeOf(view.dtype());
  const std::size_t row = static_cast<std::size_t>(view.dim(1)) * size;
  for (std::int64_t i = 0; i < view.dim(0); ++i) {
    std::memcpy(
        static_cast<char*>(t.raw()) + static_cast<std::size_t>(i) * row,
        static_cast<char*>(view.raw()) + static_cast<std::size_t>(i * view.stride(0)) * size, row);
  }
  return t;
}

void CopyInto(const Tensor& dense, const Tensor& view) {
  const std::size_t size = SizeOf(view.dtype());
  for (std::int64_t i = 0; i < dense.dim(0); ++i) {
    std::memcpy(
        static_cast<char*>(view.raw()) + static_cast<std::size_t>(i * view.stride(0)) * size,
        static_cast<char*>(dense.raw()) + static_cast<std::size_t>(i * dense.dim(1)) * size,
        static_cast<std::size_t>(dense.dim(1)) * size);
  }
}

Tensor Abs(const Tensor& f64) {
  const Tensor t = f64.Clone();
  for (double& v : t.span<double>()) v = std::abs(v);
  return t;
}

// Three matrices beside each other in one buffer, as views of one projection; padding rows and
// columns between and behind them are poisoned.
struct Projection {
  Tensor whole, q, k, v;
  std::vector<Tensor> gaps;
};
Projection MakeProjection(const AttentionConfig& c, std::int64_t tokens, DType dtype) {
  constexpr std::int64_t kGap = 3;
  const std::int64_t a = c.num_heads * c.head_dim, b = c.num_kv_heads * c.head_dim;
  Projection p;
  p.whole = Tensor::Empty({tokens, a + 2 * b + 3 * kGap}, dtype);
  FillPoison(p.whole);
  p.q = p.whole.Slice(1, 0, a);
  p.k = p.whole.Slice(1, a + kGap, b);
  p.v = p.whole.Slice(1, a + b + 2 * kGap, b);
  p.gaps = {p.whole.Slice(1, a, kGap), p.whole.Slice(1, a + b + kGap, kGap),
            p.whole.Slice(1, a + 2 * b + 2 * kGap, kGap)};
  return p;
}

// A case with values, and its truth from the fp64 reference on the same values.
struct Problem {
  AttentionConfig config;
  PackedSequences sequences;
  std::int64_t used, tokens;
  DType dtype;
  Projection in;
  Tensor d_o, o, lse;  // o and lse as the forward of this dtype leaves them
  // f64, used rows only
  Tensor q64, k64, v64, do64, o64, lse64;
  Tensor truth_o, truth_lse, truth_dq, truth_dk, truth_dv;
  // Σ p|v|, Σ p|k| by query; Σ p|q|, Σ p|do| by key
  Tensor sum_pv, sum_pk, sum_pq, sum_pdo;
  double score_limit;  // ≥ Σ|q||k|/√D of every pair
  double grad_limit;   // ≥ Σ|v||do| + Σ|do||o| of every pair
  double lse_limit;
  std::int64_t terms;  // longest sum over keys or over queries of a group
};

double LargestRow(const Tensor& f64, std::int64_t dim) {
  double largest = 0;
  const std::span<double> x = f64.span<double>();
  for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(dim)) {
    double squares = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) squares += x[i + d] * x[i + d];
    largest = std::max(largest, std::sqrt(squares));
  }
  return largest;
}

// A dense random matrix whose last `padding` rows are poison, in f64 rounded to `dtype`.
Tensor RandomRows(std::int64_t used, std::int64_t tokens, std::int64_t width, DType dtype,
                  std::string_view name, double std) {
  const Tensor t = Tensor::Empty({tokens, width}, dtype);
  FillPoison(t);
  CopyInto(testing::Normal({used, width}, dtype, name, std), t.Slice(0, 0, used));
  return t;
}

Problem MakeProblem(const AttentionCase& c, DType dtype, double std = 1.0) {
  Problem p;
  p.config = c.config;
  p.dtype = dtype;
  p.used = 0;
  std::int64_t longest = 0;
  for (const std::int64_t n : c.lengths) {
    p.used += n;
    longest = std::max(longest, n);
  }
  p.tokens = p.used + c.padding;
  p.sequences = PackedFromLengths(c.lengths, p.tokens);
  const std::int64_t dim = c.config.head_dim;
  const std::int64_t a = c.config.num_heads * dim, b = c.config.num_kv_heads * dim;
  p.in = MakeProjection(c.config, p.tokens, dtype);
  CopyInto(RandomRows(p.used, p.tokens, a, dtype, c.name + ".q", std), p.in.q);
  CopyInto(RandomRows(p.used, p.tokens, b, dtype, c.name + ".k", std), p.in.k);
  CopyInto(RandomRows(p.used, p.tokens, b, dtype, c.name + ".v", 1.0), p.in.v);
  p.d_o = RandomRows(p.used, p.tokens, a, dtype, c.name + ".do", 1.0);

  const Context ref = Context().WithImpl("ref");
  const auto to64 = [&](const Tensor& t) {
    return ConvertTo(Dense(t.Slice(0, 0, p.used)), DType::kF64);
  };
  const PackedSequences packed = PackedFromLengths(c.lengths);
  const auto empty = [&](std::int64_t w) { return Tensor::Empty({p.used, w}, DType::kF64); };
  p.q64 = to64(p.in.q);
  p.k64 = to64(p.in.k);
  p.v64 = to64(p.in.v);
  p.do64 = to64(p.d_o);
  p.truth_o = empty(a);
  p.truth_lse = Tensor::Empty({c.config.num_heads, p.used}, DType::kF64);
  AttentionForward(ref, p.config, packed, p.q64, p.k64, p.v64, p.truth_lse, Write(p.truth_o));
  p.sum_pv = empty(a);
  AttentionForward(ref, p.config, packed, p.q64, p.k64, Abs(p.v64), {}, Write(p.sum_pv));
  p.sum_pk = empty(a);
  AttentionForward(ref, p.config, packed, p.q64, p.k64, Abs(p.k64), {}, Write(p.sum_pk));

  // What backward is given: o and lse rounded to what a forward stores, and fp64 copies of those.
  p.o = Tensor::Empty({p.tokens, a}, dtype);
  FillPoison(p.o);
  CopyInto(ConvertTo(p.truth_o, dtype), p.o.Slice(0, 0, p.used));
  p.lse = Tensor::Empty({c.config.num_heads, p.tokens}, ComputeType(dtype));
  FillPoison(p.lse);
  CopyInto(ConvertTo(p.truth_lse, ComputeType(dtype)), p.lse.Slice(1, 0, p.used));
  p.o64 = to64(p.o);
  p.lse64 = ConvertTo(Dense(p.lse.Slice(1, 0, p.used)), DType::kF64);
  p.truth_dq = empty(a);
  p.truth_dk = empty(b);
  p.truth_dv = empty(b);
  AttentionBackward(ref, p.config, packed, p.do64, p.q64, p.k64, p.v64, p.o64, p.lse64,
                    Write(p.truth_dq), Write(p.truth_dk), Write(p.truth_dv));
  // dv of a backward with |q|, |do| in the place of do is the sum over queries of p times those.
  const Tensor unused_q = empty(a), unused_k = empty(b);
  p.sum_pq = empty(b);
  AttentionBackward(ref, p.config, packed, Abs(p.q64), p.q64, p.k64, p.v64, p.o64, p.lse64,
                    Write(unused_q), Write(unused_k), Write(p.sum_pq));
  p.sum_pdo = empty(b);
  AttentionBackward(ref, p.config, packed, Abs(p.do64), p.q64, p.k64, p.v64, p.o64, p.lse64,
                    Write(unused_q), Write(unused_k), Write(p.sum_pdo));

  // Σ|x||y| ≤ ‖x‖‖y‖.
  const double largest_do = LargestRow(p.do64, dim);
  p.score_limit =
      LargestRow(p.q64, dim) * LargestRow(p.k64, dim) / std::sqrt(static_cast<double>(dim));
  p.grad_limit = largest_do * (LargestRow(p.v64, dim) + LargestRow(p.o64, dim));
  p.lse_limit = 0;
  for (const double v : p.lse64.span<double>()) p.lse_limit = std::max(p.lse_limit, std::abs(v));
  p.terms = longest * (c.config.num_heads / c.config.num_kv_heads);
  return p;
}

// Relative error of exp(s) for a score s of magnitude ≤ S, n of whose factors are exponentials:
// the product (D + 3 roundings, the scale among them), what is subtracted (two roundings of ≤ 2S
// or of S + |lse|), and 3 units for each exponential.
double ExponentialError(const Problem& p, DType compute, double subtracted, double exponentials) {
  const double u = check::UnitRoundoff(compute);
  const double argument =
      (static_cast<double>(p.config.head_dim) + 3) * p.score_limit + 2 * subtracted;
  return std::expm1(u * (argument + 3 * exponentials) * (1 + 1e-3));
}

double ForwardError(const Problem& p, DType compute) {
  // A running maximum changes at most once a block, and each change is one more exponential.
  const double blocks = static_cast<double>(p.terms) / 64 + 2;
  // Numerator and denominator both err.
  return 2 * (ExponentialError(p, compute, 2 * p.score_limit, 1 + blocks) +
              check::Gamma(p.terms + static_cast<std::int64_t>(blocks) + 3, compute));
}

double BackwardError(const Problem& p, DType compute) {
  return ExponentialError(p, compute, p.score_limit + 2 * p.lse_limit, 1) +
         check::Gamma(p.terms + p.config.head_dim + 6, compute);
}

// |got − truth| ≤ error·scale_i + what the output's own rounding does to `before` + truth.
check::Comparison CompareOutput(const std::string& name, const Tensor& got, const Tensor& truth,
                                const Tensor& sums, double error, DType compute,
                                const Tensor& before = {}) {
  const Tensor dense = Dense(got);
  const Tensor expected = truth.Clone();
  const std::span<double> e = expected.span<double>();
  if (before) {
    for (std::size_t i = 0; i < e.size(); ++i) {
      e[i] += ElementAsDouble(before, static_cast<std::int64_t>(i));
    }
  }
  const double u = (got.dtype() == compute ? 0 : check::UnitRoundoff(got.dtype())) +
                   check::UnitRoundoff(compute);
  const std::span<double> s = sums.span<double>();
  return check::Compare(name, dense, expected, [&](std::int64_t flat) {
    const std::size_t i = static_cast<std::size_t>(flat);
    const double own = error * s[i];
    return own + u * (std::abs(e[i]) + own) + 1e-37;  // subnormal probabilities become 0
  });
}

struct Variant {
  std::string impl;
  std::int64_t target;  // 0: does not matter
  std::string name;
};
std::vector<Variant> Variants() {
  std::vector<Variant> variants = {{"ref", 0, "ref"}};
  for (const std::int64_t target : testing::InstructionSets()) {
    variants.push_back({"cpu", target, "cpu/" + testing::InstructionSetName(target)});
  }
  if (testing::HasCuda()) variants.push_back({"cuda", 0, "cuda"});
  return variants;
}
Context ContextOf(const Variant& variant) {
  return (variant.impl == "cuda" ? testing::CudaContext() : Context()).WithImpl(variant.impl);
}

// Runs f for every case, dtype and variant.
template <class F>
void ForAll(F&& f) {
  for (const AttentionCase& c : AttentionCases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Problem p = MakeProblem(c, dtype);
      for (const Variant& variant : Variants()) {
        SCOPED_TRACE(c.name + " " + std::string(Name(dtype)) + " " + variant.name);
        // The slow baseline once a case: its bf16 conversions are those of norm and rope.
        if (dtype == DType::kBF16 && variant.target == testing::InstructionSets().back()) continue;
        if (variant.target == 0) {
          f(p, ContextOf(variant));
        } else {
          const testing::ScopedInstructionSet scope(variant.target);
          f(p, ContextOf(variant));
        }
      }
    }
  }
}

void ExpectZeroPadding(const Problem& p, const Tensor& out) {
  const Tensor tail = Dense(out.Slice(0, p.used, p.tokens - p.used));
  for (std::int64_t i = 0; i < tail.numel(); ++i) ASSERT_EQ(ElementAsDouble(tail, i), 0.0);
}

TEST(Attention, ForwardAgreesWithFp64) {
  ForAll([](const Problem& p, const Context& ctx) {
    const Projection out = MakeProjection(p.config, p.tokens, p.dtype);
    const Tensor lse = Tensor::Empty({p.config.num_heads, p.tokens}, DType::kF32);
    FillPoison(lse);
    AttentionForward(ctx, p.config, p.sequences, p.in.q, p.in.k, p.in.v, lse, Write(out.q));
    const double error = ForwardError(p, DType::kF32);
    EXPECT_TRUE(Agrees(
        CompareOutput("o", out.q.Slice(0, 0, p.used), p.truth_o, p.sum_pv, error, DType::kF32)));
    const double u = check::UnitRoundoff(DType::kF32);
    EXPECT_TRUE(Agrees(check::Compare("lse", Dense(lse.Slice(1, 0, p.used)), p.truth_lse,
                                      error + 4 * u * (p.score_limit + p.lse_limit + 1))));
    ExpectZeroPadding(p, out.q);
    EXPECT_TRUE(testing::IsPoisoned(Dense(out.gaps[0])));
    EXPECT_TRUE(testing::IsPoisoned(Dense(out.k)));

    // Accumulate, and no lse wanted.
    const Tensor before = testing::Normal(out.q.shape(), p.dtype, "before");
    const Tensor after = before.Clone();
    AttentionForward(ctx, p.config, p.sequences, p.in.q, p.in.k, p.in.v, {}, Accumulate(after));
    EXPECT_TRUE(
        Agrees(CompareOutput("o accumulated", after.Slice(0, 0, p.used), p.truth_o, p.sum_pv, error,
                             DType::kF32, Dense(before.Slice(0, 0, p.used)))));
    EXPECT_TRUE(
        Agrees(check::CompareBitwise("padding", Dense(after.Slice(0, p.used, p.tokens - p.used)),
                                     Dense(before.Slice(0, p.used, p.tokens - p.used)))));
  });
}

TEST(Attention, BackwardAgreesWithFp64) {
  ForAll([](const Problem& p, const Context& ctx) {
    const Projection out = MakeProjection(p.config, p.tokens, p.dtype);
    AttentionBackward(ctx, p.config, p.sequences, p.d_o, p.in.q, p.in.k, p.in.v, p.o, p.lse,
                      Write(out.q), Write(out.k), Write(out.v));
    const double error = BackwardError(p, DType::kF32);
    // ds errs by error·p·(Σ|v||do| + Σ|do||o|)/√D, and dq, dk sum it against k, q.
    const double ds_error =
        error * p.grad_limit / std::sqrt(static_cast<double>(p.config.head_dim)) * 2;
    const auto used = [&](const Tensor& t) { return t.Slice(0, 0, p.used); };
    EXPECT_TRUE(
        Agrees(CompareOutput("dq", used(out.q), p.truth_dq, p.sum_pk, ds_error, DType::kF32)));
    EXPECT_TRUE(
        Agrees(CompareOutput("dk", used(out.k), p.truth_dk, p.sum_pq, ds_error, DType::kF32)));
    EXPECT_TRUE(
        Agrees(CompareOutput("dv", used(out.v), p.truth_dv, p.sum_pdo, error, DType::kF32)));
    for (const Tensor& t : {out.q, out.k, out.v}) ExpectZeroPadding(p, t);
    for (const Tensor& gap : out.gaps) EXPECT_TRUE(testing::IsPoisoned(Dense(gap)));

    const Tensor q_before = testing::Normal(out.q.shape(), p.dtype, "before.q");
    const Tensor k_before = testing::Normal(out.k.shape(), p.dtype, "before.k");
    const Tensor v_before = testing::Normal(out.v.shape(), p.dtype, "before.v");
    const Tensor q = q_before.Clone(), k = k_before.Clone(), v = v_before.Clone();
    AttentionBackward(ctx, p.config, p.sequences, p.d_o, p.in.q, p.in.k, p.in.v, p.o, p.lse,
                      Accumulate(q), Accumulate(k), Accumulate(v));
    EXPECT_TRUE(Agrees(CompareOutput("dq accumulated", used(q), p.truth_dq, p.sum_pk, ds_error,
                                     DType::kF32, Dense(used(q_before)))));
    EXPECT_TRUE(Agrees(CompareOutput("dk accumulated", used(k), p.truth_dk, p.sum_pq, ds_error,
                                     DType::kF32, Dense(used(k_before)))));
    EXPECT_TRUE(Agrees(CompareOutput("dv accumulated", used(v), p.truth_dv, p.sum_pdo, error,
                                     DType::kF32, Dense(used(v_before)))));
    const auto tail = [&](const Tensor& t) { return Dense(t.Slice(0, p.used, p.tokens - p.used)); };
    EXPECT_TRUE(Agrees(check::CompareBitwise("padding", tail(k), tail(k_before))));
  });
}

TEST(Attention, LargeScores) {
  // Scores of several hundred: exp without the maximum would overflow.
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.name);
    const testing::ScopedInstructionSet scope(
        variant.target == 0 ? testing::InstructionSets().front() : variant.target);
    const Problem p = MakeProblem({"large", {150}, 0, {2, 1, 16, 0}}, DType::kF32, 10.0);
    const Tensor o = Tensor::Empty(p.in.q.shape(), p.dtype);
    AttentionForward(ContextOf(variant), p.config, p.sequences, p.in.q, p.in.k, p.in.v, {},
                     Write(o));
    EXPECT_TRUE(Agrees(
        CompareOutput("o", o, p.truth_o, p.sum_pv, ForwardError(p, DType::kF32), DType::kF32)));
  }
}

TEST(Attention, WindowOneReturnsV) {
  for (const Variant& variant : Variants()) {
    const testing::ScopedInstructionSet scope(
        variant.target == 0 ? testing::InstructionSets().front() : variant.target);
    const Problem p = MakeProblem({"identity", {75}, 0, {1, 1, 24, 1}}, DType::kF32);
    const Tensor o = Tensor::Empty(p.in.q.shape(), p.dtype);
    AttentionForward(ContextOf(variant), p.config, p.sequences, p.in.q, p.in.k, p.in.v, {},
                     Write(o));
    EXPECT_TRUE(Agrees(check::CompareBitwise(variant.name, o, Dense(p.in.v))));
  }
}

TEST(Attention, NanInAQueryReachesItsRowOnly) {
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.name);
    const testing::ScopedInstructionSet scope(
        variant.target == 0 ? testing::InstructionSets().front() : variant.target);
    const Problem p = MakeProblem({"nan", {70}, 0, {1, 1, 8, 0}}, DType::kF32);
    const Tensor q = Dense(p.in.q);
    q.data<float>()[40 * 8 + 3] = std::numeric_limits<float>::quiet_NaN();
    const Tensor o = Tensor::Empty(p.in.q.shape(), p.dtype);
    AttentionForward(ContextOf(variant), p.config, p.sequences, q, p.in.k, p.in.v, {}, Write(o));
    for (std::int64_t i = 0; i < o.numel(); ++i) {
      EXPECT_EQ(std::isnan(ElementAsDouble(o, i)), i / 8 == 40) << i;
    }
  }
}

struct Results {
  Tensor o, lse, dq, dk, dv;
};
Results RunAll(const Context& ctx, const Problem& p) {
  Results r{Tensor::Empty(p.in.q.shape(), p.dtype),
            Tensor::Empty({p.config.num_heads, p.tokens}, ComputeType(p.dtype)),
            Tensor::Empty(p.in.q.shape(), p.dtype), Tensor::Empty(p.in.k.shape(), p.dtype),
            Tensor::Empty(p.in.k.shape(), p.dtype)};
  AttentionForward(ctx, p.config, p.sequences, p.in.q, p.in.k, p.in.v, r.lse, Write(r.o));
  AttentionBackward(ctx, p.config, p.sequences, p.d_o, p.in.q, p.in.k, p.in.v, r.o, r.lse,
                    Write(r.dq), Write(r.dk), Write(r.dv));
  return r;
}
void ExpectSame(const Results& a, const Results& b) {
  EXPECT_TRUE(Agrees(check::CompareBitwise("o", a.o, b.o)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("lse", a.lse, b.lse)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("dq", a.dq, b.dq)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("dk", a.dk, b.dk)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("dv", a.dv, b.dv)));
}

// One sequence of one key/value head is one task of whole-sequence backward: with several threads
// dq and dk, dv are made apart. Both ways give the same bits.
TEST(Attention, ThreadsChangeNoBit) {
  for (const AttentionCase& c : {AttentionCase{"one", {260}, 3, {3, 1, 20, 0}},
                                 AttentionCase{"many", {90, 30, 200, 1}, 0, {4, 2, 16, 70}},
                                 // The last query that sees key 95 starts a block of queries.
                                 AttentionCase{"edge", {260}, 0, {1, 1, 8, 34}}}) {
    for (const Variant& variant : Variants()) {
      SCOPED_TRACE(c.name + " " + variant.name);
      const testing::ScopedInstructionSet scope(
          variant.target == 0 ? testing::InstructionSets().front() : variant.target);
      const Problem p = MakeProblem(c, DType::kF32);
      const auto run = [&](int threads) {
        const testing::ThreadsForScope scope_of_threads(threads);
        return RunAll(ContextOf(variant), p);
      };
      const Results one = run(1);
      for (const int threads : {2, 5}) ExpectSame(one, run(threads));
    }
  }
}

// TRAPS atomics, second-backward-nan: the same buffers again and again give the same bits.
TEST(Attention, Atomics) {
  const Problem p = MakeProblem({"repeat", {150, 70}, 4, {4, 2, 32, 0}}, DType::kBF16);
  testing::ForEachImplementation(AttentionImpls(), AttentionProblem{p.dtype, p.config, p.tokens},
                                 [&](const Context& ctx) {
                                   if (ctx.PreferredImpl("attention") == "cudnn_atomics") return;
                                   const Results first = RunAll(ctx, p);
                                   for (int i = 0; i < 5; ++i) ExpectSame(first, RunAll(ctx, p));
                                 });
}

TEST(Attention, SecondBackwardNan) {
  const Problem p = MakeProblem({"steps", {100, 30}, 4, {4, 2, 24, 0}}, DType::kF32);
  const Results first = RunAll(Context(), p);
  const Results again{first.o.Clone(), first.lse.Clone(), first.dq.Clone(), first.dk.Clone(),
                      first.dv.Clone()};
  for (int step = 0; step < 3; ++step) {
    AttentionForward(Context(), p.config, p.sequences, p.in.q, p.in.k, p.in.v, again.lse,
                     Write(again.o));
    AttentionBackward(Context(), p.config, p.sequences, p.d_o, p.in.q, p.in.k, p.in.v, again.o,
                      again.lse, Write(again.dq), Write(again.dk), Write(again.dv));
    ExpectSame(first, again);
  }
}

// TRAPS padded-tail: rows beyond the last sequence hold NaN in every case of the table; here all
// scratch memory does too, and has guards.
TEST(Attention, PaddedTail) {
  for (const std::int64_t target : testing::InstructionSets()) {
    const testing::ScopedInstructionSet scope(target);
    testing::GuardedAllocator allocator;
    for (const AttentionCase& c : {AttentionCase{"guarded", {70, 0, 101, 1}, 9, {4, 2, 20, 0}},
                                   AttentionCase{"window", {200}, 5, {3, 1, 7, 30}}}) {
      SCOPED_TRACE(c.name + " " + testing::InstructionSetName(target));
      const Problem p = MakeProblem(c, DType::kBF16);
      ExpectSame(RunAll(Context(), p), RunAll(Context().WithAllocator(allocator), p));
    }
    EXPECT_THAT(allocator.TakeViolations(), ::testing::IsEmpty());
  }
}

// TRAPS one-token: a single token sees itself, so o is v and dq, dk are zero.
TEST(Attention, OneToken) {
  for (const std::int64_t target : testing::InstructionSets()) {
    const testing::ScopedInstructionSet scope(target);
    const Problem p = MakeProblem({"one", {1, 1}, 0, {1, 1, 9, 0}}, DType::kF32);
    const Results r = RunAll(Context().WithImpl("cpu"), p);
    EXPECT_TRUE(Agrees(check::CompareBitwise("o", r.o, Dense(p.in.v))));
    // p is exp(s − lse), 1 up to the rounding of the score.
    const double error = BackwardError(p, DType::kF32);
    EXPECT_TRUE(Agrees(check::Compare("dv", r.dv, p.do64, error * LargestRow(p.do64, 9))));
  }
}

bool AllZero(const Tensor& t) {
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    if (ElementAsDouble(t, i) != 0) return false;
  }
  return true;
}

// A query that sees one key has a probability of 1 whatever its score: dq of it is zero, and it
// adds nothing to dk, without a rounding error. dk of a window of one is zero then.
TEST(Attention, OneVisibleKeyHasNoScoreGradient) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (const Variant& variant : Variants()) {
      if (dtype == DType::kF64 && variant.impl == "cpu") continue;
      SCOPED_TRACE(std::string(Name(dtype)) + " " + variant.name);
      const testing::ScopedInstructionSet scope(
          variant.target == 0 ? testing::InstructionSets().front() : variant.target);
      const Context ctx = ContextOf(variant);
      // Many queries in a block, tasks of whole sequences and (one long one) tasks of blocks.
      for (const std::vector<std::int64_t>& lengths :
           {std::vector<std::int64_t>{1, 2, 70, 1, 3}, std::vector<std::int64_t>{200}}) {
        const Problem causal = MakeProblem({"first", lengths, 2, {4, 2, 20, 0}}, dtype, 3.0);
        const Results r = RunAll(ctx, causal);
        std::int64_t first = 0;
        for (const std::int64_t n : lengths) {
          EXPECT_TRUE(AllZero(Dense(r.dq.Slice(0, first, 1)))) << "token " << first;
          if (n == 1) {
            EXPECT_TRUE(AllZero(Dense(r.dk.Slice(0, first, 1)))) << "token " << first;
          }
          first += n;
        }
        const Problem window = MakeProblem({"window", lengths, 2, {6, 2, 7, 1}}, dtype, 3.0);
        const Results w = RunAll(ctx, window);
        EXPECT_TRUE(AllZero(w.dq));
        EXPECT_TRUE(AllZero(w.dk));
        EXPECT_FALSE(AllZero(w.dv));
      }
    }
  }
}

TEST(Attention, GradientOfReference) {
  for (const AttentionCase& c : {AttentionCase{"causal", {5, 0, 1, 4}, 2, {4, 2, 6, 0}},
                                 AttentionCase{"window", {9}, 0, {2, 1, 5, 3}},
                                 AttentionCase{"mqa", {7}, 1, {3, 1, 4, 0}}}) {
    SCOPED_TRACE(c.name);
    std::int64_t used = 0;
    for (const std::int64_t n : c.lengths) used += n;
    const std::int64_t tokens = used + c.padding;
    const std::int64_t a = c.config.num_heads * c.config.head_dim;
    const std::int64_t b = c.config.num_kv_heads * c.config.head_dim;
    const PackedSequences sequences = PackedFromLengths(c.lengths, tokens);
    const Context ctx;
    const Tensor q = testing::Normal({tokens, a}, DType::kF64, c.name + "q");
    const Tensor k = testing::Normal({tokens, b}, DType::kF64, c.name + "k");
    const Tensor v = testing::Normal({tokens, b}, DType::kF64, c.name + "v");
    const Tensor w = testing::Normal({tokens, a}, DType::kF64, c.name + "w");
    const Tensor o = ctx.Empty({tokens, a}, DType::kF64);
    const Tensor lse = ctx.Empty({c.config.num_heads, tokens}, DType::kF64);
    const auto loss = [&] {
      AttentionForward(ctx, c.config, sequences, q, k, v, lse, Write(o));
      double sum = 0;
      for (std::int64_t i = 0; i < o.numel(); ++i) {
        sum += ElementAsDouble(o, i) * ElementAsDouble(w, i);
      }
      return sum;
    };
    loss();
    const Tensor dq = ctx.Empty({tokens, a}, DType::kF64);
    const Tensor dk = ctx.Empty({tokens, b}, DType::kF64);
    const Tensor dv = ctx.Empty({tokens, b}, DType::kF64);
    AttentionBackward(ctx, c.config, sequences, w, q, k, v, o, lse, Write(dq), Write(dk),
                      Write(dv));
    EXPECT_TRUE(Agrees(testing::CheckGradient("dq", loss, q, dq)));
    EXPECT_TRUE(Agrees(testing::CheckGradient("dk", loss, k, dk)));
    EXPECT_TRUE(Agrees(testing::CheckGradient("dv", loss, v, dv)));
  }
}

TEST(Attention, Errors) {
  const Context ctx;
  const PackedSequences sequences = PackedFromLengths(std::vector<std::int64_t>{2, 2});
  const Tensor q = ctx.Zeros({4, 12}, DType::kF32), k = ctx.Zeros({4, 6}, DType::kF32);
  const auto run = [&](const AttentionConfig& config, const PackedSequences& s, const Tensor& key,
                       const Tensor& lse) {
    AttentionForward(ctx, config, s, q, key, k, lse, Write(ctx.Empty({4, 12}, DType::kF32)));
  };
  const auto message = [](auto&& f) {
    try {
      f();
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(message([&] {
                run({4, 3, 3, 0}, sequences, k, {});
              }),
              HasSubstr("3 key/value heads do not divide 4 query heads"));
  EXPECT_THAT(message([&] { run({4, 2, 3, -1}, sequences, k, {}); }), HasSubstr("window -1"));
  EXPECT_THAT(message([&] {
                run({4, 2, 3, 0}, sequences, q, {});
              }),
              HasSubstr("k is f32 [4, 12], not f32 [4, 6]"));
  EXPECT_THAT(message([&] { run({4, 2, 3, 0}, sequences, k, k); }), HasSubstr("lse is"));
  const PackedSequences longer = PackedFromLengths(std::vector<std::int64_t>{2, 3});
  EXPECT_THAT(message([&] {
                run({4, 2, 3, 0}, longer, k, {});
              }),
              HasSubstr("cu_seqlens ends at 5, beyond the 4 tokens"));
  sequences.cu_seqlens.data<std::int64_t>()[1] = 5;
  EXPECT_THAT(message([&] {
                run({4, 2, 3, 0}, sequences, k, {});
              }),
              HasSubstr("falls from 5 to 4"));
  const Tensor f64 = ctx.Zeros({0, 4}, DType::kF64);
  EXPECT_THAT(message([&] {
                AttentionForward(ctx.WithImpl("attention=cpu"), {1, 1, 4, 0}, PackedFromLengths({}),
                                 f64, f64, f64, {}, Write(f64));
              }),
              HasSubstr("f64 is not one of"));
}

}  // namespace
}  // namespace cistron::ops
