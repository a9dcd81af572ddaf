#include "cistron/ops/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/cross_entropy/cross_entropy_cases.h"
#include "cistron/ops/cross_entropy/cross_entropy_impls.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::ForEachImplementation;

using Case = CrossEntropyCase;

Tensor Labels(const Case& c, bool ignore_some = true) {
  const Tensor labels = Tensor::Empty({c.tokens}, DType::kI64);
  testing::FillIntegers(labels, "labels", 0, c.vocab);
  if (ignore_some) {
    for (std::int64_t t = 2; t < c.tokens; t += 5) labels.data<std::int64_t>()[t] = kIgnoreLabel;
  }
  return labels;
}

Tensor Weights(const Case& c) {
  const Tensor weights = testing::Uniform({c.tokens}, DType::kF32, "weights", 0.0, 2.0);
  for (std::int64_t t = 3; t < c.tokens; t += 7) weights.data<float>()[t] = 0;
  return weights;
}

// Inputs and poisoned outputs.
struct Call {
  CrossEntropyArgs args;
  std::vector<Tensor> tails;

  Call(const Case& c, DType dtype, WriteMode mode = WriteMode::kWrite) {
    args.x = testing::Pad(testing::Normal({c.tokens, c.width}, dtype, "x"), 3).used;
    args.w = testing::Pad(testing::Normal({c.vocab, c.width}, dtype, "w", 0.5), 3).used;
    args.labels = Labels(c);
    args.weights = Weights(c);
    args.grad_scale = Tensor::Scalar(0.37);
    args.nll = Padded(Tensor(), {c.tokens}, ComputeType(dtype));
    args.dx = {Output0({c.tokens, c.width}, dtype, "dx0", mode), mode};
    args.dw = {Output0({c.vocab, c.width}, ComputeType(dtype), "dw0", mode), mode};
  }
  void Run(const Context& ctx) const {
    LinearCrossEntropy(ctx, args);
    for (const Tensor& tail : tails) EXPECT_TRUE(testing::IsPoisoned(tail));
  }

 private:
  Tensor Output0(const Shape& shape, DType dtype, std::string_view name, WriteMode mode) {
    return mode == WriteMode::kWrite ? Padded({}, shape, dtype)
                                     : Padded(testing::Normal(shape, dtype, name), shape, dtype);
  }
  Tensor Padded(const Tensor& values, const Shape& shape, DType dtype) {
    const testing::PaddedTensor padded =
        values ? testing::Pad(values, 2) : testing::MakePadded(shape, dtype, 2);
    tails.push_back(padded.tail);
    return padded.used;
  }
};

template <class F>
void ForEachCrossEntropy(DType dtype, const Case& c, F&& f) {
  ForEachImplementation(CrossEntropyImpls(), CrossEntropyProblem{dtype, c.tokens, c.width, c.vocab},
                        f);
}

// The reference in fp64 on the values of a call, with bounds on the error of a computation in its
// dtype.
struct Exact {
  Tensor nll, dx, dw;
  std::vector<double> nll_bound, dx_bound, dw_bound;

