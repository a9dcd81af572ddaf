// Attention through cuDNN: the sizes of its plans on the CPU; on a GPU, where cuDNN is there, every
// result against our own kernels in f32 under derived bounds. Tensors lie in device memory.
//
// Bounds. cuDNN multiplies on tensor cores with f32 sums, but rounds probabilities and gradients of
// scores to bf16 before the products with v, do, k and q: a relative error u = 2^-8 of each term.
// Backward of grouped queries may also round each query head's dk and dv before it adds them: u
// once more. Everything else errs as f32 does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/ops/attention/attention_cases.h"
#include "cistron/ops/attention/attention_cudnn_shape.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/testing/cuda.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using internal::CudnnHeadsAtOnce;
using internal::CudnnScoreBytes;
using internal::CudnnShape;
using internal::CudnnShapeOf;
using testing::Agrees;

// jit-stall: sizes of packed sequences are rounded, so that plans, each of which takes time to
// make, serve many of them.
TEST(AttentionCudnnShape, RoundsPackedSequences) {
  for (const std::int64_t sequences : {0, 1, 2, 3, 4, 5, 100}) {
    for (const std::int64_t length : {1, 127, 128, 129, 511, 513, 1000, 5000, 8192}) {
      const CudnnShape s =
          CudnnShapeOf({DType::kBF16, {8, 2, 64, 0}, 100'000, sequences, length, false});
      EXPECT_TRUE(s.ragged);
      EXPECT_GE(s.batch, sequences);
      EXPECT_LE(s.batch, std::max<std::int64_t>(1, 2 * sequences - 1));
      EXPECT_GE(s.length, length);
      EXPECT_EQ(s.length % 128, 0);
      EXPECT_LT(s.length, std::max<std::int64_t>(length + 128, length * 3 / 2));
    }
  }
}

// Sequences that are packed into a row of `tokens` until it is full, as data is: lengths are drawn
// up to `longest`, short ones being more frequent, and the last is cut.
std::vector<std::int64_t> PackedLengths(int row, std::int64_t tokens, std::int64_t longest) {
  const RandomStream stream(static_cast<std::uint64_t>(row), "packed_lengths");
  std::vector<std::int64_t> lengths;
  for (std::int64_t used = 0; used < tokens;) {
    const double u = stream.Uniform(lengths.size());
    const auto drawn = static_cast<std::int64_t>(std::ceil(static_cast<double>(longest) * u * u));
    lengths.push_back(std::clamp<std::int64_t>(drawn, 1, tokens - used));
    used += lengths.back();
  }
  return lengths;
}

// jit-stall: what all micro-batches of a run may need is few plans, and what they do need fewer.
TEST(AttentionCudnnShape, ARunNeedsFewPlans) {
  for (const std::int64_t longest : {512, 1024, 4096}) {
    std::set<internal::CudnnPlanKey> keys, late;
    constexpr std::int64_t kTokens = 8192;
    for (int i = 0; i < 4000; ++i) {
      const std::vector<std::int64_t> lengths = PackedLengths(i, kTokens, longest);
      const PackedSequences sequences = PackedFromLengths(lengths, kTokens);
      for (const bool backward : {false, true}) {
        const internal::CudnnPlanKey key = internal::CudnnKeyOf({DType::kBF16,
                                                                 {32, 8, 128, 0},
                                                                 kTokens,
                                                                 sequences.num_sequences(),
                                                                 sequences.max_length,
                                                                 sequences.uniform},
                                                                backward, true);
        if (keys.insert(key).second && i >= 100) late.insert(key);
      }
    }
    std::printf("sequences of up to %d tokens: %d plans, %d of them after 100 micro-batches\n",
                static_cast<int>(longest), static_cast<int>(keys.size()),
                static_cast<int>(late.size()));
    // Forward and backward of at most three numbers of sequences and five lengths.
    EXPECT_LE(keys.size(), 2 * 3 * 5) << longest;
    EXPECT_LE(late.size(), keys.size() / 2) << longest;
  }
  // Token counts that never come again: as many plans as sizes between powers of two.
  std::set<std::int64_t> counts;
  for (std::int64_t tokens = 4096; tokens < 65536; ++tokens) {
    counts.insert(internal::CudnnKeyOf({DType::kBF16, {32, 8, 128, 0}, tokens, 7, 1000, false},
                                       /*backward=*/true, true)
                      .tokens);
  }
  EXPECT_EQ(counts.size(), 4 * 2 + 1);
}

// With bounds that hold for all of them, forward and backward need a plan each.
TEST(AttentionCudnnShape, BoundsNeedTwoPlans) {
  std::set<internal::CudnnPlanKey> keys;
  for (int i = 0; i < 400; ++i) {
    const PackedSequences sequences =
        WithBounds(PackedFromLengths(PackedLengths(i, 8192, 4096), 8192), 100, 4096);
    for (const bool backward : {false, true}) {
      keys.insert(internal::CudnnKeyOf(
          {DType::kBF16, {32, 8, 128, 0}, 8192, sequences.num_sequences(), sequences.max_length},
          backward, true));
    }
  }
  EXPECT_EQ(keys.size(), 2u);
}

std::string FirstOnGpu(std::int64_t head_dim, std::int64_t tokens, std::int64_t sequences,
                       std::int64_t length, bool uniform) {
  for (const AttentionImpl& impl :
       AttentionImplsFor({DType::kBF16, {8, 2, head_dim, 0}, tokens, sequences, length, uniform})) {
    if (impl.device == DeviceType::kCuda) return std::string(impl.name);
  }
  return {};
}

// Sizes alone say which comes first, and the others follow.
TEST(AttentionOrder, FlashComesFirstWhereItIsFaster) {
  EXPECT_EQ(FirstOnGpu(128, 8192, 2, 4096, true), "cudnn");
  EXPECT_EQ(FirstOnGpu(64, 8192, 16, 512, true), "cudnn");
  EXPECT_EQ(FirstOnGpu(32, 8192, 16, 512, true), "flash") << "narrow heads";
  EXPECT_EQ(FirstOnGpu(32, 8192, 1, 8192, true), "cudnn") << "long";
  EXPECT_EQ(FirstOnGpu(64, 8192, 3, 8192, false), "flash") << "packed";
  EXPECT_EQ(FirstOnGpu(128, 8192, 3, 8192, false), "cudnn") << "packed, and long";
  EXPECT_EQ(FirstOnGpu(128, 8192, 40, 4096, false), "flash") << "packed, and short";
  EXPECT_EQ(FirstOnGpu(12, 8192, 40, 4096, false), "cudnn") << "flash does not take it";
  const auto names = [](std::span<const AttentionImpl> impls) {
    std::set<std::string_view> all;
    for (const AttentionImpl& impl : impls) all.insert(impl.name);
    return all;
  };
  const auto ordered = AttentionImplsFor({DType::kBF16, {8, 2, 64, 0}, 8192, 3, 8192});
  EXPECT_EQ(ordered.size(), AttentionImpls().size());
  EXPECT_EQ(names(ordered), names(AttentionImpls()));
}

TEST(AttentionOrder, BoundsAreCheapWhereTheyFitOrOurOwnKernelRuns) {
  const auto cheap = [](std::int64_t head_dim, std::int64_t most, std::int64_t typical,
                        std::int64_t length) {
    const AttentionConfig config{8, 2, head_dim, 0};
    return BoundsAreCheap(Context().WithImpl(""), {DType::kBF16, config, 8192, most, length},
                          {DType::kBF16, config, 8192, typical, length});
  };
  EXPECT_TRUE(cheap(64, 57, 23, 4096)) << "our own kernel";
  EXPECT_TRUE(cheap(128, 57, 28, 4096)) << "our own kernel, of short sequences";
  EXPECT_TRUE(cheap(128, 3, 2, 8192)) << "a plan for 4 of 8192";
  EXPECT_FALSE(cheap(128, 17, 5, 4096)) << "a plan for 32 of 4096";
  EXPECT_FALSE(cheap(128, 24, 5, 4096)) << "our own kernel, where cuDNN is faster";
}

// Of proteins in rows of 4096 with heads of 64, which our own kernel takes.
TEST(AttentionOrder, BoundsAreJudgedByTheImplementationThatIsAskedFor) {
  const auto cheap = [](const char* impl, std::int64_t most, std::int64_t typical) {
    const AttentionConfig config{8, 2, 64, 0};
    return BoundsAreCheap(Context().WithImpl(impl), {DType::kBF16, config, 8192, most, 4096},
                          {DType::kBF16, config, 8192, typical, 4096});
  };
  for (const char* impl : {"", "flash", "cuda", "cpu"}) EXPECT_TRUE(cheap(impl, 57, 23)) << impl;
  for (const char* impl : {"cudnn", "cudnn_atomics", "attention=cudnn"}) {
    EXPECT_FALSE(cheap(impl, 57, 23)) << impl << ": a plan for 64 of 4096";
    EXPECT_TRUE(cheap(impl, 7, 5)) << impl << ": a plan for 8 of 4096";
  }
}

TEST(AttentionCudnnShape, UniformSequencesNeedNoOffsets) {
  const auto shape = [](std::int64_t tokens, std::int64_t sequences, std::int64_t length) {
    return CudnnShapeOf({DType::kBF16, {8, 2, 64, 0}, tokens, sequences, length, true});
  };
  EXPECT_FALSE(shape(8192, 8, 1024).ragged);
  EXPECT_EQ(shape(8192, 8, 1024).batch, 8);
  EXPECT_EQ(shape(8192, 8, 1024).length, 1024);
  EXPECT_TRUE(shape(300, 3, 100).ragged) << "cuDNN has limits on odd lengths";
  // Nobody said how long sequences are: as long as there are tokens.
  EXPECT_EQ(CudnnShapeOf({DType::kBF16, {8, 2, 64, 0}, 700, 4, 0, false}).length, 768);
}

TEST(AttentionCudnnShape, HeadsAtOnceKeepScoresSmall) {
  const AttentionConfig config{32, 8, 128, 0};
  EXPECT_EQ(CudnnHeadsAtOnce(config, {false, 1, 1024}), 8);
  EXPECT_EQ(CudnnHeadsAtOnce(config, {false, 1, 8192}), 8);
  EXPECT_EQ(CudnnHeadsAtOnce(config, {false, 4, 8192}), 2);
  EXPECT_EQ(CudnnHeadsAtOnce(config, {false, 64, 8192}), 1);
  EXPECT_LE(CudnnScoreBytes({false, 4, 8192}, 8), internal::kCudnnScoreBytes);
  // Five of six heads would fit.
  EXPECT_EQ(CudnnHeadsAtOnce({6, 6, 64, 0}, {false, 4, 10240}), 3);
}

TEST(AttentionCudnnShape, KeysOfPlans) {
  const AttentionProblem problem{DType::kBF16, {32, 8, 128, 9000}, 4 * 8192, 4, 8192, true};
  const internal::CudnnPlanKey forward = internal::CudnnKeyOf(problem, false, false);
  EXPECT_EQ(forward.kv_heads, 8);
  EXPECT_EQ(forward.heads, 32);
  EXPECT_EQ(forward.window, 0) << "no query is that far from a key";
  EXPECT_EQ(forward.row_strides, (std::array<std::int64_t, 8>{4096, 1024, 1024, 4096, 0, 0, 0, 0}));
  EXPECT_EQ(forward, internal::CudnnKeyOf(problem, false, true));
  const internal::CudnnPlanKey backward = internal::CudnnKeyOf(problem, true, true);
  EXPECT_EQ(backward.kv_heads, 2);
  EXPECT_EQ(backward.heads, 8);
  EXPECT_EQ(backward.row_strides[4], 4096) << "of whole rows";
  EXPECT_EQ(internal::CudnnKeyOf(problem, true, false).heads, 32);
}

TEST(AttentionCudnnShape, RefusesWhatNeedsTooMuchMemory) {
  const auto reason = [](const char* name, std::int64_t sequences) {
    for (const AttentionImpl& impl : AttentionImpls()) {
      if (impl.name != name) continue;
      return impl.supports({DType::kBF16, {32, 8, 128, 0}, 32768, sequences, 8192, false}).reason;
    }
    return std::string("not in the list");
  };
  // As if every one of them could have 8192 tokens: nobody on the host knows better.
  EXPECT_THAT(reason("cudnn", 9), ::testing::HasSubstr("8192 MiB of score gradients"));
  EXPECT_THAT(reason("cudnn_atomics", 9), ::testing::Not(::testing::HasSubstr("gradients")));
}

// --- on a GPU

Device Gpu() {
  return {DeviceType::kCuda, 0};
}

AttentionProblem ProblemOf(const AttentionCase& c, const PackedSequences& sequences,
                           std::int64_t tokens) {
  return {DType::kBF16,         c.config,         tokens, sequences.num_sequences(),
          sequences.max_length, sequences.uniform};
}

Support CudnnSupports(const AttentionProblem& problem) {
  for (const AttentionImpl& impl : AttentionImpls()) {
    if (impl.name == "cudnn") return impl.supports(problem);
  }
  return Support::No("not in the list");
}

bool Runs() {
  if (!testing::HasCuda()) return false;
  const Support support = CudnnSupports({DType::kBF16, {2, 1, 64, 0}, 128});
  if (!support) std::printf("[  cudnn   ] not tested: %s\n", support.reason.c_str());
  return support.ok;
}

Tensor Abs(const Tensor& host_f32) {
  const Tensor t = host_f32.Clone();
  for (float& v : t.span<float>()) v = std::abs(v);
  return t;
}

// Rows of `dense` in a matrix of `columns` columns from `column` on.
void CopyInto(const Tensor& dense, const Tensor& whole, std::int64_t column) {
  const std::size_t size = SizeOf(dense.dtype());
  for (std::int64_t i = 0; i < dense.dim(0); ++i) {
    std::memcpy(
        static_cast<char*>(whole.raw()) +
            static_cast<std::size_t>(i * whole.dim(1) + column) * size,
        static_cast<const char*>(dense.raw()) + static_cast<std::size_t>(i * dense.dim(1)) * size,
        static_cast<std::size_t>(dense.dim(1)) * size);
  }
}
Tensor Columns(const Tensor& whole, std::int64_t column, std::int64_t width) {
  const Tensor host = whole.ToHost();
  const Tensor t = Tensor::Empty({host.dim(0), width}, host.dtype());
  const std::size_t size = SizeOf(host.dtype());
  for (std::int64_t i = 0; i < host.dim(0); ++i) {
    std::memcpy(static_cast<char*>(t.raw()) + static_cast<std::size_t>(i * width) * size,
                static_cast<const char*>(host.raw()) +
                    static_cast<std::size_t>(i * host.dim(1) + column) * size,
                static_cast<std::size_t>(width) * size);
  }
  return t;
}

double LargestRow(const Tensor& f32, std::int64_t dim) {
  double largest = 0;
  const std::span<float> x = f32.span<float>();
  for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(dim)) {
    double squares = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) {
      squares += static_cast<double>(x[i + d]) * x[i + d];
    }
    largest = std::max(largest, std::sqrt(squares));
  }
  return largest;
}

