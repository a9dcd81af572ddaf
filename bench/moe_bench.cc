// The ops of an MoE layer beside what bounds them: one JSON line a case.
//
//   moe_bench [--clock wall|cpu] [--seconds S]
//
// grouped_gemm: uneven groups beside one oneDNN product of the summed size (dnnl_sgemm, for bf16
// our gemm on oneDNN); `ratio` is ours / that. swiglu, permute: bytes that must move, beside two
// copies that read and write as many in all (bytes.h), every op alternating with its copies. Take
// OMP_NUM_THREADS=1 with --clock cpu.
#include <fmt/core.h>
#include <oneapi/dnnl/dnnl.h>

#include "bench/alternate.h"
#include "bench/bytes.h"
#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/activation/activation_cases.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_cases.h"
#include "cistron/ops/permute/permute.h"

namespace cistron {
namespace {

using bench::Alternate;
using bench::BenchBytes;
using bench::Random;
using ops::Context;
using ops::Transpose;
using ops::Write;

// Group sizes proportional to 1, 2, 3, 4, 1, 2, …
Tensor UnevenSplit(std::int64_t groups, std::int64_t rows) {
  const Tensor splits = Tensor::Zeros({groups}, DType::kI64);
  std::int64_t weights = 0, left = rows;
  for (std::int64_t e = 0; e < groups; ++e) weights += e % 4 + 1;
  for (std::int64_t e = 0; e < groups; ++e) {
    splits.data<std::int64_t>()[e] = e + 1 == groups ? left : rows * (e % 4 + 1) / weights;
    left -= splits.data<std::int64_t>()[e];
  }
  return splits;
}

// What a grouped product is measured against.
void OneProduct(const Tensor& a, Transpose trans_a, const Tensor& b, Transpose trans_b,
                const Tensor& c) {
  if (a.dtype() != DType::kF32) return Gemm(Context(), a, trans_a, b, trans_b, Write(c));
  const bool ta = trans_a == Transpose::kYes;
  dnnl_sgemm(ta ? 'T' : 'N', trans_b == Transpose::kYes ? 'T' : 'N', c.dim(0), c.dim(1),
             a.dim(ta ? 0 : 1), 1.0f, a.data<float>(), a.stride(0), b.data<float>(), b.stride(0),
             0.0f, c.data<float>(), c.stride(0));
}

void BenchGrouped(const bench::Options& options, const ops::GroupedGemmShape& s, DType dtype) {
  const Context ctx;
  const DType grad = ComputeType(dtype);
  const Tensor x = Random({s.rows, s.k}, dtype, 1), dy = Random({s.rows, s.n}, dtype, 2);
  const Tensor w = Random({s.groups, s.n, s.k}, dtype, 3), one_w = w.Select(0);
  const Tensor y = Tensor::Empty({s.rows, s.n}, dtype), dx = Tensor::Empty({s.rows, s.k}, dtype);
  const Tensor dw = Tensor::Empty({s.groups, s.n, s.k}, grad), one_dw = dw.Select(0);
  const Tensor splits = UnevenSplit(s.groups, s.rows);
  const std::vector<double> t =
      Alternate(options, {[&] {
                            GroupedGemmForward(ctx, {x, splits}, w, Write(y));
                          },
                          [&] { OneProduct(x, Transpose::kNo, one_w, Transpose::kYes, y); },
                          [&] {
                            GroupedGemmDgrad(ctx, {dy, splits}, w, Write(dx));
                          },
                          [&] { OneProduct(dy, Transpose::kNo, one_w, Transpose::kNo, dx); },
                          [&] {
                            GroupedGemmWgrad(ctx, {dy, splits}, {x, splits}, Write(dw));
                          },
                          [&] { OneProduct(dy, Transpose::kYes, x, Transpose::kNo, one_dw); }});
  const double gflop = 2e-9 * static_cast<double>(s.rows * s.n * s.k);
  const char* kinds[] = {"forward", "dgrad", "wgrad"};
  for (std::size_t i = 0; i < 3; ++i) {
    fmt::print(
        "{{\"op\": \"grouped_gemm\", \"kind\": \"{}\", \"shape\": \"{}\", \"dtype\": \"{}\", "
        "\"groups\": {}, \"rows\": {}, \"n\": {}, \"k\": {}, \"threads\": {}, \"gflops\": {:.1f}, "
        "\"one_product_gflops\": {:.1f}, \"ratio\": {:.3f}}}\n",
        kinds[i], s.name, Name(dtype), s.groups, s.rows, s.n, s.k, NumThreads(), gflop / t[2 * i],
        gflop / t[2 * i + 1], t[2 * i + 1] / t[2 * i]);
  }
}

void BenchSwiGlu(const bench::Options& options, const ops::SwiGluShape& s, DType dtype) {
  const Context ctx;
  const Tensor x = Random({s.rows, 2 * s.width}, dtype, 1);
  const Tensor dy = Random({s.rows, s.width}, dtype, 2);
  const Tensor scale = Random({s.rows}, DType::kF32, 3);
  const Tensor y = Tensor::Empty({s.rows, s.width}, dtype);
  const Tensor dx = Tensor::Empty({s.rows, 2 * s.width}, dtype);
  const Tensor dscale = Tensor::Empty({s.rows}, DType::kF32);
  const std::int64_t column = s.rows * s.width * static_cast<std::int64_t>(SizeOf(dtype));
  BenchBytes(options, "swiglu forward", s.name, dtype, 3 * column,
             [&] { SwiGluForward(ctx, x, scale, {}, Write(y)); });
  BenchBytes(options, "swiglu backward", s.name, dtype, 6 * column,
             [&] { SwiGluBackward(ctx, dy, x, scale, {}, Write(dx), Write(dscale), Write(y)); });
}

void BenchPermute(const bench::Options& options, const char* name, std::int64_t tokens,
                  std::int64_t top_k, std::int64_t experts, std::int64_t width, DType dtype) {
  const Context ctx;
  const Tensor chosen = Tensor::Empty({tokens, top_k}, DType::kI32);
  const RandomStream stream(7, "experts");
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::uint64_t first =
        stream.Below(static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(experts));
    for (std::int64_t k = 0; k < top_k; ++k) {
      chosen.data<std::int32_t>()[t * top_k + k] =
          static_cast<std::int32_t>((static_cast<std::int64_t>(first) + 3 * k) % experts);
    }
  }
  const ops::RowMap map = BuildRowMap(ctx, chosen, experts);
  const Tensor x = Random({tokens, width}, dtype, 1), y = x.Clone();
  const Tensor rows = Random({tokens * top_k, width}, dtype, 2), drows = rows.Clone();
  const Tensor probs = Random({tokens, top_k}, DType::kF32, 3), dprobs = probs.Clone();
  const std::int64_t token_bytes = x.bytes(), row_bytes = rows.bytes();
  const std::vector<double> t = Alternate(options, {[&] { BuildRowMap(ctx, chosen, experts); }});
  fmt::print("{{\"op\": \"row map\", \"shape\": \"{}\", \"assignments\": {}, \"us\": {:.1f}}}\n",
             name, tokens * top_k, t[0] * 1e6);
  BenchBytes(options, "permute", name, dtype, token_bytes + row_bytes,
             [&] { Permute(ctx, map, x, Write(rows)); });
  BenchBytes(options, "unpermute", name, dtype, token_bytes + row_bytes,
             [&] { Unpermute(ctx, map, rows, probs, Write(y)); });
  BenchBytes(options, "unpermute backward", name, dtype, token_bytes + 2 * row_bytes,
             [&] { UnpermuteBackward(ctx, map, x, rows, probs, Write(drows), Write(dprobs)); });
}

void Run(const bench::Options& options) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const ops::GroupedGemmShape& s : ops::kGroupedGemmShapes) BenchGrouped(options, s, dtype);
    for (const ops::SwiGluShape& s : ops::kSwiGluShapes) BenchSwiGlu(options, s, dtype);
    BenchPermute(options, "small", 4096, 2, 8, 192, dtype);
    BenchPermute(options, "fine", 2048, 4, 32, 256, dtype);
  }
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  return cistron::bench::Main([&] { cistron::Run(cistron::bench::ParseOptions(argc, argv)); });
}
