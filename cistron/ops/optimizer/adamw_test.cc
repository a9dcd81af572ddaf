#include "cistron/ops/optimizer/adamw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/optimizer/adamw_cases.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::ForEachImplementation;

AdamWScalars Scalars(double lr, double step, double clip = 1) {
  return {Tensor::Scalar(lr), Tensor::Scalar(step), Tensor::Scalar(clip)};
}

// The state of one parameter.
struct State {
  Tensor p, m, v, low;

  static State Random(const Shape& shape, DType dtype) {
    State s{testing::Normal(shape, dtype, "p"), testing::Normal(shape, dtype, "m", 0.1),
            testing::Uniform(shape, dtype, "v", 0.0, 0.1), Tensor::Empty(shape, DType::kBF16)};
    FillPoison(s.low);
    return s;
  }
  State Clone() const { return {p.Clone(), m.Clone(), v.Clone(), low.Clone()}; }
  State Slice(std::int64_t begin, std::int64_t length) const {
    return {p.Slice(0, begin, length), m.Slice(0, begin, length), v.Slice(0, begin, length),
            low.Slice(0, begin, length)};
  }
  void Update(const Context& ctx, const AdamWConfig& config, const AdamWScalars& scalars,
              const Tensor& g) const {
    AdamW(ctx, config, scalars, g, p, m, v, low);
  }
};

void ExpectSameBits(const State& a, const State& b) {
  EXPECT_TRUE(Agrees(check::CompareBitwise("p", a.p, b.p)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("m", a.m, b.m)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("v", a.v, b.v)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("low", a.low, b.low)));
}

void ForEachDType(const std::function<void(const Context&, DType)>& f) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    SCOPED_TRACE(std::string(Name(dtype)));
    ForEachImplementation(AdamWImpls(), AdamWProblem{dtype, 1, false},
                          [&](const Context& ctx) { f(ctx, dtype); });
  }
}

