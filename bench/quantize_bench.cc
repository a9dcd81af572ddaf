// Quantisation and products of quantised operands beside what bounds them: one JSON line a case.
//
//   quantize_bench [--clock wall|cpu] [--seconds S]
//
// quantize: bytes read and written, beside memcpy and a plain vector copy of as many, on data
// larger than the caches that nobody has touched for long.
#include <fmt/core.h>

#include "bench/alternate.h"
#include "bench/copy.h"
#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_cases.h"
#include "cistron/ops/instruction_set.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantize/quantize_cases.h"
#include "cistron/ops/quantized_gemm/quantized_gemm.h"
#include "cistron/ops/quantized_gemm/quantized_gemm_cases.h"

namespace cistron {
namespace {

using bench::Alternate;
using ops::Context;
using ops::Write;

Tensor Random(const Shape& shape, DType dtype, std::uint64_t seed) {
  const Tensor t = Tensor::Empty(shape, DType::kF32);
  const RandomStream stream(seed, "quantize_bench");
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    t.data<float>()[i] = stream.Uniform(static_cast<std::uint64_t>(i)) - 0.5f;
  }
  return ConvertTo(t, dtype);
}

void BenchQuantize(const bench::Options& options, const ops::QuantizeShape& s, DType dtype,
                   Scaling scaling, DType format) {
  const Context ctx;
  const Shape shape{s.rows, s.cols};
  const Tensor x = Random(shape, dtype, 1), y = x.Clone();
  struct Variant {
    const char* name;
    QuantizedTensor q;
    std::int64_t bytes;
    bool decode;
  };
  std::vector<Variant> variants;
  const auto add = [&](const char* name, bool rows, bool cols, bool decode) {
    const QuantizedTensor q = EmptyQuantized(ctx, shape, {}, {scaling, format}, {rows, cols});
    Quantize(ctx, x, true, {}, q);
    // kTensor reads x twice: for its amax and for its codes.
    const std::int64_t reads = scaling == Scaling::kTensor && !decode ? 2 : 1;
    variants.push_back({name, q, reads * x.bytes() + q.bytes(), decode});
  };
  if (IsDirectionless(scaling)) {
    add("both", true, true, false);
  } else {
    add("row-wise", true, false, false);
    add("column-wise", false, true, false);
    add("both", true, true, false);
  }
  add("decode", true, false, true);
  for (const Variant& v : variants) {
    const bench::Copies copies = bench::CopiesOf(v.bytes);
    const auto run = [&] {
      if (v.decode) {
        Dequantize(ctx, v.q, Direction::kRowwise, Write(y));
      } else {
        Quantize(ctx, x, true, {}, v.q);
      }
    };
    const std::vector<double> t = Alternate(options, {run, copies.memcpy, copies.vector});
    const double gb = static_cast<double>(v.bytes) * 1e-9;
    fmt::print(
        "{{\"op\": \"quantize\", \"copies\": \"{}\", \"scaling\": \"{}\", \"format\": \"{}\", "
        "\"shape\": \"{}\", \"dtype\": \"{}\", \"isa\": \"{}\", \"threads\": {}, \"gb_per_s\": "
        "{:.1f}, \"memcpy_gb_per_s\": {:.1f}, \"vector_copy_gb_per_s\": {:.1f}, \"of_memcpy\": "
        "{:.3f}, \"of_vector_copy\": {:.3f}}}\n",
        v.name, Name(scaling), Name(format), s.name, Name(dtype), ops::InstructionSetInUse(),
        NumThreads(), gb / t[0], gb / t[1], gb / t[2], t[1] / t[0], t[2] / t[0]);
    std::fflush(stdout);
  }
}

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

void BenchProducts(const bench::Options& options, const ops::GroupedGemmShape& s,
                   const ops::QuantizedGemmRecipe& recipe, DType dtype) {
  const Context ctx;
  const DType grad = ComputeType(dtype);
  const Tensor splits = UnevenSplit(s.groups, s.rows);
  const Tensor x = Random({s.rows, s.k}, dtype, 1), dy = Random({s.rows, s.n}, dtype, 2);
  const Tensor w = Random({s.groups, s.n, s.k}, dtype, 3);
  const Tensor y = Tensor::Empty({s.rows, s.n}, dtype), dx = Tensor::Empty({s.rows, s.k}, dtype);
  const Tensor dw = Tensor::Empty({s.groups, s.n, s.k}, grad);
  const auto quantized = [&](const Tensor& t, const Tensor& split, const QuantizedLayout& layout) {
    const QuantizedTensor q = EmptyQuantized(ctx, t.shape(), split, layout, {});
    Quantize(ctx, t, true, {}, q);
    return q;
  };
  const QuantizedTensor qx = quantized(x, splits, recipe.activation);
  const QuantizedTensor qw = quantized(w, {}, recipe.weight);
  const QuantizedTensor qdy = quantized(dy, splits, recipe.gradient);
  const std::vector<double> t =
      Alternate(options, {[&] { QuantizedGemmForward(ctx, qx, qw, Write(y)); },
                          [&] {
                            GroupedGemmForward(ctx, {x, splits}, w, Write(y));
                          },
                          [&] { QuantizedGemmDgrad(ctx, qdy, qw, Write(dx)); },
                          [&] {
                            GroupedGemmDgrad(ctx, {dy, splits}, w, Write(dx));
                          },
                          [&] { QuantizedGemmWgrad(ctx, qdy, qx, Write(dw)); },
                          [&] {
                            GroupedGemmWgrad(ctx, {dy, splits}, {x, splits}, Write(dw));
                          }});
  const double gflop = 2e-9 * static_cast<double>(s.rows * s.n * s.k);
  const char* kinds[] = {"forward", "dgrad", "wgrad"};
  for (std::size_t i = 0; i < 3; ++i) {
    fmt::print(
        "{{\"op\": \"quantized_gemm\", \"kind\": \"{}\", \"recipe\": \"{}\", \"shape\": \"{}\", "
        "\"beside\": \"{}\", \"isa\": \"{}\", \"threads\": {}, \"gflops\": {:.1f}, "
        "\"plain_gflops\": {:.1f}, \"ratio\": {:.3f}}}\n",
        kinds[i], recipe.name, s.name, Name(dtype), ops::InstructionSetInUse(), NumThreads(),
        gflop / t[2 * i], gflop / t[2 * i + 1], t[2 * i + 1] / t[2 * i]);
  }
  std::fflush(stdout);
}

void Run(const bench::Options& options) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const ops::GroupedGemmShape& s : ops::kGroupedGemmShapes) {
      BenchProducts(options, s, ops::kQuantizedGemmRecipes[0], dtype);
    }
    for (const ops::QuantizedGemmRecipe& recipe : ops::kQuantizedGemmRecipes) {
      if (&recipe == &ops::kQuantizedGemmRecipes[0]) continue;
      BenchProducts(options, ops::kGroupedGemmShapes[2], recipe, dtype);
    }
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const ops::QuantizeShape& s : ops::kQuantizeShapes) {
      BenchQuantize(options, s, dtype, Scaling::kMxfp8, DType::kE4M3);
    }
    for (const Scaling scaling : ops::kScalings) {
      const DType format = scaling == Scaling::kMxfp8 ? DType::kE5M2 : DType::kE4M3;
      BenchQuantize(options, ops::kQuantizeShapes[1], dtype, scaling, format);
    }
  }
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  return cistron::bench::Main([&] { cistron::Run(cistron::bench::ParseOptions(argc, argv)); });
}