  explicit Exact(const Case& c, const Call& call) {
    const DType dtype = call.args.x.dtype(), compute = ComputeType(dtype);
    CrossEntropyArgs args;
    args.x = ConvertTo(call.args.x, DType::kF64);
    args.w = ConvertTo(call.args.w, DType::kF64);
    args.labels = call.args.labels;
    args.weights = call.args.weights;
    args.grad_scale = call.args.grad_scale;
    args.nll = nll = Tensor::Empty({c.tokens}, DType::kF64);
    dx = Tensor::Zeros({c.tokens, c.width}, DType::kF64);
    dw = Tensor::Zeros({c.vocab, c.width}, DType::kF64);
    args.dx = Write(dx);
    args.dw = Write(dw);
    LinearCrossEntropy(Context().WithImpl("ref"), args);
    nll_bound.assign(static_cast<std::size_t>(c.tokens), 0);
    dx_bound.assign(static_cast<std::size_t>(dx.numel()), 0);
    dw_bound.assign(static_cast<std::size_t>(dw.numel()), 0);
    const double u = check::UnitRoundoff(compute);
    const double u_g = dtype == compute ? 0 : check::UnitRoundoff(dtype);
    const double *x = args.x.data<double>(), *w = args.w.data<double>();
    std::vector<double> logits(static_cast<std::size_t>(c.vocab));
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      const std::int64_t label = args.labels.data<std::int64_t>()[t];
      if (label == kIgnoreLabel) continue;
      double delta = 0, largest = -1e300;  // error of a logit
      for (std::int64_t v = 0; v < c.vocab; ++v) {
        double dot = 0, magnitude = 0;
        for (std::int64_t h = 0; h < c.width; ++h) {
          const double term = x[t * c.width + h] * w[v * c.width + h];
          dot += term;
          magnitude += std::abs(term);
        }
        logits[static_cast<std::size_t>(v)] = dot;
        largest = std::max(largest, dot);
        delta = std::max(delta, check::DotBound(c.width, magnitude, compute, compute));
      }
      double sum = 0, range = 0;
      for (const double l : logits) {
        sum += std::exp(l - largest);
        range = std::max(range, largest - l);
      }
      // The sum of V exponentials, each of an argument with the error of two logits and of a
      // subtraction, and a few roundings of exp, log and division.
      const double relative =
          std::expm1(2 * delta + u * range) + check::Gamma(c.vocab + 8, compute);
      nll_bound[static_cast<std::size_t>(t)] =
          2 * delta + relative + 4 * u * (range + std::log(sum) + 1);
      const double scale =
          args.grad_scale.item() * (args.weights ? ElementAsDouble(args.weights, t) : 1);
      for (std::int64_t v = 0; v < c.vocab; ++v) {
        const double p = std::exp(logits[static_cast<std::size_t>(v)] - largest) / sum;
        const double g = std::abs(scale * (p - (v == label)));
        const double g_error = std::abs(scale) * p * relative + (3 * u + u_g) * g +
                               std::abs(scale) * 0x1p-120;  // exponentials below fp32's range
        for (std::int64_t h = 0; h < c.width; ++h) {
          const double xv = std::abs(x[t * c.width + h]), wv = std::abs(w[v * c.width + h]);
          dx_bound[static_cast<std::size_t>(t * c.width + h)] +=
              (g_error + check::Gamma(c.vocab, compute) * g) * wv;
          dw_bound[static_cast<std::size_t>(v * c.width + h)] +=
              (g_error + check::Gamma(c.tokens + 1, compute) * g) * xv;
        }
      }
    }
  }

  // Adds what was in the outputs before (Accumulate), with the rounding of the results.
  void Expect(const Call& call, const Tensor& dx0 = {}, const Tensor& dw0 = {}) const {
    const auto check = [](const char* name, const Tensor& got, const Tensor& exact,
                          const Tensor& start, const std::vector<double>& bounds) {
      const Tensor sum = exact.Clone();
      for (std::int64_t i = 0; start && i < sum.numel(); ++i) {
        sum.data<double>()[i] += ElementAsDouble(start, i);
      }
      EXPECT_TRUE(Agrees(check::Compare(name, got, sum, [&](std::int64_t i) {
        const double bound = bounds[static_cast<std::size_t>(i)];
        return bound +
               check::UnitRoundoff(got.dtype()) *
                   (2 * std::abs(ElementAsDouble(sum, i)) + bound +
                    (start ? std::abs(ElementAsDouble(start, i)) : 0)) +
               0x1p-126;
      })));
    };
    check("nll", call.args.nll, nll, {}, nll_bound);
    if (call.args.dx) check("dx", call.args.dx.tensor, dx, dx0, dx_bound);
    if (call.args.dw) check("dw", call.args.dw.tensor, dw, dw0, dw_bound);
  }
};

TEST(LinearCrossEntropy, ErrorsStayWithinTheirBound) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const Case& c : kCrossEntropyCases) {
      SCOPED_TRACE(fmt::format("{} T {} H {} V {}", Name(dtype), c.tokens, c.width, c.vocab));
      ForEachCrossEntropy(dtype, c, [&](const Context& ctx) {
        const Call call(c, dtype);
        call.Run(ctx);
        const Exact exact(c, call);
        exact.Expect(call);

        const Call adding(c, dtype, WriteMode::kAccumulate);
        const Tensor dx0 = adding.args.dx.tensor.Clone(), dw0 = adding.args.dw.tensor.Clone();
        adding.Run(ctx);
        exact.Expect(adding, dx0, dw0);

        Call loss_only(c, dtype);
        loss_only.args.dx = loss_only.args.dw = {};
        loss_only.args.grad_scale = {};
        LinearCrossEntropy(ctx, loss_only.args);
        EXPECT_TRUE(Agrees(check::CompareBitwise("nll", loss_only.args.nll, call.args.nll)));
      });
    }
  }
}

