// The experts of one MoE layer: two grouped products around a SwiGLU that the router's probability
// scales. Experts receive any number of rows, also none; rows beyond their sum are never touched.
#include <cstdio>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"

using cistron::DType;
using cistron::Shape;
using cistron::Tensor;
namespace ops = cistron::ops;

namespace {

Tensor Random(const Shape& shape, const char* name, double std) {
  const cistron::RandomStream stream(/*seed=*/1, name);
  const Tensor t = Tensor::Empty(shape, DType::kF32);
  std::uint64_t i = 0;
  for (float& v : t.span<float>()) v = static_cast<float>(std * stream.Normal(i++));
  return t;
}

int Run() {
  constexpr std::int64_t kExperts = 4, kHidden = 64, kWidth = 128, kRows = 48;
  const std::vector<std::int64_t> sizes = {7, 0, 33, 1};  // 41 of 48 rows are used
  const Tensor counts = Tensor::FromSpan<std::int64_t>({kExperts}, sizes);
  const Tensor x = Random({kRows, kHidden}, "x", 1.0);
  const Tensor probs = Random({kRows}, "probs", 0.3);
  const Tensor w1 = Random({kExperts, 2 * kWidth, kHidden}, "w1", 0.1);
  const Tensor w2 = Random({kExperts, kHidden, kWidth}, "w2", 0.1);

  const ops::Context ctx;
  const Tensor h = ctx.Zeros({kRows, 2 * kWidth}, DType::kF32);
  const Tensor a = ctx.Zeros({kRows, kWidth}, DType::kF32);
  const Tensor y = ctx.Zeros({kRows, kHidden}, DType::kF32);

  ops::GroupedGemmForward(ctx, {x, counts}, w1, ops::Write(h));
  ops::SwiGluForward(ctx, h, probs, counts, ops::Write(a));
  ops::GroupedGemmForward(ctx, {a, counts}, w2, ops::Write(y));

  double used = 0;
  double unused = 0;
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const double v = cistron::ElementAsDouble(y, i);
    (i < 41 * kHidden ? used : unused) += v * v;
  }
  std::printf("sum of squares: %.6f in used rows, %.6f in unused rows\n", used, unused);
  return used > 0 && unused == 0 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return Run();
  } catch (const cistron::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