constexpr AdamWConfig kConfig{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

// Ten steps of torch.optim.AdamW (2.11, float32, CPU, foreach=False, fused=False), made with
//   g = [[0.1,-0.3,2.0,1e-4,-5.0],[0.2,0.3,-1.0,-1e-4,4.0]]
//   p = torch.nn.Parameter(torch.tensor([1.0,-2.0,0.5,3.0,-0.25]))
//   opt = torch.optim.AdamW([p], lr=1e-2, betas=(0.9,0.95), eps=1e-8, weight_decay=0.1,
//                           foreach=False, fused=False)
//   for t in range(10): p.grad = torch.tensor(g[t%2]) * (t+1); opt.step()
//   print([x.item().hex() for x in p])   # then opt.state[p]['exp_avg'], ['exp_avg_sq']
TEST(AdamW, TenStepsOfTorch) {
  const std::vector<float> p0{1.0f, -2.0f, 0.5f, 3.0f, -0.25f};
  const std::vector<float> g[2] = {{0.1f, -0.3f, 2.0f, 1e-4f, -5.0f},
                                   {0.2f, 0.3f, -1.0f, -1e-4f, 4.0f}};
  const double p_torch[] = {0x1.cc7a98p-1, -0x1.f8cec6p+0, 0x1.d81a42p-2, 0x1.7b2136p+1,
                            -0x1.d838cep-3};
  const double m_torch[] = {0x1.4bb228p-1, 0x1.4d585p-3, 0x1.415642p+0, -0x1.c7208ap-15,
                            0x1.7d608ap-2};
  const double v_torch[] = {0x1.e70518p-2, 0x1.8f6b78p+0, 0x1.38f3ecp+5, 0x1.744944p-23,
                            0x1.56b96ep+8};
  ForEachDType([&](const Context& ctx, DType dtype) {
    const Shape shape{5};
    const Tensor p = ConvertTo(Tensor::FromSpan<float>(shape, p0), dtype);
    const Tensor m = Tensor::Zeros(shape, dtype), v = Tensor::Zeros(shape, dtype);
    for (int t = 1; t <= 10; ++t) {
      std::vector<float> gradient = g[(t - 1) % 2];
      for (float& value : gradient) value *= static_cast<float>(t);
      AdamW(ctx, kConfig, Scalars(1e-2, t),
            ConvertTo(Tensor::FromSpan<float>(shape, gradient), dtype), p, m, v, {});
    }
    // At most ten roundings a step of values no larger than the magnitudes given here; twice, for
    // torch rounds as well.
    const double gamma = 2 * check::Gamma(100, DType::kF32);
    for (std::int64_t i = 0; i < 5; ++i) {
      const double largest_g = 10 * std::max(std::abs(g[0][static_cast<std::size_t>(i)]),
                                             std::abs(g[1][static_cast<std::size_t>(i)]));
      EXPECT_NEAR(ElementAsDouble(p, i), p_torch[i],
                  gamma * (std::abs(p0[static_cast<std::size_t>(i)]) + 10 * 1e-2 * 2));
      EXPECT_NEAR(ElementAsDouble(m, i), m_torch[i], gamma * largest_g);
      EXPECT_NEAR(ElementAsDouble(v, i), v_torch[i], gamma * largest_g * largest_g);
    }
  });
}

// With a constant gradient m̂ = g and v̂ = g²: every step is lr·sign(g) after the decay.
TEST(AdamW, ConstantGradientStepsByTheRate) {
  AdamWConfig config = kConfig;
  config.eps = 0;
  ForEachDType([&](const Context& ctx, DType dtype) {
    const std::int64_t n = 37;
    const Tensor g = testing::Normal({n}, dtype, "g");
    State s = State::Random({n}, dtype);
    FillZero(s.m);
    FillZero(s.v);
    std::vector<double> expected;
    for (std::int64_t i = 0; i < n; ++i) expected.push_back(ElementAsDouble(s.p, i));
    const double lr = 0.125, clip = 0.5;
    for (int t = 1; t <= 6; ++t) {
      s.Update(ctx, config, Scalars(lr, t, clip), g);
      for (std::int64_t i = 0; i < n; ++i) {
        double& e = expected[static_cast<std::size_t>(i)];
        e = e * (1 - lr * config.weight_decay) - std::copysign(lr, ElementAsDouble(g, i));
        // Roundings relative to |p| and lr, a dozen a step.
        EXPECT_NEAR(ElementAsDouble(s.p, i), e,
                    check::Gamma(12 * t, dtype) * (std::abs(e) + t * lr + 1));
      }
    }
  });
}

TEST(AdamW, LowIsTheRoundedParameter) {
  ForEachDType([](const Context& ctx, DType dtype) {
    const State s = State::Random({67}, dtype);
    s.Update(ctx, kConfig, Scalars(0.01, 3), testing::Normal({67}, dtype, "g"));
    for (std::int64_t i = 0; i < 67; ++i) {
      EXPECT_EQ(s.low.data<bf16>()[i].bits, bf16(static_cast<float>(ElementAsDouble(s.p, i))).bits);
    }
  });
}

// Every implementation makes the same sequence of correctly rounded operations.
TEST(AdamW, ImplementationsAgreeBitwise) {
  for (const std::int64_t n : kAdamWSizes) {
    ForEachDType([&](const Context& ctx, DType dtype) {
      const Tensor g = testing::Normal({n}, dtype, "g");
      const State expected = State::Random({n}, dtype), s = expected.Clone();
      expected.Update(Context().WithImpl("ref"), kConfig, Scalars(3e-3, 7, 0.3), g);
      s.Update(ctx, kConfig, Scalars(3e-3, 7, 0.3), g);
      ExpectSameBits(s, expected);
    });
  }
}

// optimizer-edges: an empty tensor, shards without elements, shards equal to the whole.
TEST(AdamW, OptimizerEdges) {
  ForEachDType([](const Context& ctx, DType dtype) {
    const std::int64_t n = 1003;
    const Tensor g = testing::Normal({n}, dtype, "g");
    const State whole = State::Random({n}, dtype), sharded = whole.Clone();
    for (int t = 1; t <= 3; ++t) {
      const AdamWScalars scalars = Scalars(0.01 / t, t, 0.7);
      whole.Update(ctx, kConfig, scalars, g);
      const std::int64_t cuts[] = {0, 0, 1, 18, 18, 500, n, n};
      for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
        const std::int64_t length = cuts[i + 1] - cuts[i];
        sharded.Slice(cuts[i], length).Update(ctx, kConfig, scalars, g.Slice(0, cuts[i], length));
      }
      ExpectSameBits(sharded, whole);
    }
    State::Random({0}, dtype).Update(ctx, kConfig, Scalars(0.01, 1), Tensor::Empty({0}, dtype));
    State::Random({0, 5}, dtype)
        .Update(ctx, kConfig, Scalars(0.01, 1), Tensor::Empty({0, 5}, dtype));
  });
}