// Inputs in bf16 in host memory, used rows only, and the truth from our own kernels on the same
// values in f32.
struct Truth {
  AttentionCase c;
  std::int64_t used = 0, tokens = 0, q_width = 0, kv_width = 0;
  Tensor q, k, v, d_o, o;       // bf16; o as a forward stores it
  Tensor lse, o32, dq, dk, dv;  // f32 on the host
  Tensor sum_pv, sum_pk, sum_pq, sum_pdo;
  double score_error, grad_limit, lse_error;
  std::int64_t terms = 0;
};

Truth MakeTruth(const AttentionCase& c) {
  Truth t;
  t.c = c;
  std::int64_t longest = 0;
  for (const std::int64_t n : c.lengths) {
    t.used += n;
    longest = std::max(longest, n);
  }
  t.tokens = t.used + c.padding;
  t.q_width = c.config.num_heads * c.config.head_dim;
  t.kv_width = c.config.num_kv_heads * c.config.head_dim;
  t.q = testing::Normal({t.used, t.q_width}, DType::kBF16, c.name + ".q");
  t.k = testing::Normal({t.used, t.kv_width}, DType::kBF16, c.name + ".k");
  t.v = testing::Normal({t.used, t.kv_width}, DType::kBF16, c.name + ".v");
  t.d_o = testing::Normal({t.used, t.q_width}, DType::kBF16, c.name + ".do");

  const Context ctx = Context(Gpu()).WithImpl("attention=cuda");
  PackedSequences sequences = PackedFromLengths(c.lengths);
  sequences.cu_seqlens = sequences.cu_seqlens.To(Gpu());
  const auto f32 = [](const Tensor& x) { return ConvertTo(x, DType::kF32); };
  const Tensor q32 = f32(t.q), k32 = f32(t.k), v32 = f32(t.v), do32 = f32(t.d_o);
  const Tensor q = q32.To(Gpu()), k = k32.To(Gpu()), v = v32.To(Gpu()), d_o = do32.To(Gpu());
  const auto empty = [&](std::int64_t width) { return ctx.Empty({t.used, width}, DType::kF32); };
  const Tensor o = empty(t.q_width), sums = empty(t.q_width);
  const Tensor lse = ctx.Empty({c.config.num_heads, t.used}, DType::kF32);
  AttentionForward(ctx, c.config, sequences, q, k, v, lse, Write(o));
  t.o32 = o.ToHost();
  t.lse = lse.ToHost();
  t.o = ConvertTo(t.o32, DType::kBF16);
  AttentionForward(ctx, c.config, sequences, q, k, Abs(v32).To(Gpu()), {}, Write(sums));
  t.sum_pv = sums.ToHost();
  AttentionForward(ctx, c.config, sequences, q, k, Abs(k32).To(Gpu()), {}, Write(sums));
  t.sum_pk = sums.ToHost();
  const Tensor stored = f32(t.o).To(Gpu());
  const Tensor dq = empty(t.q_width), dk = empty(t.kv_width), dv = empty(t.kv_width);
  const auto backward = [&](const Tensor& gradient) {
    AttentionBackward(ctx, c.config, sequences, gradient, q, k, v, stored, lse, Write(dq),
                      Write(dk), Write(dv));
  };
  backward(Abs(q32).To(Gpu()));
  t.sum_pq = dv.ToHost();
  backward(Abs(do32).To(Gpu()));
  t.sum_pdo = dv.ToHost();
  backward(d_o);
  t.dq = dq.ToHost();
  t.dk = dk.ToHost();
  t.dv = dv.ToHost();

  const std::int64_t dim = c.config.head_dim;
  const double root = std::sqrt(static_cast<double>(dim));
  const double scores = LargestRow(q32, dim) * LargestRow(k32, dim) / root;
  double lse_limit = 0;
  for (const float x : t.lse.span<float>()) lse_limit = std::max(lse_limit, std::abs(double{x}));
  // Both sides err: ours in f32 and cuDNN's, whose tensor cores cut instead of rounding (twice u)
  // and whose exponential is ex2.approx (2^-22, PTX ISA).
  const double u = check::UnitRoundoff(DType::kF32);
  t.score_error =
      std::expm1(u * (3 * (static_cast<double>(dim) + 3) * scores + 6 * (scores + lse_limit) + 16));
  t.lse_error = t.score_error + 8 * u * (scores + lse_limit + 1);
  t.grad_limit = LargestRow(do32, dim) * (LargestRow(v32, dim) + LargestRow(f32(t.o), dim)) / root;
  t.terms = longest * (c.config.num_heads / c.config.num_kv_heads);
  return t;
}

