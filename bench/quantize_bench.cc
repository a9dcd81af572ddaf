// Quantisation beside what bounds it: one JSON line a case.
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
#include "cistron/ops/instruction_set.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantize/quantize_cases.h"

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

void Run(const bench::Options& options) {
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
  try {
    cistron::Run(cistron::bench::ParseOptions(argc, argv));
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
  return 0;
}
