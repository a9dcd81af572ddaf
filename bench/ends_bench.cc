// The ops at the two ends of a model and of a step: embedding, router, cross-entropy, gradient
// norm, AdamW. One JSON line a case.
//
//   ends_bench [--clock wall|cpu] [--seconds S]
//
// Bytes that must move beside copies of as many (bytes.h); for cross-entropy the arithmetic of its
// three products beside one product of that size.
#include "bench/bytes.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"
#include "cistron/ops/cross_entropy/cross_entropy_cases.h"
#include "cistron/ops/embedding/embedding.h"
#include "cistron/ops/embedding/embedding_cases.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/optimizer/adamw.h"
#include "cistron/ops/optimizer/adamw_cases.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/ops/reduce/reduce_cases.h"
#include "cistron/ops/router/router.h"
#include "cistron/ops/router/router_cases.h"

namespace cistron {
namespace {

using bench::BenchBytes;
using bench::Random;
using ops::Context;
using ops::Transpose;
using ops::Write;

Tensor RandomTokens(std::int64_t count, std::int64_t vocab) {
  const Tensor tokens = Tensor::Empty({count}, DType::kI64);
  const RandomStream stream(5, "tokens");
  for (std::int64_t t = 0; t < count; ++t) {
    tokens.data<std::int64_t>()[t] = static_cast<std::int64_t>(
        stream.Below(static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(vocab)));
  }
  return tokens;
}

// Forward reads a row and writes one; backward reads the rows and writes the table.
void BenchEmbedding(const bench::Options& options, const ops::EmbeddingShape& s, DType dtype) {
  const Context ctx;
  const auto [count, vocab, width] = s.problem;
  const Tensor tokens = RandomTokens(count, vocab);
  const Tensor w = Random({vocab, width}, dtype, 1), y = Tensor::Empty({count, width}, dtype);
  const Tensor dy = Random({count, width}, dtype, 2);
  const Tensor dw = Tensor::Empty({vocab, width}, ComputeType(dtype));
  BenchBytes(options, "embedding forward", s.name, dtype, 2 * y.bytes(),
             [&] { EmbeddingForward(ctx, tokens, w, Write(y)); });
  BenchBytes(options, "embedding backward", s.name, dtype, dy.bytes() + dw.bytes(),
             [&] { EmbeddingBackward(ctx, tokens, dy, Write(dw)); });
}

// Logits read; experts, probabilities and, backward, gradients written.
void BenchRouter(const bench::Options& options, const ops::RouterShape& s) {
  const Context ctx;
  const ops::RouterConfig& config = s.problem.config;
  const std::int64_t tokens = s.problem.tokens, experts = config.num_experts;
  const Tensor logits = Random({tokens, experts}, DType::kF32, 1);
  const Tensor dprobs = Random({tokens, config.top_k}, DType::kF32, 2);
  const Tensor aux_grad = Random({1, experts}, DType::kF64, 3),
               z_grad = Random({1}, DType::kF64, 4);
  const Tensor dlogits = Tensor::Empty({tokens, experts}, DType::kF32);
  ops::RouterOutputs out;
  out.experts = Tensor::Empty({tokens, config.top_k}, DType::kI32);
  out.probs = Tensor::Empty({tokens, config.top_k}, DType::kF32);
  out.counts = Tensor::Empty({1, experts}, DType::kI64);
  out.score_sums = Tensor::Empty({1, experts}, DType::kF64);
  out.z_sums = Tensor::Empty({1}, DType::kF64);
  out.nonfinite_tokens = Tensor::Empty({}, DType::kI64);
  BenchBytes(options, "router forward", s.name, DType::kF32,
             logits.bytes() + out.experts.bytes() + out.probs.bytes(),
             [&] { RouterForward(ctx, config, logits, {}, {}, {}, out); });
  BenchBytes(options, "router backward", s.name, DType::kF32,
             2 * logits.bytes() + out.experts.bytes() + dprobs.bytes(), [&] {
               RouterBackward(ctx, config, dprobs, logits, out.experts, {}, {}, aux_grad, z_grad,
                              Write(dlogits));
             });
}

void BenchCrossEntropy(const bench::Options& options, const ops::CrossEntropyShape& s,
                       DType dtype) {
  const Context ctx;
  const auto [tokens, width, vocab] = s.problem;
  ops::CrossEntropyArgs args;
  args.x = Random({tokens, width}, dtype, 1);
  args.w = Random({vocab, width}, dtype, 2);
  args.labels = RandomTokens(tokens, vocab);
  args.nll = Tensor::Empty({tokens}, DType::kF32);
  ops::CrossEntropyArgs with_gradients = args;
  with_gradients.grad_scale = Tensor::Scalar(1.0 / static_cast<double>(tokens));
  with_gradients.dx = Write(Tensor::Empty({tokens, width}, dtype));
  with_gradients.dw = Write(Tensor::Empty({vocab, width}, DType::kF32));
  const Tensor logits = Tensor::Empty({tokens, vocab}, dtype);
  const std::vector<double> t = Alternate(
      options,
      {[&] { LinearCrossEntropy(ctx, args); }, [&] { LinearCrossEntropy(ctx, with_gradients); },
       [&] { Gemm(ctx, args.x, Transpose::kNo, args.w, Transpose::kYes, Write(logits)); }});
  const double gflop = 2e-9 * static_cast<double>(tokens * width * vocab);
  const struct {
    const char* kind;
    double products, seconds;
  } rows[] = {{"loss", 1, t[0]}, {"loss and gradients", 3, t[1]}};
  for (const auto& row : rows) {
    const double gflops = row.products * gflop / row.seconds;
    fmt::print(
        "{{\"op\": \"cross_entropy\", \"kind\": \"{}\", \"shape\": \"{}\", \"dtype\": \"{}\", "
        "\"threads\": {}, \"gflops\": {:.1f}, \"one_product_gflops\": {:.1f}, \"ratio\": "
        "{:.3f}}}\n",
        row.kind, s.name, Name(dtype), NumThreads(), gflops, gflop / t[2], gflops * t[2] / gflop);
  }
}

// Reads g, p, m, v; writes p, m, v and the bf16 copy. The type is that of g.
void BenchAdamW(const bench::Options& options, const ops::AdamWShape& s, DType gradient) {
  const Context ctx;
  const Tensor g = Random({s.numel}, gradient, 1), p = Random({s.numel}, DType::kF32, 2);
  const Tensor m = Tensor::Zeros({s.numel}, DType::kF32), v = m.Clone();
  const Tensor low = Tensor::Empty({s.numel}, DType::kBF16);
  const ops::AdamWScalars scalars{Tensor::Scalar(1e-3), Tensor::Scalar(7), Tensor::Scalar(1)};
  BenchBytes(options, "adamw", s.name, gradient, g.bytes() + 6 * p.bytes() + low.bytes(),
             [&] { AdamW(ctx, {.weight_decay = 0.1}, scalars, g, p, m, v, low); });
}

void BenchReduce(const bench::Options& options, const ops::ReduceShape& s, DType dtype) {
  const Context ctx;
  const Tensor x = Random({s.numel}, dtype, 1), y = Random({s.numel}, dtype, 2);
  const Tensor out = Tensor::Scalar(0);
  BenchBytes(options, "sum of squares", s.name, dtype, x.bytes(),
             [&] { SumOfSquares(ctx, x, Write(out)); });
  BenchBytes(options, "add to", s.name, dtype, 3 * x.bytes(), [&] { AddTo(ctx, x, y); });
}

void Run(const bench::Options& options) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& s : ops::kEmbeddingShapes) BenchEmbedding(options, s, dtype);
    for (const auto& s : ops::kCrossEntropyShapes) BenchCrossEntropy(options, s, dtype);
    for (const auto& s : ops::kReduceShapes) BenchReduce(options, s, dtype);
  }
  for (const auto& s : ops::RouterShapes()) BenchRouter(options, s);
  for (const auto& s : ops::kAdamWShapes) {
    for (const DType gradient : {DType::kF32, DType::kBF16}) BenchAdamW(options, s, gradient);
  }
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  return cistron::bench::Main([&] { cistron::Run(cistron::bench::ParseOptions(argc, argv)); });
}