// |got − truth| ≤ error·sums_i and what `roundings` of a result to bf16 make of it.
check::Comparison CompareOutput(const std::string& name, const Tensor& got, const Tensor& truth,
                                const Tensor& sums, double error, const Tensor& before = {}) {
  const Tensor expected = ConvertTo(truth, DType::kF64);
  const std::span<double> e = expected.span<double>();
  std::vector<double> before_of(e.size(), 0);
  if (before) {
    for (std::size_t i = 0; i < e.size(); ++i) {
      before_of[i] = ElementAsDouble(before, static_cast<std::int64_t>(i));
      e[i] += before_of[i];
    }
  }
  const std::span<float> s = sums.span<float>();
  return check::Compare(name, got, expected, [&](std::int64_t flat) {
    const auto i = static_cast<std::size_t>(flat);
    const double u = check::UnitRoundoff(DType::kBF16), own = error * double{s[i]};
    // An accumulated result is rounded before it is added.
    const double first = before ? u * (std::abs(e[i] - before_of[i]) + own) : 0;
    return own + first + u * (std::abs(e[i]) + own + first) + 1e-30;
  });
}

double ForwardError(const Truth& t) {
  return check::UnitRoundoff(DType::kBF16) + 2 * t.score_error +
         check::Gamma(4 * t.terms + 8, DType::kF32);
}
double BackwardError(const Truth& t) {
  return 2 * check::UnitRoundoff(DType::kBF16) + 2 * t.score_error +
         check::Gamma(4 * t.terms + 4 * t.c.config.head_dim + 16, DType::kF32);
}

