// jitter: checks, and both implementations on the CPU. All give the same bits.
#include "cistron/ops/jitter/jitter.h"

#include <algorithm>

#include "cistron/base/threads.h"
#include "cistron/ops/check_tensor.h"
#include "cistron/ops/jitter/jitter_impls.h"

namespace cistron::ops {
namespace {

using internal::JitterStream;
using internal::kJitterWords;
using internal::SignedJitter;

constexpr std::string_view kOp = "jitter";

template <class T>
void Apply(const T& x, Compute<T> factor, WriteMode mode, T& y) {
  using C = Compute<T>;
  C value = static_cast<C>(x) * factor;
  if (mode == WriteMode::kAccumulate) value += static_cast<C>(y);
  y = static_cast<T>(value);
}

Support Supports(const JitterProblem& p) {
  const bool ok = p.dtype == DType::kF64 || p.dtype == DType::kF32 || p.dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

// One element after another.
void JitterRef(const Context&, const JitterConfig& config, const Tensor& step, const Tensor& x,
               const Output& y) {
  DispatchFloat(kOp, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RandomStream stream = JitterStream(config, *step.data<std::int64_t>());
    const auto amplitude = static_cast<Compute<T>>(config.amplitude);
    const auto first = static_cast<std::uint64_t>(config.first_token * x.dim(1));
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const auto s = SignedJitter<Compute<T>>(stream.Bits(first + static_cast<std::uint64_t>(i)));
      Apply(x.data<T>()[i], 1 + amplitude * s, y.mode, y.tensor.data<T>()[i]);
    }
  });
}

// Four elements from each draw, rows by threads.
void JitterCpu(const Context&, const JitterConfig& config, const Tensor& step, const Tensor& x,
               const Output& y) {
  DispatchFloat(kOp, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RandomStream stream = JitterStream(config, *step.data<std::int64_t>());
    const auto amplitude = static_cast<Compute<T>>(config.amplitude);
    const std::int64_t first = config.first_token * x.dim(1);  // of the global batch
    const std::int64_t end = first + x.numel();
    const std::int64_t first_block = first / kJitterWords;
    const std::int64_t blocks = (end + kJitterWords - 1) / kJitterWords - first_block;
    const T* in = x.data<T>();
    T* out = y.tensor.data<T>();
    ParallelFor(x.numel() == 0 ? 0 : blocks, 1 << 10, [&](std::int64_t b) {
      const std::int64_t at = (first_block + b) * kJitterWords;
      const PhiloxBlock words = stream.Block(static_cast<std::uint64_t>(first_block + b));
      for (std::int64_t k = std::max<std::int64_t>(0, first - at);
           k < std::min(kJitterWords, end - at); ++k) {
        const auto s = SignedJitter<Compute<T>>(words[static_cast<std::size_t>(k)]);
        Apply(in[at + k - first], 1 + amplitude * s, y.mode, out[at + k - first]);
      }
    });
  });
}

}  // namespace

std::span<const JitterImpl> JitterImpls() {
  static const JitterImpl list[] = {
      kJitterCuda, {"cpu", Supports, JitterCpu}, {"ref", Supports, JitterRef}};
  return list;
}

void Jitter(const Context& ctx, const JitterConfig& config, const Tensor& step, const Tensor& x,
            const Output& y) {
  CISTRON_CHECK(config.amplitude >= 0 && config.amplitude < 1,
                "jitter: amplitude {} is outside [0, 1)", config.amplitude);
  CISTRON_CHECK(config.first_token >= 0, "jitter: first_token is {}", config.first_token);
  CISTRON_CHECK(x && x.rank() == 2, "jitter: x is {}, expected [T, H]", Describe(x));
  CheckTensor(kOp, "x", x, x.shape(), x.dtype());
  CheckTensor(kOp, "y", y.tensor, x.shape(), x.dtype());
  CheckTensor(kOp, "step", step, {}, DType::kI64);
  Select(ctx, kOp, JitterImpls(), JitterProblem{x.dtype(), x.dim(0), x.dim(1)})(ctx, config, step,
                                                                                x, y);
}

}  // namespace cistron::ops
