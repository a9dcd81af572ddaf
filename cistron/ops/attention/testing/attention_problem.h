// A case of attention with values, its truth in fp64, and bounds on what an implementation may
// differ from it: what attention_test.cc compares with.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cistron/check/compare.h"
#include "cistron/ops/attention/attention_cases.h"

namespace cistron::ops {

// Contiguous copy of a matrix whose rows may be strided.
Tensor Dense(const Tensor& view);

// Three matrices beside each other in one buffer, as views of one projection; padding rows and
// columns between and behind them are poisoned.
struct Projection {
  Tensor whole, q, k, v;
  std::vector<Tensor> gaps;
};
// Rows of the parts begin on 16 bytes where the tensor cores take the problem, and do not
// elsewhere.
Projection MakeProjection(const AttentionConfig& c, std::int64_t tokens, DType dtype);

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

Problem MakeProblem(const AttentionCase& c, DType dtype, double std = 1.0);

// The largest ‖row‖ of rows of `dim` values.
double LargestRow(const Tensor& f64, std::int64_t dim);

// How an implementation computes, as far as its errors go. u: unit roundoff of the compute type.
struct Arithmetic {
  DType compute = DType::kF32;
  // Units of u that each addition of a product of rows, or of a sum over keys or queries, loses.
  double addition = 1;
  double exponential = 3;  // units of u of each exponential
  // Relative rounding of probabilities and of gradients of scores before they are multiplied by v,
  // do, k and q.
  double square = 0;
};
// Additions round to nearest; probabilities stay in f32.
Arithmetic PlainArithmetic();
// Tensor cores with bf16 operands. Products of bf16 are exact in f32; a step adds 16 of them to the
// sum so far, each cut off below the last bit of the largest: 17 errors of 2u in 16 additions
// (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021, section
// 4). ex2.approx errs by 2 ulp (PTX ISA). Probabilities and gradients of scores become operands, so
// each is rounded to bf16 once: |p̃ − p| ≤ 2⁻⁸ p, and a sum Σ p̃ v errs by at most 2⁻⁸ Σ p|v| more.
// The sum of probabilities that divides o, and lse, take them unrounded.
Arithmetic TensorCoreArithmetic();

// Relative error of lse's sum of exponentials and of o's numerator before probabilities are
// rounded.
double ForwardError(const Problem& p, const Arithmetic& a);
// |õ − o| ≤ OutputError · Σ p|v|.
double OutputError(const Problem& p, const Arithmetic& a);
// |dṽ − dv| ≤ ValueGradientError · Σ p|do|, and |dq̃ − dq| ≤ ScoreGradientError · Σ p|k|; dk with
// |q|.
double ValueGradientError(const Problem& p, const Arithmetic& a);
double ScoreGradientError(const Problem& p, const Arithmetic& a);

// |got − truth| ≤ error·sums_i + what the output's own rounding does to `before` + truth.
check::Comparison CompareOutput(const std::string& name, const Tensor& got, const Tensor& truth,
                                const Tensor& sums, double error, DType compute,
                                const Tensor& before = {});

}  // namespace cistron::ops