// q, k, v as views of one projection, or each by itself (gap < 0); rows beyond the last sequence
// and columns between are poison.
struct Layout {
  Tensor whole;
  Tensor q, k, v;
  std::int64_t at_q = 0, at_k = 0, at_v = 0;
};
Layout MakeLayout(const Truth& t, std::int64_t gap) {
  Layout l;
  l.at_k = t.q_width + gap;
  l.at_v = l.at_k + t.kv_width + gap;
  l.whole = Tensor::Empty({t.tokens, l.at_v + t.kv_width + gap}, DType::kBF16);
  FillPoison(l.whole);
  return l;
}
void Place(Layout& l, const Truth& t) {
  l.whole = l.whole.To(Gpu());
  l.q = l.whole.Slice(1, l.at_q, t.q_width);
  l.k = l.whole.Slice(1, l.at_k, t.kv_width);
  l.v = l.whole.Slice(1, l.at_v, t.kv_width);
}
// Gap of 8 elements: every head begins on 16 bytes. Of 3: cuDNN gets copies.
Layout Inputs(const Truth& t, std::int64_t gap) {
  Layout l = MakeLayout(t, gap);
  CopyInto(t.q, l.whole, l.at_q);
  CopyInto(t.k, l.whole, l.at_k);
  CopyInto(t.v, l.whole, l.at_v);
  Place(l, t);
  return l;
}
Layout Outputs(const Truth& t, std::int64_t gap) {
  Layout l = MakeLayout(t, gap);
  Place(l, t);
  return l;
}
Tensor WithPadding(const Tensor& used, std::int64_t tokens) {
  const Tensor t = Tensor::Empty({tokens, used.dim(1)}, used.dtype());
  FillPoison(t);
  CopyInto(used, t, 0);
  return t;
}

