// How much of AdamW hides behind products that run beside it, by the number of its blocks: four
// forward products of FC1 of Mixtral-8x7B (16,384 rows, 8 experts, even) and 629 M parameters. One
// JSON line a case, milliseconds until both have ended, median over a second.
//
//   adamw_beside_products_bench
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

#include "bench/alternate.h"
#include "bench/cuda/adamw_blocks.h"
#include "cistron/base/philox.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"

namespace cistron {
namespace {

constexpr std::int64_t kRows = 16384, kHidden = 4096, kFfn = 14336, kExperts = 8;
constexpr int kProducts = 4;

// Normal values, a block of them again and again: drawing a billion takes longer than all else.
Tensor Random(const ops::Context& ctx, const Shape& shape) {
  const Tensor all = ctx.Empty(shape, DType::kBF16);
  const Tensor flat = all.Reshape({all.numel()});
  const Tensor values = Tensor::Empty({std::int64_t{1} << 22}, DType::kF32);
  const RandomStream stream(1, "adamw_beside_products_bench");
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    values.data<float>()[i] =
        static_cast<float>(0.05 * stream.Normal(static_cast<std::uint64_t>(i)));
  }
  const Tensor block = ctx.Place(ConvertTo(values, DType::kBF16));
  for (std::int64_t at = 0; at < all.numel(); at += block.numel()) {
    const std::int64_t n = std::min(block.numel(), all.numel() - at);
    CopyTo(block.Slice(0, 0, n), flat.Slice(0, at, n));
  }
  return all;
}

void Bench(const char* what, int blocks, const std::function<void()>& queue) {
  for (int i = 0; i < 2; ++i) queue();
  bench::WaitForDevice();
  std::vector<double> ms;
  for (const double start = bench::Now(CLOCK_MONOTONIC); bench::Now(CLOCK_MONOTONIC) - start < 1;) {
    const double begin = bench::Now(CLOCK_MONOTONIC);
    queue();
    bench::WaitForDevice();
    ms.push_back((bench::Now(CLOCK_MONOTONIC) - begin) * 1e3);
  }
  const auto middle = ms.begin() + static_cast<std::ptrdiff_t>(ms.size() / 2);
  std::nth_element(ms.begin(), middle, ms.end());
  fmt::print("{{\"what\": \"{}\", \"blocks\": {}, \"ms\": {:.3f}}}\n", what, blocks, *middle);
  std::fflush(stdout);
}

void Run() {
  const ops::Context ctx(Device{DeviceType::kCuda, 0});
  const Tensor w = Random(ctx, {kExperts, 2 * kFfn, kHidden});
  const std::vector<std::int64_t> even(kExperts, kRows / kExperts);
  const GroupedTensor x{Random(ctx, {kRows, kHidden}),
                        ctx.Place(Tensor::FromSpan<std::int64_t>({kExperts}, even))};
  const Tensor y = ctx.Empty({kRows, 2 * kFfn}, DType::kBF16);
  bench::AdamWOnBlocks adamw(std::int64_t{600} << 20);
  const auto products = [&] {
    for (int i = 0; i < kProducts; ++i) ops::GroupedGemmForward(ctx, x, w, ops::Write(y));
  };
  constexpr int kAll = 4 * 132;  // as many as a Hopper GPU holds
  Bench("products", 0, products);
  Bench("adamw", kAll, [&] { adamw.Start(kAll); });
  Bench("one after the other", kAll, [&] {
    products();
    bench::WaitForDevice();
    adamw.Start(kAll);
  });
  for (const int blocks : {8, 12, 16, 24, 32, 48}) {
    Bench("adamw", blocks, [&] { adamw.Start(blocks); });
    Bench("both at once", blocks, [&] {
      adamw.Start(blocks);
      products();
    });
  }
}

}  // namespace
}  // namespace cistron

int main() {
  try {
    cistron::Run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
