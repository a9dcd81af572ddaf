// Attention on a GPU: checks the tensor-core implementation against the plain one, then times them
// and cuDNN.
//
//   attention_cuda_bench            checks, then timings
//   attention_cuda_bench check      checks only; exit status 1 when one fails
//   attention_cuda_bench once N     the N-th timed problem once, for a profiler
//   attention_cuda_bench packed     packed sequences: sizes of each micro-batch, or bounds of a run
//
// TFLOP/s count the arithmetic that the causal problem needs: 4·D flops a visible pair and head
// forward, 2.5 times as many backward (the kernels recompute scores and do 3.5 times as many).
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron {
namespace {

struct Case {
  std::string name;
  std::int64_t sequences, length;
  ops::AttentionConfig config;
};

Tensor Random(const Shape& shape, const ops::Context& ctx, std::uint64_t seed) {
  const Tensor t = Tensor::Empty(shape, DType::kF32);
  const RandomStream stream(seed, "attention_cuda_bench");
#pragma omp parallel for
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    t.data<float>()[i] = static_cast<float>(stream.Normal(static_cast<std::uint64_t>(i)));
  }
  return ctx.Place(ConvertTo(t, DType::kBF16));
}

// Inputs and results of one case; q, k, v are views of one projection, as a model has them.
struct Buffers {
  ops::PackedSequences sequences;
  Tensor q, k, v, d_o, o, lse, dq, dk, dv;
};
Buffers MakeBuffers(const Case& c, const ops::Context& ctx) {
  const std::int64_t tokens = c.sequences * c.length;
  const std::int64_t a = c.config.num_heads * c.config.head_dim;
  const std::int64_t b = c.config.num_kv_heads * c.config.head_dim;
  Buffers x;
  x.sequences = ops::UniformSequences(c.sequences, c.length);
  x.sequences.cu_seqlens = ctx.Place(x.sequences.cu_seqlens);
  const Tensor qkv = Random({tokens, a + 2 * b}, ctx, 1);
  x.q = qkv.Slice(1, 0, a);
  x.k = qkv.Slice(1, a, b);
  x.v = qkv.Slice(1, a + b, b);
  x.d_o = Random({tokens, a}, ctx, 2);
  x.o = ctx.Empty({tokens, a}, DType::kBF16);
  x.lse = ctx.Empty({c.config.num_heads, tokens}, DType::kF32);
  x.dq = ctx.Empty({tokens, a}, DType::kBF16);
  x.dk = ctx.Empty({tokens, b}, DType::kBF16);
  x.dv = ctx.Empty({tokens, b}, DType::kBF16);
  return x;
}

void Forward(const ops::Context& ctx, const Case& c, const Buffers& x) {
  ops::AttentionForward(ctx, c.config, x.sequences, x.q, x.k, x.v, x.lse, ops::Write(x.o));
}
void Backward(const ops::Context& ctx, const Case& c, const Buffers& x) {
  ops::AttentionBackward(ctx, c.config, x.sequences, x.d_o, x.q, x.k, x.v, x.o, x.lse,
                         ops::Write(x.dq), ops::Write(x.dk), ops::Write(x.dv));
}

// ‖got − expected‖ / ‖expected‖; NaN is never small.
double Distance(const Tensor& got, const Tensor& expected) {
  double difference = 0, size = 0;
#pragma omp parallel for reduction(+ : difference, size)
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    const double x = ElementAsDouble(got, i), y = ElementAsDouble(expected, i);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  return std::sqrt(difference / size);
}

bool Check(const Case& c, const ops::Context& plain, const ops::Context& flash) {
  const Buffers x = MakeBuffers(c, flash);
  const auto results = [&](const ops::Context& ctx) {
    for (const Tensor& t : {x.o, x.lse, x.dq, x.dk, x.dv}) FillPoison(t);
    Forward(ctx, c, x);
    Backward(ctx, c, x);
    std::vector<Tensor> copies;
    for (const Tensor& t : {x.o, x.lse, x.dq, x.dk, x.dv}) copies.push_back(t.ToHost());
    return copies;
  };
  const std::vector<Tensor> expected = results(plain), got = results(flash), again = results(flash);
  bool good = true;
  std::string line;
  const char* const names[] = {"o", "lse", "dq", "dk", "dv"};
  // Operands and results are rounded to bf16, lse is not.
  const double limits[] = {0.01, 1e-5, 0.01, 0.01, 0.01};
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double distance = Distance(got[i], expected[i]);
    const bool same =
        std::memcmp(got[i].raw(), again[i].raw(), static_cast<std::size_t>(got[i].bytes())) == 0;
    good = good && distance < limits[i] && same;
    line += fmt::format(" {} {:.1e}{}", names[i], distance, same ? "" : " (changes)");
  }
  fmt::print("check {:24} {}:{}\n", c.name, good ? "good" : "BAD", line);
  return good;
}