std::vector<AttentionCase> Cases() {
  return {
      {"only_padding", {0, 0}, 3, {2, 1, 8, 0}},
      {"one_token", {1}, 3, {2, 1, 16, 0}},
      {"short_sequences", {1, 2, 0, 3, 17, 0, 1}, 2, {4, 2, 8, 0}},
      {"grouped_query", {200, 97}, 7, {6, 2, 32, 0}},
      {"multi_query", {98, 4}, 0, {8, 1, 16, 0}},
      {"window_one", {70, 5}, 2, {2, 1, 16, 1}},
      {"window", {230, 700}, 3, {4, 2, 64, 101}},
      {"window_beyond_sequence", {100, 30}, 0, {2, 1, 64, 1000}},
      {"head_dim_80", {70}, 0, {2, 1, 80, 0}},
      {"head_dim_128", {130, 513, 1}, 2, {4, 2, 128, 0}},
      {"uniform", {256, 256}, 0, {4, 2, 64, 0}},
      {"uniform_one", {384}, 0, {4, 1, 128, 0}},
      {"uniform_window", {256, 256}, 0, {4, 2, 64, 100}},
  };
}

class AttentionCudnn : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Runs()) GTEST_SKIP() << "no GPU, or no cuDNN";
  }
};

// Runs f(truth, sequences, context) for every case and implementation.
template <class F>
void ForAll(F&& f) {
  for (const AttentionCase& c : Cases()) {
    const Truth t = MakeTruth(c);
    PackedSequences sequences = PackedFromLengths(c.lengths, t.tokens);
    sequences.cu_seqlens = sequences.cu_seqlens.To(Gpu());
    ASSERT_TRUE(CudnnSupports(ProblemOf(c, sequences, t.tokens)));
    for (const char* impl : {"cudnn", "cudnn_atomics"}) {
      SCOPED_TRACE(c.name + " " + impl);
      f(t, sequences, Context(Gpu()).WithImpl(std::string("attention=") + impl));
    }
  }
}

