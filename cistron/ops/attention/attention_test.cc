// Attention: every implementation and instruction set against the fp64 reference under derived
// bounds, the reference's gradient against differences, and the promises of attention.h.
#include "cistron/ops/attention/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/attention/testing/attention_problem.h"
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
  if (testing::HasCuda()) {
    variants.push_back({"cuda", 0, "cuda"});
    variants.push_back({"flash", 0, "flash"});
  }
  return variants;
}
bool OnCuda(const Variant& variant) {
  return variant.impl == "cuda" || variant.impl == "flash";
}
Context ContextOf(const Variant& variant) {
  return (OnCuda(variant) ? testing::CudaContext() : Context()).WithImpl(variant.impl);
}
Arithmetic ArithmeticOf(const Variant& variant) {
  return variant.impl == "flash" ? TensorCoreArithmetic() : PlainArithmetic();
}
// MakeProjection aligns rows where only that could be a reason against it.
bool Runs(const Variant& variant, const Problem& p) {
  for (const AttentionImpl& impl : AttentionImpls()) {
    if (impl.name != variant.impl) continue;
    return static_cast<bool>(impl.supports({p.dtype, p.config, p.tokens}));
  }
  return false;
}

// Runs f(problem, context, arithmetic) for every case, dtype and variant.
template <class F>
void ForAll(F&& f) {
  for (const AttentionCase& c : AttentionCases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Problem p = MakeProblem(c, dtype);
      for (const Variant& variant : Variants()) {
        SCOPED_TRACE(c.name + " " + std::string(Name(dtype)) + " " + variant.name);
        // The slow baseline once a case: its bf16 conversions are those of norm and rope.
        if (dtype == DType::kBF16 && variant.target == testing::InstructionSets().back()) continue;
        if (!Runs(variant, p)) continue;
        if (variant.target == 0) {
          f(p, ContextOf(variant), ArithmeticOf(variant));
        } else {
          const testing::ScopedInstructionSet scope(variant.target);
          f(p, ContextOf(variant), ArithmeticOf(variant));
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
  ForAll([](const Problem& p, const Context& ctx, const Arithmetic& arithmetic) {
    const Projection out = MakeProjection(p.config, p.tokens, p.dtype);
    const Tensor lse = Tensor::Empty({p.config.num_heads, p.tokens}, DType::kF32);
    FillPoison(lse);
    AttentionForward(ctx, p.config, p.sequences, p.in.q, p.in.k, p.in.v, lse, Write(out.q));
    const double error = OutputError(p, arithmetic);
    EXPECT_TRUE(Agrees(
        CompareOutput("o", out.q.Slice(0, 0, p.used), p.truth_o, p.sum_pv, error, DType::kF32)));
    const double u = check::UnitRoundoff(DType::kF32);
    EXPECT_TRUE(Agrees(
        check::Compare("lse", Dense(lse.Slice(1, 0, p.used)), p.truth_lse,
                       ForwardError(p, arithmetic) + 4 * u * (p.score_limit + p.lse_limit + 1))));
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
  ForAll([](const Problem& p, const Context& ctx, const Arithmetic& arithmetic) {
    const Projection out = MakeProjection(p.config, p.tokens, p.dtype);
    AttentionBackward(ctx, p.config, p.sequences, p.d_o, p.in.q, p.in.k, p.in.v, p.o, p.lse,
                      Write(out.q), Write(out.k), Write(out.v));
    const double error = ValueGradientError(p, arithmetic);
    const double ds_error = ScoreGradientError(p, arithmetic);
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

// Runs f(problem, variant) for a case in f32 and bf16 with every variant that takes it.
template <class F>
void ForAllVariants(const AttentionCase& c, double std, F&& f) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Problem p = MakeProblem(c, dtype, std);
    for (const Variant& variant : Variants()) {
      if (!Runs(variant, p)) continue;
      SCOPED_TRACE(std::string(Name(dtype)) + " " + variant.name);
      const testing::ScopedInstructionSet scope(
          variant.target == 0 ? testing::InstructionSets().front() : variant.target);
      f(p, variant);
    }
  }
}

TEST(Attention, LargeScores) {
  // Scores of several hundred: exp without the maximum would overflow.
  const AttentionCase large{"large", {150}, 0, {2, 1, 16, 0}};
  ForAllVariants(large, 10.0, [](const Problem& p, const Variant& variant) {
    const Tensor o = Tensor::Empty(p.in.q.shape(), p.dtype);
    AttentionForward(ContextOf(variant), p.config, p.sequences, p.in.q, p.in.k, p.in.v, {},
                     Write(o));
    EXPECT_TRUE(Agrees(CompareOutput("o", o, p.truth_o, p.sum_pv,
                                     OutputError(p, ArithmeticOf(variant)), DType::kF32)));
  });
}

TEST(Attention, WindowOneReturnsV) {
  const AttentionCase identity{"identity", {75}, 0, {1, 1, 24, 1}};
  ForAllVariants(identity, 1.0, [](const Problem& p, const Variant& variant) {
    const Tensor o = Tensor::Empty(p.in.q.shape(), p.dtype);
    AttentionForward(ContextOf(variant), p.config, p.sequences, p.in.q, p.in.k, p.in.v, {},
                     Write(o));
    EXPECT_TRUE(Agrees(check::CompareBitwise(variant.name, o, Dense(p.in.v))));
  });
}

void SetNan(const Tensor& t, std::int64_t i) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (t.dtype() == DType::kBF16) {
    t.data<bf16>()[i] = bf16(nan);
  } else {
    t.data<float>()[i] = nan;
  }
}

TEST(Attention, NanInAQueryReachesItsRowOnly) {
  const AttentionCase nan{"nan", {70}, 0, {1, 1, 8, 0}};
  ForAllVariants(nan, 1.0, [](const Problem& p, const Variant& variant) {
    const Tensor q = Dense(p.in.q);
    SetNan(q, 40 * 8 + 3);
    const Tensor o = Tensor::Empty(p.in.q.shape(), p.dtype);
    AttentionForward(ContextOf(variant), p.config, p.sequences, q, p.in.k, p.in.v, {}, Write(o));
    for (std::int64_t i = 0; i < o.numel(); ++i) {
      EXPECT_EQ(std::isnan(ElementAsDouble(o, i)), i / 8 == 40) << i;
    }
  });
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

// Tiles reach beyond the end of a sequence: what is there belongs to another one.
TEST(Attention, NanStaysInItsSequence) {
  const AttentionCase three{"three", {70, 33, 100}, 0, {4, 2, 16, 0}};
  ForAllVariants(three, 1.0, [](const Problem& p, const Variant& variant) {
    Problem nan = p;
    nan.in = MakeProjection(p.config, p.tokens, p.dtype);
    nan.d_o = p.d_o.Clone();
    const std::int64_t width = p.in.whole.dim(1);
    std::memcpy(nan.in.whole.raw(), p.in.whole.raw(), static_cast<std::size_t>(p.in.whole.bytes()));
    for (std::int64_t i = 70 * width; i < 103 * width; ++i) SetNan(nan.in.whole, i);
    for (std::int64_t i = 70 * p.d_o.dim(1); i < 103 * p.d_o.dim(1); ++i) SetNan(nan.d_o, i);
    const Results clean = RunAll(ContextOf(variant), p), dirty = RunAll(ContextOf(variant), nan);
    const auto expect_same = [](const Tensor& a, const Tensor& b) {
      EXPECT_TRUE(Agrees(
          check::CompareBitwise("before", Dense(a.Slice(0, 0, 70)), Dense(b.Slice(0, 0, 70)))));
      EXPECT_TRUE(Agrees(check::CompareBitwise("behind", Dense(a.Slice(0, 103, 100)),
                                               Dense(b.Slice(0, 103, 100)))));
    };
    expect_same(clean.o, dirty.o);
    expect_same(clean.dq, dirty.dq);
    expect_same(clean.dk, dirty.dk);
    expect_same(clean.dv, dirty.dv);
  });
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
      if (!Runs(variant, p)) continue;
      const auto run = [&](int threads) {
        const testing::ThreadsForScope scope_of_threads(threads);
        return RunAll(ContextOf(variant), p);
      };
      const Results one = run(1);
      for (const int threads : {2, 5}) ExpectSame(one, run(threads));
    }
  }
}

// Bounds that hold for many micro-batches, of which one has fewer and shorter sequences: no bit
// changes, on the CPU and in our own kernels on a GPU.
TEST(Attention, BoundsChangeNoBit) {
  for (const AttentionCase& c : {AttentionCase{"short", {7, 1, 0, 30}, 0, {4, 2, 16, 0}},
                                 AttentionCase{"tiles", {200, 129, 64}, 3, {4, 2, 64, 0}},
                                 AttentionCase{"window", {210, 97}, 0, {2, 1, 32, 80}}}) {
    ForAllVariants(c, 1.0, [](const Problem& p, const Variant& variant) {
      const Results exact = RunAll(ContextOf(variant), p);
      Problem bounded = p;
      for (const std::int64_t number : {4, 5, 300}) {
        bounded.sequences = WithBounds(p.sequences, number, 1000);
        EXPECT_EQ(bounded.sequences.num_sequences(), number);
        ExpectSame(exact, RunAll(ContextOf(variant), bounded));
      }
    });
  }
}

TEST(PackedSequences, Bounds) {
  const PackedSequences two = PackedFromLengths(std::vector<std::int64_t>{4, 4}, 9);
  const PackedSequences bounded = WithBounds(two, 4, 6);
  const auto cu = bounded.cu_seqlens.span<std::int64_t>();
  EXPECT_EQ(std::vector<std::int64_t>(cu.begin(), cu.end()),
            (std::vector<std::int64_t>{0, 4, 8, 8, 8}));
  EXPECT_EQ(bounded.max_length, 6);
  EXPECT_EQ(bounded.longest, 4);
  EXPECT_TRUE(PackedFromLengths(std::vector<std::int64_t>{4, 4}).uniform);
  EXPECT_FALSE(WithBounds(PackedFromLengths(std::vector<std::int64_t>{4, 4}), 2, 4).uniform);
  EXPECT_THROW(WithBounds(two, 1, 6), Error);
  EXPECT_THROW(WithBounds(two, 4, 3), Error);
}

// Trap atomics, second-backward-nan: the same buffers again and again give the same bits.
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

// Trap padded-tail: rows beyond the last sequence hold NaN in every case of the table; here all
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

// Trap one-token: a single token sees itself, so o is v and dq, dk are zero.
TEST(Attention, OneToken) {
  for (const std::int64_t target : testing::InstructionSets()) {
    const testing::ScopedInstructionSet scope(target);
    const Problem p = MakeProblem({"one", {1, 1}, 0, {1, 1, 9, 0}}, DType::kF32);
    const Results r = RunAll(Context().WithImpl("cpu"), p);
    EXPECT_TRUE(Agrees(check::CompareBitwise("o", r.o, Dense(p.in.v))));
    // p is exp(s − lse), 1 up to the rounding of the score.
    const double error = ValueGradientError(p, PlainArithmetic());
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
        for (const std::int64_t dim : {20, 7, 40}) {
          const Problem causal = MakeProblem({"first", lengths, 2, {4, 2, dim, 0}}, dtype, 3.0);
          if (!Runs(variant, causal)) continue;
          const Results r = RunAll(ctx, causal);
          std::int64_t first = 0;
          for (const std::int64_t n : lengths) {
            EXPECT_TRUE(AllZero(Dense(r.dq.Slice(0, first, 1)))) << "token " << first;
            if (n == 1) {
              EXPECT_TRUE(AllZero(Dense(r.dk.Slice(0, first, 1)))) << "token " << first;
            }
            first += n;
          }
          const Problem window = MakeProblem({"window", lengths, 2, {6, 2, dim, 1}}, dtype, 3.0);
          const Results w = RunAll(ctx, window);
          EXPECT_TRUE(AllZero(w.dq));
          EXPECT_TRUE(AllZero(w.dk));
          EXPECT_FALSE(AllZero(w.dv));
        }
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