template <class F>
double MedianMilliseconds(const ops::Context& ctx, double seconds, F&& f) {
  f();
  const int inner = seconds < 0.1 ? 1 : 10;
  std::vector<double> times;
  double total = 0;
  while (total < seconds * 1e3 || times.size() < 3) {
    cuda::Event begin(ctx.device()), end(ctx.device());
    begin.Record();
    for (int i = 0; i < inner; ++i) f();
    end.Record();
    times.push_back(end.MillisecondsSince(begin) / inner);
    total += times.back() * inner;
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

void Time(const Case& c, const ops::Context& ctx, const std::string& name, double seconds) {
  const Buffers x = MakeBuffers(c, ctx);
  const double n = static_cast<double>(c.length);
  const double flops = 4.0 * n * (n + 1) / 2 * static_cast<double>(c.sequences) *
                       static_cast<double>(c.config.head_dim * c.config.num_heads);
  const double forward = MedianMilliseconds(ctx, seconds, [&] { Forward(ctx, c, x); });
  const double backward = MedianMilliseconds(ctx, seconds, [&] { Backward(ctx, c, x); });
  fmt::print("time {:24} {:6} forward {:9.4f} ms {:6.1f} TFLOP/s, backward {:9.4f} ms {:6.1f}\n",
             c.name, name, forward, flops / forward * 1e-9, backward,
             2.5 * flops / backward * 1e-9);
}

// A micro-batch of packed sequences, and bounds for all of its run.
struct Packed {
  std::string name;
  std::vector<std::int64_t> lengths;
  std::int64_t number = 0, longest = 0;  // 0: of the micro-batch, which may be uniform
};

std::vector<std::int64_t> Repeat(const std::vector<std::int64_t>& lengths, std::size_t times) {
  std::vector<std::int64_t> all;
  for (std::size_t i = 0; i < times; ++i) all.insert(all.end(), lengths.begin(), lengths.end());
  return all;
}

// Windows as long as proteins, log-normal with a median of 300, cut at the end of every row.
std::vector<std::int64_t> ProteinLengths(std::int64_t tokens, std::int64_t row_tokens) {
  const RandomStream stream(1, "attention_cuda_bench.lengths");
  std::vector<std::int64_t> lengths;
  std::int64_t left = 0;  // of the window that the last row cut
  std::uint64_t draws = 0;
  for (std::int64_t row = 0; row < tokens / row_tokens; ++row) {
    for (std::int64_t room = row_tokens; room > 0;) {
      if (left == 0) {
        const double drawn = 300 * std::exp(0.67 * stream.Normal(draws++));
        left = std::clamp<std::int64_t>(static_cast<std::int64_t>(drawn), 1, row_tokens);
      }
      lengths.push_back(std::min(left, room));
      left -= lengths.back();
      room -= lengths.back();
    }
  }
  return lengths;
}

void TimePacked(const Case& c, const Packed& p, const ops::Context& ctx, const std::string& name) {
  Buffers x = MakeBuffers(c, ctx);
  x.sequences = ops::PackedFromLengths(p.lengths);
  if (p.number > 0) x.sequences = ops::WithBounds(x.sequences, p.number, p.longest);
  x.sequences.cu_seqlens = ctx.Place(x.sequences.cu_seqlens);
  const auto begin = std::chrono::steady_clock::now();
  Forward(ctx, c, x);
  Backward(ctx, c, x);
  cuda::Synchronize(ctx.device());
  const std::chrono::duration<double> first = std::chrono::steady_clock::now() - begin;
  const double forward = MedianMilliseconds(ctx, 0.02, [&] { Forward(ctx, c, x); });
  const double backward = MedianMilliseconds(ctx, 0.02, [&] { Backward(ctx, c, x); });
  fmt::print(
      "packed {:16} {:20} {:16} {:6} forward {:7.4f} ms, backward {:7.4f} ms, first {:.1f} s\n",
      c.name, p.name, p.number > 0 ? fmt::format("{} of {}", p.number, p.longest) : "", name,
      forward, backward, first.count());
  std::fflush(stdout);
}

// Sizes of the micro-batch against bounds of a run, cuDNN against our own kernels: where which is
// faster decides FlashIsFaster and BoundsAreCheap (attention.cc).
void MainPacked(const ops::Context& device) {
  constexpr std::int64_t kTokens = 8192;
  const std::vector<std::int64_t> mixed = {3000, 1500, 2000, 700, 992};
  const std::vector<Packed> packed = {
      {"proteins, rows 4096", ProteinLengths(kTokens, 4096)},
      {"proteins, rows 4096", ProteinLengths(kTokens, 4096), 64, 4096},
      {"proteins, rows 512", ProteinLengths(kTokens, 512)},
      {"proteins, rows 512", ProteinLengths(kTokens, 512), 64, 512},
      {"16 of 512", Repeat({400, 624}, 8)},
      {"16 of 512", Repeat({400, 624}, 8), 24, 1024},
      {"8 of 1024", Repeat({800, 1248}, 4)},
      {"8 of 1024", Repeat({800, 1248}, 4), 12, 2048},
      {"5 of up to 3000", mixed},
      {"5 of up to 3000", mixed, 8, 4096},
      {"5 of up to 3000", mixed, 12, 4096},
      {"3000 and 5192", {3000, 5192}},
      {"3000 and 5192", {3000, 5192}, 3, 8192},
      {"uniform 256", Repeat({256}, 32)},
      {"uniform 512", Repeat({512}, 16)},
      {"uniform 1024", Repeat({1024}, 8)},
      {"uniform 2048", Repeat({2048}, 4)}};
  for (const Case& c : {Case{"32/8 heads of 128", 1, kTokens, {32, 8, 128, 0}},
                        Case{"16/4 heads of 64", 1, kTokens, {16, 4, 64, 0}},
                        Case{"6/2 heads of 32", 1, kTokens, {6, 2, 32, 0}}}) {
    for (const Packed& p : packed) {
      for (const std::string name : {"cudnn", "flash"}) {
        try {
          TimePacked(c, p, device.WithImpl(name), name);
        } catch (const Error& error) {
          fmt::print("packed {:16} {:20} {}: {}\n", c.name, p.name, name, error.what());
        }
      }
    }
  }
}

int Main(const std::string& mode, std::size_t chosen) {
  const ops::Context device(Device{DeviceType::kCuda, 0});
  const ops::Context plain = device.WithImpl("cuda"), flash = device.WithImpl("flash");
  const std::vector<Case> timed = {{"8192, 32/8 heads, D 128", 1, 8192, {32, 8, 128, 0}},
                                   {"8x1024, 8/2 heads, D 64", 8, 1024, {8, 2, 64, 0}},
                                   {"8x512, 6/2 heads, D 32", 8, 512, {6, 2, 32, 0}}};
  if (mode == "packed") {
    MainPacked(device);
    return 0;
  }
  if (mode == "once") {
    const Case& c = timed.at(chosen);
    const Buffers x = MakeBuffers(c, flash);
    Forward(flash, c, x);
    Backward(flash, c, x);
    cuda::Synchronize(flash.device());
    return 0;
  }
  bool good = true;
  for (const Case& c : {Case{"2048, 8/2 heads, D 128", 1, 2048, {8, 2, 128, 0}},
                        Case{"3x700, window 300, D 128", 3, 700, {4, 1, 128, 300}},
                        Case{"8x1024, 8/2 heads, D 64", 8, 1024, {8, 2, 64, 0}},
                        Case{"8x512, 6/2 heads, D 32", 8, 512, {6, 2, 32, 0}},
                        Case{"3x300, 4/2 heads, D 80", 3, 300, {4, 2, 80, 0}}}) {
    good = Check(c, plain, flash) && good;
  }
  if (mode == "check") return good ? 0 : 1;
  for (const Case& c : timed) {
    try {
      Time(c, device.WithImpl("cudnn"), "cudnn", 0.3);
    } catch (const Error& error) {
      fmt::print("time {:24} cudnn: {}\n", c.name, error.what());
    }
    Time(c, flash, "flash", 0.3);
    Time(c, plain, "cuda", 0.02);
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  return cistron::Main(argc < 2 ? "" : argv[1], argc < 3 ? 0 : std::stoul(argv[2]));
}