TEST(AdamW, LeavesWhatIsBeyondTheTensor) {
  ForEachDType([](const Context& ctx, DType dtype) {
    const State values = State::Random({21}, dtype);
    const testing::PaddedTensor p = testing::Pad(values.p, 16), m = testing::Pad(values.m, 16),
                                v = testing::Pad(values.v, 16), low = testing::Pad(values.low, 16);
    AdamW(ctx, kConfig, Scalars(0.01, 1), testing::Normal({21}, dtype, "g"), p.used, m.used, v.used,
          low.used);
    for (const auto* t : {&p, &m, &v, &low}) EXPECT_TRUE(testing::IsPoisoned(t->tail));
    EXPECT_TRUE(testing::IsFinite(p.used));
  });
}

TEST(AdamW, DoesNotDependOnThreads) {
  ForEachDType([](const Context& ctx, DType dtype) {
    const Tensor g = testing::Normal({70001}, dtype, "g");
    const State start = State::Random({70001}, dtype), one = start.Clone();
    {
      const testing::ThreadsForScope scope(1);
      one.Update(ctx, kConfig, Scalars(0.01, 2), g);
    }
    for (const int threads : {2, 3, 5}) {
      const testing::ThreadsForScope scope(threads);
      const State many = start.Clone();
      many.Update(ctx, kConfig, Scalars(0.01, 2), g);
      ExpectSameBits(many, one);
    }
  });
}

// A device stops an update by a NaN factor: every bit stays.
TEST(AdamW, NanClipChangesNothing) {
  ForEachDType([&](const Context& ctx, DType dtype) {
    const State start = State::Random({4099}, dtype);
    const State s = start.Clone();
    s.Update(ctx, kConfig, Scalars(0.01, 2, NAN), testing::Normal({4099}, dtype, "g"));
    ExpectSameBits(s, start);
  });
}

// Many parameters at once are each updated as alone, with their own decay.
TEST(AdamW, ParametersTogetherAreAsAlone) {
  ForEachDType([&](const Context& ctx, DType dtype) {
    std::vector<State> alone, together;
    std::vector<AdamWTensors> list;
    for (std::int64_t i = 0; i < 101; ++i) {
      const std::int64_t n = i % 7 == 0 ? 0 : i % 5 == 0 ? 9000 + i : 1 + 13 * i;
      const State s = State::Random({n}, dtype);
      const Tensor g = testing::Normal({n}, dtype, "g");
      alone.push_back(s.Clone());
      together.push_back(s);
      list.push_back({g, s.p, s.m, s.v, s.low, i % 2 == 0 ? 0.0 : 0.1 * static_cast<double>(i)});
      AdamWConfig config = kConfig;
      config.weight_decay = list.back().weight_decay;
      alone.back().Update(ctx, config, Scalars(0.01, 3, 0.5), g);
    }
    AdamWOfAll(ctx, kConfig, Scalars(0.01, 3, 0.5), list);
    for (std::size_t i = 0; i < list.size(); ++i) ExpectSameBits(together[i], alone[i]);
  });
}