void ExpectZeroPadding(const Truth& t, const Tensor& columns) {
  for (std::int64_t i = t.used * columns.dim(1); i < columns.numel(); ++i) {
    ASSERT_EQ(ElementAsDouble(columns, i), 0.0) << i;
  }
}

TEST_F(AttentionCudnn, ForwardAgreesWithF32) {
  ForAll([](const Truth& t, const PackedSequences& sequences, const Context& ctx) {
    const double error = ForwardError(t);
    for (const std::int64_t gap : {8, 3}) {
      SCOPED_TRACE(gap);
      const Layout in = Inputs(t, gap), out = Outputs(t, gap);
      const Tensor lse = Tensor::Empty({t.c.config.num_heads, t.tokens}, DType::kF32);
      FillPoison(lse);
      const Tensor lse_there = lse.To(Gpu());
      AttentionForward(ctx, t.c.config, sequences, in.q, in.k, in.v, lse_there, Write(out.q));
      const Tensor o = Columns(out.whole, out.at_q, t.q_width);
      EXPECT_TRUE(Agrees(CompareOutput("o", o.Slice(0, 0, t.used), t.o32, t.sum_pv, error)));
      ExpectZeroPadding(t, o);
      EXPECT_TRUE(testing::IsPoisoned(Columns(out.whole, out.at_k - gap, gap)));
      EXPECT_TRUE(Agrees(check::Compare("lse", Columns(lse_there, 0, t.used), t.lse, t.lse_error)));
    }
    // Accumulate, and no lse wanted.
    const Layout in = Inputs(t, 8);
    const Tensor before = testing::Normal({t.tokens, t.q_width}, DType::kBF16, "before");
    const Tensor after = before.To(Gpu());
    AttentionForward(ctx, t.c.config, sequences, in.q, in.k, in.v, {}, Accumulate(after));
    const Tensor got = after.ToHost();
    EXPECT_TRUE(Agrees(CompareOutput("o accumulated", got.Slice(0, 0, t.used), t.o32, t.sum_pv,
                                     error, before.Slice(0, 0, t.used))));
    EXPECT_TRUE(Agrees(check::CompareBitwise("padding", got.Slice(0, t.used, t.c.padding),
                                             before.Slice(0, t.used, t.c.padding))));
  });
}

