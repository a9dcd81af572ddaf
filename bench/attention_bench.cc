// Attention forward and backward beside one large product of the same machine: one JSON line a
// case.
//
//   attention_bench [--isa avx2] [--repeats N] [--clock wall|cpu]
//
// --clock cpu counts the processor time of the process: with OMP_NUM_THREADS=1 it tells something
// on a machine that is busy with other work.
//
// gflops counts the arithmetic that the masked problem needs (2·D flops a visible pair and product;
// 2 products forward, 5 backward); peak is the best of a dnnl_sgemm of 1024³ that alternates with
// it. With --isa avx2 set also ONEDNN_MAX_CPU_ISA=AVX2, which oneDNN reads.
#include <fmt/core.h>
#include <hwy/targets.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <functional>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/ops/attention/attention_cases.h"

namespace cistron {
namespace {

double Now(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Seconds that f takes.
class Stopwatch {
 public:
  explicit Stopwatch(clockid_t clock) : clock_(clock) {}
  double operator()(const std::function<void()>& f) const {
    const double start = Now(clock_);
    f();
    return Now(clock_) - start;
  }

 private:
  clockid_t clock_;
};

Tensor Random(const Shape& shape, DType dtype, std::uint64_t seed) {
  const Tensor t = Tensor::Empty(shape, DType::kF32);
  const RandomStream stream(seed, "attention_bench");
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    t.data<float>()[i] = static_cast<float>(stream.Normal(static_cast<std::uint64_t>(i)));
  }
  return ConvertTo(t, dtype);
}

double PeakGflops(const Stopwatch& seconds) {
  constexpr std::int64_t n = 1024;
  static const Tensor a = Random({n, n}, DType::kF32, 1), b = Random({n, n}, DType::kF32, 2);
  static const Tensor c = Tensor::Zeros({n, n}, DType::kF32);
  const double s = seconds([&] {
    dnnl_sgemm('N', 'N', n, n, n, 1.0f, a.data<float>(), n, b.data<float>(), n, 0.0f,
               c.data<float>(), n);
  });
  return 2.0 * n * n * n / s * 1e-9;
}

void Run(const ops::AttentionCase& c, DType dtype, int repeats, const Stopwatch& seconds) {
  const ops::Context ctx;
  const ops::AttentionConfig& config = c.config;
  const ops::PackedSequences sequences = ops::PackedFromLengths(c.lengths);
  const std::int64_t tokens = sequences.positions.dim(0);
  // q, k, v as views of one projection, as a model has them.
  const std::int64_t q_width = config.num_heads * config.head_dim;
  const std::int64_t kv_width = config.num_kv_heads * config.head_dim;
  const Tensor qkv = Random({tokens, q_width + 2 * kv_width}, dtype, 3);
  const Tensor q = qkv.Slice(1, 0, q_width), k = qkv.Slice(1, q_width, kv_width);
  const Tensor v = qkv.Slice(1, q_width + kv_width, kv_width);
  const Tensor o = Tensor::Zeros({tokens, q_width}, dtype);
  const Tensor d_o = Random({tokens, q_width}, dtype, 4);
  const Tensor lse = Tensor::Zeros({config.num_heads, tokens}, DType::kF32);
  const Tensor dqkv = Tensor::Zeros({tokens, q_width + 2 * kv_width}, dtype);

  double pairs = 0;
  for (const std::int64_t n : c.lengths) {
    for (std::int64_t i = 0; i < n; ++i) {
      pairs += static_cast<double>(config.window == 0 ? i + 1 : std::min(i + 1, config.window));
    }
  }
  const double product = 2.0 * static_cast<double>(q_width) * pairs;
  double forward = 1e30, backward = 1e30, peak = 0;
  for (int r = 0; r < repeats; ++r) {
    peak = std::max(peak, PeakGflops(seconds));
    forward = std::min(forward, seconds([&] {
                         ops::AttentionForward(ctx, config, sequences, q, k, v, lse, ops::Write(o));
                       }));
    backward =
        std::min(backward, seconds([&] {
                   ops::AttentionBackward(ctx, config, sequences, d_o, q, k, v, o, lse,
                                          ops::Write(dqkv.Slice(1, 0, q_width)),
                                          ops::Write(dqkv.Slice(1, q_width, kv_width)),
                                          ops::Write(dqkv.Slice(1, q_width + kv_width, kv_width)));
                 }));
  }
  const double f = 2 * product / forward * 1e-9, b = 5 * product / backward * 1e-9;
  fmt::print(
      "{{\"op\": \"attention\", \"case\": \"{}\", \"dtype\": \"{}\", \"sequences\": {}, "
      "\"seq_len\": {}, "
      "\"heads\": {}, \"kv_heads\": {}, \"head_dim\": {}, \"window\": {}, \"threads\": {}, "
      "\"forward_ms\": {:.3f}, \"backward_ms\": {:.3f}, \"forward_gflops\": {:.1f}, "
      "\"backward_gflops\": {:.1f}, \"sgemm_gflops\": {:.1f}, \"forward_of_sgemm\": {:.3f}, "
      "\"backward_of_sgemm\": {:.3f}}}\n",
      c.name, Name(dtype), c.lengths.size(), sequences.max_length, config.num_heads,
      config.num_kv_heads, config.head_dim, config.window, NumThreads(), forward * 1e3,
      backward * 1e3, f, b, peak, f / peak, b / peak);
  std::fflush(stdout);
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  int repeats = 9;
  clockid_t clock = CLOCK_MONOTONIC;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--repeats") == 0) repeats = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--clock") == 0 && std::strcmp(argv[i + 1], "cpu") == 0) {
      clock = CLOCK_PROCESS_CPUTIME_ID;
    }
    if (std::strcmp(argv[i], "--isa") == 0 && std::strcmp(argv[i + 1], "avx2") == 0) {
      hwy::SetSupportedTargetsForTest(HWY_AVX2);
      hwy::GetChosenTarget().Update(HWY_AVX2);
    }
  }
  for (const auto& c : cistron::ops::AttentionBenchmarkCases()) {
    for (const cistron::DType dtype : {cistron::DType::kF32, cistron::DType::kBF16}) {
      cistron::Run(c, dtype, repeats, cistron::Stopwatch(clock));
    }
  }
}