// bf16 parameters and moments: the update of f32 copies, each result rounded once.
TEST(AdamW, StatesInBf16) {
  for (const DType grad : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(std::string(Name(grad)));
    ForEachImplementation(
        AdamWImpls(), AdamWProblem{DType::kBF16, 1, false, grad}, [&](const Context& ctx) {
          for (const std::int64_t n : {1, 7, 8, 4097, 40007}) {
            const Shape shape{n};
            const Tensor g = testing::Normal(shape, grad, "g");
            const Tensor p = testing::Normal(shape, DType::kBF16, "p");
            const Tensor m = testing::Normal(shape, DType::kBF16, "m", 0.1);
            const Tensor v = testing::Uniform(shape, DType::kBF16, "v", 0.0, 0.1);
            const Tensor p32 = ConvertTo(p, DType::kF32), m32 = ConvertTo(m, DType::kF32);
            const Tensor v32 = ConvertTo(v, DType::kF32);
            AdamW(Context().WithImpl("adamw=ref"), kConfig, Scalars(0.01, 5, 0.5),
                  ConvertTo(g, DType::kF32), p32, m32, v32, {});
            AdamW(ctx, kConfig, Scalars(0.01, 5, 0.5), g, p, m, v, {});
            EXPECT_TRUE(Agrees(check::CompareBitwise("p", p, ConvertTo(p32, DType::kBF16))));
            EXPECT_TRUE(Agrees(check::CompareBitwise("m", m, ConvertTo(m32, DType::kBF16))));
            EXPECT_TRUE(Agrees(check::CompareBitwise("v", v, ConvertTo(v32, DType::kBF16))));
          }
        });
  }
}

// Quotients and roots over the whole range, where implementations may have a way of their own for
// its middle: magnitudes from denormal to 2^60, whose squares are finite still, and zeros; of
// parameters that are 0, so that the quotient is what is rounded.
TEST(AdamW, StatesInBf16OfAnyMagnitude) {
  const std::int64_t n = std::int64_t{1} << 18;
  const auto magnitudes = [&](const char* name, double low, double high, bool negative) {
    const Tensor exponent = testing::Uniform({n}, DType::kF64, name, low, high);
    const Tensor t = Tensor::Empty({n}, DType::kBF16);
    for (std::int64_t i = 0; i < n; ++i) {
      const double e = exponent.data<double>()[i], sign = negative && i % 3 == 0 ? -1 : 1;
      t.data<bf16>()[i] = bf16(i % 101 == 0 ? 0 : static_cast<float>(sign * std::exp2(e)));
    }
    return t;
  };
  for (const double width : {20.0, 160.0}) {  // a pack within the middle, one element of it not
    SCOPED_TRACE(width);
    const double above = std::min(width, 80.0);
    const Tensor g = magnitudes("g", -20 - width, -20 + above, true);
    const Tensor m = magnitudes("m", -20 - width, -20 + above, true);
    const Tensor v = magnitudes("v", -30 - width, -30 + above, false);
    const Tensor p32 = Tensor::Empty({n}, DType::kF32), m32 = ConvertTo(m, DType::kF32);
    FillZero(p32);
    const Tensor v32 = ConvertTo(v, DType::kF32);
    AdamW(Context().WithImpl("adamw=ref"), kConfig, Scalars(0.01, 5, 0.5),
          ConvertTo(g, DType::kF32), p32, m32, v32, {});
    ForEachImplementation(
        AdamWImpls(), AdamWProblem{DType::kBF16, 1, false, DType::kBF16}, [&](const Context& ctx) {
          const Tensor p = Tensor::Empty({n}, DType::kBF16);
          FillZero(p);
          const Tensor m16 = m.Clone(), v16 = v.Clone();
          AdamW(ctx, kConfig, Scalars(0.01, 5, 0.5), g, p, m16, v16, {});
          EXPECT_TRUE(Agrees(check::CompareBitwise("p", p, ConvertTo(p32, DType::kBF16))));
          EXPECT_TRUE(Agrees(check::CompareBitwise("m", m16, ConvertTo(m32, DType::kBF16))));
          EXPECT_TRUE(Agrees(check::CompareBitwise("v", v16, ConvertTo(v32, DType::kBF16))));
        });
  }
}