// Around the chunk: one token less, as many, one more, several chunks and a rest.
TEST(LinearCrossEntropy, ChunkBoundaries) {
  const std::int64_t chunk = CrossEntropyChunk(3);
  EXPECT_GE(chunk, 256);
  EXPECT_LE(chunk, 1024);
  EXPECT_EQ(CrossEntropyChunk(32000), 256);
  const std::int64_t cuda_chunk = CrossEntropyCudaChunk(3);
  for (const std::int64_t tokens : {chunk - 1, chunk, chunk + 1, 2 * chunk + 3, cuda_chunk,
                                    cuda_chunk + 1, 2 * cuda_chunk + 3}) {
    const Case c{tokens, 2, 3};
    ForEachCrossEntropy(DType::kF32, c, [&](const Context& ctx) {
      const Call call(c, DType::kF32);
      call.Run(ctx);
      Exact(c, call).Expect(call);
    });
  }
}

// The gradient of Σ weight·nll·grad_scale, by central differences in fp64.
TEST(LinearCrossEntropy, CentralDifferences) {
  const Case c{11, 6, 9};
  Call call(c, DType::kF64);
  ForEachCrossEntropy(DType::kF64, c, [&](const Context& ctx) {
    call.Run(ctx);
    CrossEntropyArgs forward = call.args;
    forward.dx = forward.dw = {};
    forward.nll = Tensor::Empty({c.tokens}, DType::kF64);
    const auto loss = [&] {
      LinearCrossEntropy(ctx, forward);
      double sum = 0;
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        sum += ElementAsDouble(forward.nll, t) * ElementAsDouble(forward.weights, t);
      }
      return sum * forward.grad_scale.item();
    };
    EXPECT_TRUE(Agrees(testing::CheckGradient("dx", loss, call.args.x, call.args.dx.tensor)));
    EXPECT_TRUE(Agrees(testing::CheckGradient("dw", loss, call.args.w, call.args.dw.tensor)));
  });
}

TEST(LinearCrossEntropy, ClosedForms) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    // Zero weights: a uniform distribution, nll = log V.
    const Case c{5, 4, 32};
    ForEachCrossEntropy(dtype, c, [&](const Context& ctx) {
      Call call(c, dtype);
      FillZero(call.args.w);
      call.args.weights = {};
      call.args.labels = Labels(c, false);
      call.Run(ctx);
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        EXPECT_NEAR(ElementAsDouble(call.args.nll, t), std::log(32.0),
                    4 * check::UnitRoundoff(ComputeType(dtype)) * 4);
      }
    });
    // One token in the vocabulary: no loss, no gradient, exactly.
    const Case one{5, 4, 1};
    ForEachCrossEntropy(dtype, one, [&](const Context& ctx) {
      const Call call(one, dtype);
      call.Run(ctx);
      for (std::int64_t t = 0; t < one.tokens; ++t) EXPECT_EQ(ElementAsDouble(call.args.nll, t), 0);
      for (std::int64_t i = 0; i < one.width; ++i) {
        EXPECT_EQ(ElementAsDouble(call.args.dx.tensor, i), 0);
        EXPECT_EQ(ElementAsDouble(call.args.dw.tensor, i), 0);
      }
    });
  }
}

TEST(LinearCrossEntropy, LargeLogitsDoNotOverflow) {
  const Case c{4, 1, 3};
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    ForEachCrossEntropy(dtype, c, [&](const Context& ctx) {
      Call call(c, dtype);
      Convert(Tensor::FromSpan<float>({4, 1}, std::vector<float>{1, 1, -1, 0x1p63f}), call.args.x);
      Convert(Tensor::FromSpan<float>({3, 1}, std::vector<float>{1024, -1024, 0x1p10f - 16}),
              call.args.w);
      call.args.labels = Tensor::FromSpan<std::int64_t>({4}, std::vector<std::int64_t>{0, 1, 1, 0});
      call.args.weights = {};
      call.Run(ctx);
      EXPECT_NEAR(ElementAsDouble(call.args.nll, 0), std::exp(-16), 1e-6);
      EXPECT_NEAR(ElementAsDouble(call.args.nll, 1), 2048, 1e-3);
      EXPECT_EQ(ElementAsDouble(call.args.nll, 2), 0);
      EXPECT_EQ(ElementAsDouble(call.args.nll, 3), 0);
      EXPECT_TRUE(testing::IsFinite(call.args.dx.tensor));
      EXPECT_TRUE(testing::IsFinite(call.args.dw.tensor));
    });
  }
}