TEST_F(AttentionCudnn, BackwardAgreesWithF32) {
  ForAll([](const Truth& t, const PackedSequences& sequences, const Context& ctx) {
    const double error = BackwardError(t), ds_error = error * t.grad_limit;
    const Tensor d_o = WithPadding(t.d_o, t.tokens).To(Gpu());
    const Tensor o = WithPadding(t.o, t.tokens).To(Gpu());
    const Tensor lse_host = Tensor::Empty({t.c.config.num_heads, t.tokens}, DType::kF32);
    FillPoison(lse_host);
    CopyInto(t.lse, lse_host, 0);
    const Tensor lse = lse_host.To(Gpu());
    const auto used = [&](const Tensor& x) { return x.Slice(0, 0, t.used); };
    for (const std::int64_t gap : {8, 3}) {
      SCOPED_TRACE(gap);
      const Layout in = Inputs(t, gap), out = Outputs(t, gap);
      AttentionBackward(ctx, t.c.config, sequences, d_o, in.q, in.k, in.v, o, lse, Write(out.q),
                        Write(out.k), Write(out.v));
      const Tensor dq = Columns(out.whole, out.at_q, t.q_width);
      const Tensor dk = Columns(out.whole, out.at_k, t.kv_width);
      const Tensor dv = Columns(out.whole, out.at_v, t.kv_width);
      EXPECT_TRUE(Agrees(CompareOutput("dq", used(dq), t.dq, t.sum_pk, ds_error)));
      EXPECT_TRUE(Agrees(CompareOutput("dk", used(dk), t.dk, t.sum_pq, ds_error)));
      EXPECT_TRUE(Agrees(CompareOutput("dv", used(dv), t.dv, t.sum_pdo, error)));
      for (const Tensor& x : {dq, dk, dv}) ExpectZeroPadding(t, x);
      EXPECT_TRUE(testing::IsPoisoned(Columns(out.whole, out.at_k - gap, gap)));
      if (t.c.config.window == 1) {
        // One visible key: dp and do·o are the same sum in another order, so that dq is not exactly
        // zero as attention.h promises of our own kernels, but their difference in f32.
        const double noise = t.grad_limit * 4 * check::Gamma(t.c.config.head_dim + 8, DType::kF32);
        EXPECT_TRUE(Agrees(CompareOutput(
            "dq of one key", used(dq), Tensor::Zeros(t.dq.shape(), DType::kF32), t.sum_pk, noise)));
      }
    }
    const Layout in = Inputs(t, 8);
    const Tensor before = testing::Normal({t.tokens, t.kv_width}, DType::kBF16, "before");
    const Tensor dk = before.To(Gpu()), dv = before.To(Gpu());
    const Tensor dq = Tensor::Zeros({t.tokens, t.q_width}, DType::kBF16).To(Gpu());
    AttentionBackward(ctx, t.c.config, sequences, d_o, in.q, in.k, in.v, o, lse, Accumulate(dq),
                      Accumulate(dk), Accumulate(dv));
    EXPECT_TRUE(Agrees(CompareOutput("dq accumulated", used(dq.ToHost()), t.dq, t.sum_pk, ds_error,
                                     Tensor::Zeros({t.used, t.q_width}, DType::kBF16))));
    EXPECT_TRUE(Agrees(CompareOutput("dk accumulated", used(dk.ToHost()), t.dk, t.sum_pq, ds_error,
                                     used(before))));
    EXPECT_TRUE(Agrees(
        CompareOutput("dv accumulated", used(dv.ToHost()), t.dv, t.sum_pdo, error, used(before))));
  });
}

TEST_F(AttentionCudnn, SaysWhyThereIsNoPlan) {
  cuda::RequireDevice(0);
  const auto make = [](std::int64_t head_dim, bool backward) {
    internal::FindCudnnPlan(internal::CudnnKeyOf(
        {DType::kBF16, {4, 2, head_dim, 0}, 512, 2, 256, true}, backward, true));
  };
  for (const bool backward : {false, true}) {
    EXPECT_NO_THROW(make(64, backward));
    // Asked twice: the answer is kept.
    for (int i = 0; i < 2; ++i) {
      try {
        make(12, backward);
        FAIL() << "heads of 12 are no multiple of 16 bytes";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
        EXPECT_THAT(e.message(), ::testing::HasSubstr("attention: cuDNN"));
      }
    }
  }
}

