// Ops on a GPU that memory bounds, each beside a device copy of as many bytes in the same run.
//
//   memory_ops_bench       JSON lines: op, shape, ms, bytes read and written, TB/s, share of the
//   copy
//
// Bytes are those that an op must read and write once. Buffers rotate, so that none is in the L2
// cache; op and copy alternate in rounds, each round timed by events, and medians are compared.
#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/ops/norm/norm.h"
#include "cistron/ops/optimizer/adamw.h"
#include "cistron/ops/permute/permute.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/tensor/cuda_graph.h"

namespace cistron {
namespace {

constexpr int kRounds = 15;
constexpr std::int64_t kL2Bytes = 60 << 20;

const ops::Context& Ctx() {
  static const ops::Context ctx(Device{DeviceType::kCuda, 0});
  return ctx;
}

Tensor Random(const Shape& shape, DType dtype, double offset = 0) {
  const Tensor t = Tensor::Empty(shape, DType::kF32);
  const RandomStream stream(7, "memory_ops_bench");
  // A period suffices: values do not matter to the time, but must not be zeros.
  const std::int64_t n = t.numel(), period = std::min<std::int64_t>(n, 1 << 16);
  for (std::int64_t i = 0; i < period; ++i) {
    t.data<float>()[i] =
        static_cast<float>(offset + 0.1 * stream.Normal(static_cast<std::uint64_t>(i)));
  }
  for (std::int64_t i = period; i < n; ++i) t.data<float>()[i] = t.data<float>()[i - period];
  return Ctx().Place(ConvertTo(t, dtype));
}

double MsOf(const std::function<void(int)>& run, int calls) {
  cuda::Event begin(Ctx().device()), end(Ctx().device());
  begin.Record();
  for (int i = 0; i < calls; ++i) run(i);
  end.Record();
  return end.MillisecondsSince(begin) / calls;
}

// `sets`: how many sets of buffers `run` rotates over.
void Report(const std::string& op, const std::string& shape, double bytes,
            const std::function<void(int)>& run) {
  const auto half = static_cast<std::int64_t>(bytes / 2) / 16 * 16;
  const std::int64_t sets = std::max<std::int64_t>(1, 4 * kL2Bytes / half);
  const Tensor from = Ctx().Zeros({sets, half}, DType::kU8),
               to = Ctx().Zeros({sets, half}, DType::kU8);
  const auto copy = [&](int i) {
    cuda::CopyLater(to.Select(i % sets).raw(), from.Select(i % sets).raw(), Ctx().device(),
                    static_cast<std::size_t>(half));
  };
  const int calls = std::max(3, static_cast<int>(20e9 / bytes));  // about 5 ms a round
  std::vector<double> ours, copies;
  for (int round = 0; round < kRounds + 1; ++round) {
    const double a = MsOf(run, calls), b = MsOf(copy, calls);
    if (round == 0) continue;
    ours.push_back(a);
    copies.push_back(b);
  }
  std::sort(ours.begin(), ours.end());
  std::sort(copies.begin(), copies.end());
  const double ms = ours[kRounds / 2], copy_ms = copies[kRounds / 2];
  fmt::print(
      "{{\"op\": \"{}\", \"shape\": \"{}\", \"ms\": {:.4f}, \"bytes\": {:.3e}, \"tb_per_s\": "
      "{:.3f}, "
      "\"copy_tb_per_s\": {:.3f}, \"of_copy\": {:.3f}}}\n",
      op, shape, ms, bytes, bytes / ms / 1e9, bytes / copy_ms / 1e9, copy_ms / ms);
  std::fflush(stdout);
}

int SetsFor(double bytes) {
  return std::max(1, static_cast<int>(4.0 * static_cast<double>(kL2Bytes) / bytes));
}

void BenchAdamW(std::int64_t n, bool masters, DType gradient) {
  const DType state = masters ? DType::kF32 : DType::kBF16;
  const auto size = static_cast<std::int64_t>(SizeOf(state));
  const auto read = static_cast<std::int64_t>(SizeOf(gradient));
  const double bytes = static_cast<double>(n * (read + 6 * size + (masters ? 2 : 0)));
  const Tensor g = Random({n}, gradient), p = Random({n}, state), m = Random({n}, state);
  const Tensor v = Random({n}, state, 1.0);
  const Tensor low = masters ? Ctx().Zeros({n}, DType::kBF16) : Tensor();
  const ops::AdamWScalars scalars{Ctx().Place(Tensor::Scalar(1e-6)), Ctx().Place(Tensor::Scalar(3)),
                                  Ctx().Place(Tensor::Scalar(1))};
  Report(fmt::format("adamw, {}, {} gradients", masters ? "fp32 masters" : "bf16 states",
                     Name(gradient)),
         fmt::format("{}", n), bytes,
         [&](int) { ops::AdamW(Ctx(), {}, scalars, g, p, m, v, low); });
}

void BenchNorm(std::int64_t rows, std::int64_t width) {
  const auto n = static_cast<double>(rows * width);
  const int sets = SetsFor(8 * n);
  std::vector<Tensor> x, residual, h, y, dy, dh;
  for (int i = 0; i < sets; ++i) {
    for (auto* list : {&x, &residual, &h, &y, &dy, &dh}) {
      list->push_back(Random({rows, width}, DType::kBF16));
    }
  }
  const Tensor g = Random({width}, DType::kBF16, 1.0), rstd = Ctx().Zeros({rows}, DType::kF32);
  const Tensor dg = Ctx().Zeros({width}, DType::kF32);
  const std::string shape = fmt::format("{}x{}", rows, width);
  Report("rms_norm forward, with residual", shape, 8 * n, [&](int i) {
    const auto s = static_cast<std::size_t>(i % sets);
    ops::RmsNormForward(Ctx(), x[s], residual[s], g, 1e-5, h[s], rstd, ops::Write(y[s]));
  });
  Report("rms_norm backward, with residual", shape, 8 * n, [&](int i) {
    const auto s = static_cast<std::size_t>(i % sets);
    ops::RmsNormBackward(Ctx(), dy[s], h[s], rstd, g, dh[s], ops::Write(x[s]), ops::Write(dg));
  });
}

void BenchPermute(std::int64_t tokens, std::int64_t width, std::int64_t experts,
                  std::int64_t top_k) {
  const Tensor chosen = Tensor::Empty({tokens, top_k}, DType::kI32);
  const RandomStream stream(9, "experts");
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto first = static_cast<std::int64_t>(
        stream.Below(static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(experts)));
    for (std::int64_t k = 0; k < top_k; ++k) {
      chosen.data<std::int32_t>()[t * top_k + k] = static_cast<std::int32_t>((first + k) % experts);
    }
  }
  const ops::RowMap map = ops::BuildRowMap(Ctx(), Ctx().Place(chosen), experts);
  const double bytes = static_cast<double>(tokens * width * 2 * (1 + top_k));
  const int sets = SetsFor(bytes);
  std::vector<Tensor> x, rows;
  for (int i = 0; i < sets; ++i) {
    x.push_back(Random({tokens, width}, DType::kBF16));
    rows.push_back(Random({tokens * top_k, width}, DType::kBF16));
  }
  const std::string shape = fmt::format("{}x{}, {} experts, top-{}", tokens, width, experts, top_k);
  Report("permute", shape, bytes, [&](int i) {
    const auto s = static_cast<std::size_t>(i % sets);
    ops::Permute(Ctx(), map, x[s], ops::Write(rows[s]));
  });
  Report("unpermute", shape, bytes, [&](int i) {
    const auto s = static_cast<std::size_t>(i % sets);
    ops::Unpermute(Ctx(), map, rows[s], Tensor(), ops::Write(x[s]));
  });
}

void BenchNormOfGradients(std::int64_t n) {
  const Tensor list[] = {Random({n}, DType::kF32)};
  const Tensor out = Ctx().Zeros({}, DType::kF64);
  Report("gradient norm", fmt::format("{}", n), 4.0 * static_cast<double>(n),
         [&](int) { ops::SumOfSquaresOfAll(Ctx(), list, ops::Write(out)); });
}

int Main() {
  BenchAdamW(std::int64_t{1} << 26, true, DType::kF32);
  BenchAdamW(std::int64_t{1} << 26, true, DType::kBF16);
  BenchAdamW(std::int64_t{1} << 26, false, DType::kBF16);
  BenchNormOfGradients(std::int64_t{1} << 28);
  for (const auto& [rows, width] : {std::pair<std::int64_t, std::int64_t>{8192, 4096},
                                    {16384, 2048},
                                    {8192, 512},
                                    {32768, 256}}) {
    BenchNorm(rows, width);
  }
  BenchPermute(8192, 4096, 8, 2);
  BenchPermute(16384, 2048, 128, 8);
  BenchPermute(16384, 768, 32, 2);
  BenchPermute(32768, 256, 8, 2);
  return 0;
}

}  // namespace
}  // namespace cistron

int main() {
  return cistron::Main();
}