// fp32 parameters and moments by gradients in bf16: the bits of the update by the same values in
// fp32, whether many are updated together, shards apart or one begins where packs do not.
TEST(AdamW, MastersByGradientsInBf16) {
  ForEachImplementation(
      AdamWImpls(), AdamWProblem{DType::kF32, 1, true, DType::kBF16}, [](const Context& ctx) {
        std::vector<State> expected, together;
        std::vector<AdamWTensors> list;
        for (const std::int64_t n : kAdamWSizes) {
          const Tensor g = testing::Normal({n}, DType::kBF16, "g");
          const State start = State::Random({n}, DType::kF32);
          const State reference = start.Clone(), alone = start.Clone(), sharded = start.Clone();
          reference.Update(Context().WithImpl("adamw=ref"), kConfig, Scalars(0.01, 5, 0.5),
                           ConvertTo(g, DType::kF32));
          alone.Update(ctx, kConfig, Scalars(0.01, 5, 0.5), g);
          ExpectSameBits(alone, reference);
          const std::int64_t cut = n / 2;
          for (const auto& [begin, length] : {std::pair{std::int64_t{0}, cut}, {cut, n - cut}}) {
            sharded.Slice(begin, length)
                .Update(ctx, kConfig, Scalars(0.01, 5, 0.5), g.Slice(0, begin, length));
          }
          ExpectSameBits(sharded, reference);
          expected.push_back(reference);
          together.push_back(start);
          list.push_back({g, start.p, start.m, start.v, start.low, kConfig.weight_decay});
        }
        AdamWOfAll(ctx, kConfig, Scalars(0.01, 5, 0.5), list);
        for (std::size_t i = 0; i < list.size(); ++i) ExpectSameBits(together[i], expected[i]);
      });
}

// The first update in closed form: with v̂ = g² and eps = 0 it is lr·sign of the gradient after the
// decay, of whatever the gradient was rounded to; moments tell that it was the rounded one.
TEST(AdamW, FirstUpdateIsThatOfTheRoundedGradient) {
  AdamWConfig config = kConfig;
  config.eps = 0;
  ForEachImplementation(
      AdamWImpls(), AdamWProblem{DType::kF32, 1, true, DType::kBF16}, [&](const Context& ctx) {
        const std::int64_t n = 40007;
        const Tensor exact = testing::Normal({n}, DType::kF32, "g"),
                     g = ConvertTo(exact, DType::kBF16);
        const State s = State::Random({n}, DType::kF32), before = s.Clone();
        FillZero(s.m);
        FillZero(s.v);
        const double lr = 0.125;
        s.Update(ctx, config, Scalars(lr, 1), g);
        std::int64_t rounded = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          const double gradient = ElementAsDouble(g, i), p0 = ElementAsDouble(before.p, i);
          if (gradient != ElementAsDouble(exact, i)) ++rounded;
          // Factors are rounded once, products twice.
          EXPECT_NEAR(ElementAsDouble(s.m, i), 0.1 * gradient,
                      check::Gamma(3, DType::kF32) * std::abs(gradient));
          EXPECT_NEAR(ElementAsDouble(s.v, i), 0.05 * gradient * gradient,
                      check::Gamma(4, DType::kF32) * gradient * gradient);
          EXPECT_NEAR(ElementAsDouble(s.p, i),
                      p0 * (1 - lr * config.weight_decay) - std::copysign(lr, gradient),
                      check::Gamma(12, DType::kF32) * (std::abs(p0) + lr));
        }
        EXPECT_GT(rounded, n / 2);  // else the moments would not tell
      });
}

TEST(AdamW, RefusesWrongArguments) {
  const Context ctx;
  const Tensor t = Tensor::Zeros({4}, DType::kF32), half = Tensor::Zeros({4}, DType::kBF16);
  EXPECT_THROW(AdamW(ctx, kConfig, Scalars(1, 0), t, t.Clone(), t.Clone(), t.Clone(), {}), Error);
  const Tensor wide = Tensor::Zeros({4}, DType::kF64);
  EXPECT_THROW(AdamW(ctx, kConfig, Scalars(1, 1), wide, t, t.Clone(), t.Clone(), {}), Error);
  EXPECT_THROW(AdamW(ctx, kConfig, Scalars(1, 1), half, wide, wide.Clone(), wide.Clone(), {}),
               Error);
  EXPECT_THROW(AdamW(ctx, kConfig, Scalars(1, 1), half, half, half, half, half), Error);
  EXPECT_THROW(AdamW(ctx, kConfig, Scalars(1, 1), half, half, t, half, {}), Error);
  EXPECT_THROW(AdamW(ctx, {.beta1 = 1.0}, Scalars(1, 1), t, t.Clone(), t.Clone(), t.Clone(), {}),
               Error);
  EXPECT_THROW(AdamW(ctx, kConfig, Scalars(1, 1), t, t.Clone(), Tensor::Zeros({3}, DType::kF32),
                     t.Clone(), {}),
               Error);
}

}  // namespace
}  // namespace cistron::ops