// Trap library-heuristic-miss: where cuDNN has no plan our own kernel runs, and says so once.
TEST_F(AttentionCudnn, LibraryHeuristicMiss) {
  const Truth t = MakeTruth({"no plan", {200, 97}, 7, {6, 2, 32, 0}});
  PackedSequences sequences = PackedFromLengths(t.c.lengths, t.tokens);
  sequences.cu_seqlens = sequences.cu_seqlens.To(Gpu());
  const Tensor d_o = WithPadding(t.d_o, t.tokens).To(Gpu());
  struct Results {
    Tensor o, lse, dq, dk, dv;
  };
  for (const std::int64_t gap : {8, 3}) {  // of 3: heads begin anywhere, and the plain kernel runs
    const auto run = [&](const Context& ctx) {
      const Layout in = Inputs(t, gap), out = Outputs(t, gap);
      const Tensor o = ctx.Empty({t.tokens, t.q_width}, DType::kBF16);
      const Tensor lse = ctx.Empty({t.c.config.num_heads, t.tokens}, DType::kF32);
      AttentionForward(ctx, t.c.config, sequences, in.q, in.k, in.v, lse, Write(o));
      AttentionBackward(ctx, t.c.config, sequences, d_o, in.q, in.k, in.v, o, lse, Write(out.q),
                        Write(out.k), Write(out.v));
      return Results{o.ToHost(), lse.ToHost(), Columns(out.whole, out.at_q, t.q_width),
                     Columns(out.whole, out.at_k, t.kv_width),
                     Columns(out.whole, out.at_v, t.kv_width)};
    };
    const Context cudnn = Context(Gpu()).WithImpl("attention=cudnn");
    internal::cudnn_has_no_plan = true;
    ::testing::internal::CaptureStderr();
    const Results got = run(cudnn);
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_ANY_THROW(run(cudnn.WithStrict(true)));
    internal::cudnn_has_no_plan = false;
    const std::string said = "our own kernel runs in its place";
    EXPECT_EQ(log.find(said) != std::string::npos, gap == 8) << "once";
    EXPECT_EQ(log.find(said), log.rfind(said));
    const Results own =
        run(Context(Gpu()).WithImpl(gap == 8 ? "attention=flash" : "attention=cuda"));
    EXPECT_TRUE(Agrees(check::CompareBitwise("o", got.o, own.o)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("lse", got.lse, own.lse)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dq", got.dq, own.dq)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dk", got.dk, own.dk)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dv", got.dv, own.dv)));
  }
}

// Trap jit-stall: a run's packed micro-batches find their plans made by the first ones.
TEST_F(AttentionCudnn, JitStall) {
  const AttentionConfig config{8, 2, 64, 0};
  const Context ctx = Context(Gpu()).WithImpl("attention=cudnn");
  std::set<internal::CudnnPlanKey> keys;
  const std::int64_t before = internal::CudnnPlansMade();
  for (int i = 0; i < 40; ++i) {
    const std::vector<std::int64_t> lengths = PackedLengths(i, 2048, 512);
    // New token counts too: the last micro-batch, or tokens that another rank sent.
    const std::int64_t tokens = 2048 + 3 * i;
    PackedSequences sequences = PackedFromLengths(lengths, tokens);
    const AttentionProblem problem{
        DType::kBF16,         config,           tokens, sequences.num_sequences(),
        sequences.max_length, sequences.uniform};
    for (const bool backward : {false, true}) {
      keys.insert(internal::CudnnKeyOf(problem, backward, true));
    }
    sequences.cu_seqlens = sequences.cu_seqlens.To(Gpu());
    const Tensor q = ctx.Zeros({tokens, 512}, DType::kBF16),
                 k = ctx.Zeros({tokens, 128}, DType::kBF16);
    const Tensor o = ctx.Empty(q.shape(), q.dtype()), lse = ctx.Empty({8, tokens}, DType::kF32);
    const Tensor dq = ctx.Empty(q.shape(), q.dtype());
    const Tensor dk = ctx.Empty(k.shape(), k.dtype()), dv = ctx.Empty(k.shape(), k.dtype());
    AttentionForward(ctx, config, sequences, q, k, k, lse, Write(o));
    AttentionBackward(ctx, config, sequences, q, q, k, k, o, lse, Write(dq), Write(dk), Write(dv));
  }
  cuda::Synchronize(Gpu());
  EXPECT_LE(internal::CudnnPlansMade() - before, static_cast<std::int64_t>(keys.size()));
}

// Trap atomics: by default the same bits again and again.
TEST_F(AttentionCudnn, Atomics) {
  for (const AttentionCase& c : {AttentionCase{"repeat", {300, 1500, 220}, 28, {8, 2, 64, 0}},
                                 AttentionCase{"uniform", {1024, 1024}, 0, {8, 2, 64, 0}}}) {
    SCOPED_TRACE(c.name);
    const Truth t = MakeTruth(c);
    PackedSequences sequences = PackedFromLengths(c.lengths, t.tokens);
    sequences.cu_seqlens = sequences.cu_seqlens.To(Gpu());
    const Context ctx = Context(Gpu()).WithImpl("attention=cudnn");
    const Layout in = Inputs(t, 8);
    const Tensor d_o = WithPadding(t.d_o, t.tokens).To(Gpu());
    const Tensor o = ctx.Empty({t.tokens, t.q_width}, DType::kBF16);
    const Tensor lse = ctx.Empty({c.config.num_heads, t.tokens}, DType::kF32);
    Tensor first_o, first_q, first_k, first_v;
    for (int i = 0; i < 5; ++i) {
      const Layout out = Outputs(t, 8);
      AttentionForward(ctx, c.config, sequences, in.q, in.k, in.v, lse, Write(o));
      AttentionBackward(ctx, c.config, sequences, d_o, in.q, in.k, in.v, o, lse, Write(out.q),
                        Write(out.k), Write(out.v));
      const Tensor now_o = o.ToHost(), now_q = Columns(out.whole, out.at_q, t.q_width);
      const Tensor now_k = Columns(out.whole, out.at_k, t.kv_width);
      const Tensor now_v = Columns(out.whole, out.at_v, t.kv_width);
      if (i == 0) {
        first_o = now_o, first_q = now_q, first_k = now_k, first_v = now_v;
        continue;
      }
      EXPECT_TRUE(Agrees(check::CompareBitwise("o", now_o, first_o)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dq", now_q, first_q)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dk", now_k, first_k)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dv", now_v, first_v)));
    }
  }
}

}  // namespace
}  // namespace cistron::ops