TEST(LinearCrossEntropy, AllIgnored) {
  const Case c{9, 4, 6};
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
      ForEachCrossEntropy(dtype, c, [&](const Context& ctx) {
        Call call(c, dtype, mode);
        std::fill_n(call.args.labels.data<std::int64_t>(), c.tokens, kIgnoreLabel);
        const bool add = mode == WriteMode::kAccumulate;
        const Tensor dx0 = add ? call.args.dx.tensor.Clone() : Tensor::Zeros({9, 4}, dtype);
        const Tensor dw0 =
            add ? call.args.dw.tensor.Clone() : Tensor::Zeros({6, 4}, ComputeType(dtype));
        call.Run(ctx);
        for (std::int64_t t = 0; t < c.tokens; ++t) EXPECT_EQ(ElementAsDouble(call.args.nll, t), 0);
        EXPECT_TRUE(Agrees(check::Compare("dx", call.args.dx.tensor, dx0, 0)));
        EXPECT_TRUE(Agrees(check::Compare("dw", call.args.dw.tensor, dw0, 0)));
      });
    }
  }
}

TEST(LinearCrossEntropy, NoTokens) {
  const Case c{0, 4, 6};
  ForEachCrossEntropy(DType::kF32, c, [&](const Context& ctx) {
    const Call call(c, DType::kF32);
    call.Run(ctx);
    for (std::int64_t i = 0; i < 24; ++i) EXPECT_EQ(ElementAsDouble(call.args.dw.tensor, i), 0);
  });
}

// masked-loss-scale: a token of weight zero changes no bit of the other tokens' gradients.
TEST(LinearCrossEntropy, ZeroWeightIsAsIgnored) {
  const Case c{12, 4, 6};
  ForEachCrossEntropy(DType::kF32, c, [&](const Context& ctx) {
    Call zero(c, DType::kF32), ignored(c, DType::kF32);
    zero.args.weights.data<float>()[1] = 0;
    ignored.args.labels.data<std::int64_t>()[1] = kIgnoreLabel;
    // Its logits overflow, and still its gradient is zero.
    for (const Call* call : {&zero, &ignored}) {
      std::fill_n(call->args.x.data<float>() + c.width, c.width, 3e38f);
      std::fill_n(call->args.w.data<float>(), c.width, 2.0f);
    }
    zero.Run(ctx);
    ignored.Run(ctx);
    EXPECT_FALSE(ElementAsDouble(zero.args.nll, 1) == 0);
    EXPECT_EQ(ElementAsDouble(ignored.args.nll, 1), 0);
    EXPECT_TRUE(Agrees(check::Compare("dx", zero.args.dx.tensor, ignored.args.dx.tensor, 0)));
    EXPECT_TRUE(Agrees(check::Compare("dw", zero.args.dw.tensor, ignored.args.dw.tensor, 0)));
  });
}

// The logits of all tokens would take T·V values; the op needs those of a chunk.
TEST(LinearCrossEntropy, LogitsAreNeverWhole) {
  const Case c{8192, 4, 512};
  Call call(c, DType::kF32);
  call.args.dx = call.args.dw = {};
  ForEachCrossEntropy(DType::kF32, c, [&](const Context& ctx) {
    const std::int64_t chunk = ctx.device().type == DeviceType::kCuda
                                   ? CrossEntropyCudaChunk(c.vocab)
                                   : 2 * CrossEntropyChunk(c.vocab);
    CpuAllocator().ResetPeak();
    const std::int64_t before = CpuAllocator().Stats().live_bytes;
    LinearCrossEntropy(ctx, call.args);
    EXPECT_LE(CpuAllocator().Stats().peak_bytes - before, chunk * c.vocab * 4 + 4096);
  });
}

// atomics: the same call gives the same bits.
TEST(LinearCrossEntropy, Atomics) {
  const Case c{1500, 8, 70};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ForEachCrossEntropy(dtype, c, [&](const Context& ctx) {
      const Call first(c, dtype);
      first.Run(ctx);
      for (int run = 0; run < 3; ++run) {
        const Call again(c, dtype);
        again.Run(ctx);
        EXPECT_TRUE(Agrees(check::CompareBitwise("nll", again.args.nll, first.args.nll)));
        EXPECT_TRUE(
            Agrees(check::CompareBitwise("dx", again.args.dx.tensor, first.args.dx.tensor)));
        EXPECT_TRUE(
            Agrees(check::CompareBitwise("dw", again.args.dw.tensor, first.args.dw.tensor)));
      }
    });
  }
}

TEST(LinearCrossEntropy, NamesTheWrongLabel) {
  const Case c{4, 2, 3};
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-1}, std::int64_t{-99}}) {
    Call call(c, DType::kF32);
    call.args.labels.data<std::int64_t>()[3] = bad;
    try {
      LinearCrossEntropy(Context(), call.args);
      FAIL() << "label " << bad << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(error.message().find(fmt::format("label {} at position 3", bad)), std::string::npos)
          << error.message();
    }
    EXPECT_TRUE(testing::IsPoisoned(call.args.nll));
  }
}

}  // namespace
}  // namespace cistron::ops
