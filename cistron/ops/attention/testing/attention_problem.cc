#include "cistron/ops/attention/testing/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cistron/check/bounds.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

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

// A dense random matrix whose last `padding` rows are poison, in f64 rounded to `dtype`.
Tensor RandomRows(std::int64_t used, std::int64_t tokens, std::int64_t width, DType dtype,
                  std::string_view name, double std) {
  const Tensor t = Tensor::Empty({tokens, width}, dtype);
  FillPoison(t);
  CopyInto(testing::Normal({used, width}, dtype, name, std), t.Slice(0, 0, used));
  return t;
}

// Relative error of exp(s) for a score s of magnitude ≤ S, n of whose factors are exponentials:
// the product (D additions, the scale's constants among 3 roundings), what is subtracted (two
// roundings of ≤ 2S or of S + |lse|), and those of each exponential.
double ExponentialError(const Problem& p, const Arithmetic& a, double subtracted,
                        double exponentials) {
  const double u = check::UnitRoundoff(a.compute);
  const double argument =
      (a.addition * static_cast<double>(p.config.head_dim) + 3) * p.score_limit + 2 * subtracted;
  return std::expm1(u * (argument + a.exponential * exponentials) * (1 + 1e-3));
}

// γ of a sum of n terms and of `others` more roundings.
double SumError(const Arithmetic& a, std::int64_t n, std::int64_t others) {
  return check::Gamma(
      static_cast<std::int64_t>(std::ceil(a.addition * static_cast<double>(n))) + others,
      a.compute);
}

}  // namespace

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

Projection MakeProjection(const AttentionConfig& c, std::int64_t tokens, DType dtype) {
  const std::int64_t gap = dtype == DType::kBF16 && c.head_dim % 8 == 0 ? 8 : 3;
  const std::int64_t a = c.num_heads * c.head_dim, b = c.num_kv_heads * c.head_dim;
  Projection p;
  p.whole = Tensor::Empty({tokens, a + 2 * b + 3 * gap}, dtype);
  FillPoison(p.whole);
  p.q = p.whole.Slice(1, 0, a);
  p.k = p.whole.Slice(1, a + gap, b);
  p.v = p.whole.Slice(1, a + b + 2 * gap, b);
  p.gaps = {p.whole.Slice(1, a, gap), p.whole.Slice(1, a + b + gap, gap),
            p.whole.Slice(1, a + 2 * b + 2 * gap, gap)};
  return p;
}

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

Problem MakeProblem(const AttentionCase& c, DType dtype, double std) {
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

Arithmetic PlainArithmetic() {
  return {};
}
Arithmetic TensorCoreArithmetic() {
  return {DType::kF32, 2.0 * 17 / 16, 4, check::UnitRoundoff(DType::kBF16)};
}

double ForwardError(const Problem& p, const Arithmetic& a) {
  // A running maximum changes at most once a block, and each change is one more exponential.
  const double blocks = static_cast<double>(p.terms) / 64 + 2;
  // Numerator and denominator both err.
  return 2 * (ExponentialError(p, a, 2 * p.score_limit, 1 + blocks) +
              SumError(a, p.terms, static_cast<std::int64_t>(blocks) + 4));
}

double OutputError(const Problem& p, const Arithmetic& a) {
  const double error = ForwardError(p, a);
  return error + a.square * (1 + error);
}

double ValueGradientError(const Problem& p, const Arithmetic& a) {
  const double error = ExponentialError(p, a, p.score_limit + 2 * p.lse_limit, 1) +
                       SumError(a, p.terms + p.config.head_dim, 6);
  return error + a.square * (1 + error);
}

// ds = p·(do·v − do·o)/√D errs by the error of p and by that of the two products, each relative to
// Σ|v||do| + Σ|do||o| ≤ grad_limit; its rounding is relative to its own magnitude, which is at most
// p·grad_limit/√D.
double ScoreGradientError(const Problem& p, const Arithmetic& a) {
  Arithmetic unrounded = a;
  unrounded.square = 0;
  const double error = 2 * ValueGradientError(p, unrounded);
  return (error + a.square * (1 + error)) * p.grad_limit /
         std::sqrt(static_cast<double>(p.config.head_dim));
}

// |got − truth| ≤ error·scale_i + what the output's own rounding does to `before` + truth.
check::Comparison CompareOutput(const std::string& name, const Tensor& got, const Tensor& truth,
                                const Tensor& sums, double error, DType compute,
                                const Tensor& before) {
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

}  // namespace cistron::ops
