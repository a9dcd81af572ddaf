#include "cistron/ops/grouped_mlp/grouped_mlp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>

#include "cistron/check/bounds.h"
#include "cistron/ops/grouped_mlp/row_pieces.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;
using testing::Margins;
using testing::Strided;
using ::testing::ThrowsMessage;

struct Case {
  const char* name;
  std::vector<std::int64_t> split_sizes;
  std::int64_t hidden, ffn, out;
  std::int64_t rows_beyond = 0;
  bool has_scale = true;
};
std::vector<Case> Cases() {
  return {
      {"one token", {0, 1, 0}, 24, 16, 24},
      {"empty, few and many rows", {0, 1, 7, 33, 0}, 20, 24, 20, 9},
      {"no rows at all", {0, 0}, 8, 12, 8, 3},
      {"all rows on one group", {0, 0, 700, 0}, 8, 6, 4, 5},
      {"uniform", {32, 32, 32, 32}, 40, 24, 40},
      {"several waves", {700, 3, 500, 0, 30}, 8, 5, 8, 4},
      {"no row scale", {5, 40}, 17, 11, 30, 2, false},
  };
}

// The exact values of one problem, in f64, and bounds of their errors in `dtype`, element by
// element, carried through the steps: each adds its roundings to what its inputs' errors do to it.
class Exact {
 public:
  // `rounds_argument`: that of exp, as a GPU does in bf16.
  Exact(const Case& test, DType dtype, bool rounds_argument = false)
      : test_(test),
        rounds_argument_(rounds_argument),
        dtype_(dtype),
        acc_(ComputeType(dtype)),
        groups_(static_cast<std::int64_t>(test.split_sizes.size())),
        rows_(std::accumulate(test.split_sizes.begin(), test.split_sizes.end(), std::int64_t{0})),
        x(testing::Normal({rows_, test.hidden}, dtype, "x")),
        dy(testing::Normal({rows_, test.out}, dtype, "dy")),
        w1(testing::Normal({groups_, 2 * test.ffn, test.hidden}, dtype, "w1")),
        w2(testing::Normal({groups_, test.out, test.ffn}, dtype, "w2")),
        scale(testing::Uniform({rows_}, acc_, "scale", 0.1, 1.0)) {
    const std::int64_t h = test.hidden, f = test.ffn, n = test.out;
    for (Pair* t : {&pre, &dpre}) t->Allocate({rows_, 2 * f});
    for (Pair* t : {&act, &dact_}) t->Allocate({rows_, f});
    y.Allocate({rows_, n});
    dx.Allocate({rows_, h});
    dscale.Allocate({rows_});
    dw1.Allocate(w1.shape());
    dw2.Allocate(w2.shape());
    std::int64_t begin = 0;
    for (std::int64_t e = 0; e < groups_; ++e) {
      const std::int64_t end = begin + test.split_sizes[static_cast<std::size_t>(e)];
      for (std::int64_t r = begin; r < end; ++r) Row(e, r);
      Weights(e, begin, end);
      begin = end;
    }
  }

  struct Pair {
    Tensor value, error;
    void Allocate(const Shape& shape) {
      value = Tensor::Zeros(shape, DType::kF64);
      error = Tensor::Zeros(shape, DType::kF64);
    }
    double& v(std::int64_t i) const { return value.data<double>()[i]; }
    double& e(std::int64_t i) const { return error.data<double>()[i]; }
  };

 private:
  const Case& test_;
  bool rounds_argument_;
  DType dtype_, acc_;
  std::int64_t groups_, rows_;

 public:
  Tensor x, dy, w1, w2, scale;
  Pair pre, act, y, dpre, dx, dscale, dw1, dw2;

 private:
  static double At(const Tensor& t, std::int64_t i) { return ElementAsDouble(t, i); }

  // Adds the sum over k < terms of a(k)·b(k) to element i; errors ea, eb of the factors.
  template <class F>
  void Dot(const Pair& to, std::int64_t i, std::int64_t terms, DType out, F&& term) {
    double value = 0, error = 0, size = 0;
    for (std::int64_t k = 0; k < terms; ++k) {
      const auto [a, ea, b, eb] = term(k);
      value += a * b;
      error += ea * std::abs(b) + eb * std::abs(a) + ea * eb;
      size += (std::abs(a) + ea) * (std::abs(b) + eb);
    }
    to.v(i) = value;
    to.e(i) = error + check::DotBound(terms + 1, size, acc_, out);
  }

  // As in the test of activation: exp, a division, and up to eight products and sums.
  std::int64_t Terms(double a) const {
    return 16 + (rounds_argument_ ? static_cast<std::int64_t>(2 * std::abs(a)) : 0);
  }
  double Roundings(double a, double size) const {
    return (check::Gamma(Terms(a), acc_) + check::UnitRoundoff(dtype_)) * size +
           std::ldexp(1.0, -118);  // σ(a) is 0 below −88.3
  }

  void Row(std::int64_t e, std::int64_t r) {
    const std::int64_t h = test_.hidden, f = test_.ffn, n = test_.out;
    for (std::int64_t j = 0; j < 2 * f; ++j) {
      Dot(pre, r * 2 * f + j, h, dtype_, [&](std::int64_t k) {
        return std::array{At(x, r * h + k), 0.0, At(w1, (e * 2 * f + j) * h + k), 0.0};
      });
    }
    const double s = test_.has_scale ? At(scale, r) : 1;
    double ds = 0, ds_error = 0, ds_size = 0;
    for (std::int64_t j = 0; j < f; ++j) {
      Dot(dact_, r * f + j, n, dtype_, [&](std::int64_t k) {
        return std::array{At(dy, r * n + k), 0.0, At(w2, (e * n + k) * f + j), 0.0};
      });
      const double a = pre.v(r * 2 * f + j), ea = pre.e(r * 2 * f + j);
      const double b = pre.v(r * 2 * f + f + j), eb = pre.e(r * 2 * f + f + j);
      const double d = dact_.v(r * f + j), ed = dact_.e(r * f + j);
      const double sigma = 1 / (1 + std::exp(-a)), silu = a * sigma;
      const double slope = sigma * (1 + a * (1 - sigma));
      // |silu′| ≤ 1.1 and |silu″| ≤ 0.5 everywhere.
      const double esilu = 1.1 * ea, eslope = 0.5 * ea;
      const double slope_size = sigma * (1 + std::abs(a));  // 1 + a·(1 − σ) may cancel
      const auto product = [](double p, double ep, double q, double eq) {
        return ep * std::abs(q) + eq * std::abs(p) + ep * eq;
      };
      const double gate_up = silu * b, egate_up = product(silu, esilu, b, eb);
      act.v(r * f + j) = gate_up * s;
      act.e(r * f + j) = egate_up * s + Roundings(a, (std::abs(gate_up) + egate_up) * s);
      const double db = d * b, edb = product(d, ed, b, eb);
      dpre.v(r * 2 * f + j) = db * s * slope;
      dpre.e(r * 2 * f + j) = s * product(db, edb, slope, eslope) +
                              Roundings(a, s * (std::abs(db) + edb) * (slope_size + eslope));
      dpre.v(r * 2 * f + f + j) = d * s * silu;
      dpre.e(r * 2 * f + f + j) = s * product(d, ed, silu, esilu) +
                                  Roundings(a, s * (std::abs(d) + ed) * (std::abs(silu) + esilu));
      ds += d * gate_up;
      ds_error += product(d, ed, gate_up, egate_up);
      const double size = (std::abs(d) + ed) * (std::abs(gate_up) + egate_up);
      ds_error += check::Gamma(Terms(a), acc_) * size;
      ds_size += size;
    }
    dscale.v(r) = ds;
    dscale.e(r) = ds_error + check::Gamma(f, acc_) * ds_size + std::ldexp(1.0, -118) * f;
    for (std::int64_t j = 0; j < n; ++j) {
      Dot(y, r * n + j, f, dtype_, [&](std::int64_t k) {
        return std::array{act.v(r * f + k), act.e(r * f + k), At(w2, (e * n + j) * f + k), 0.0};
      });
    }
    for (std::int64_t j = 0; j < h; ++j) {
      Dot(dx, r * h + j, 2 * f, dtype_, [&](std::int64_t k) {
        return std::array{dpre.v(r * 2 * f + k), dpre.e(r * 2 * f + k),
                          At(w1, (e * 2 * f + k) * h + j), 0.0};
      });
    }
  }

  void Weights(std::int64_t e, std::int64_t begin, std::int64_t end) {
    const std::int64_t h = test_.hidden, f = test_.ffn, n = test_.out;
    for (std::int64_t i = 0; i < 2 * f; ++i) {
      for (std::int64_t j = 0; j < h; ++j) {
        Dot(dw1, (e * 2 * f + i) * h + j, end - begin, acc_, [&](std::int64_t k) {
          const std::int64_t at = (begin + k) * 2 * f + i;
          return std::array{dpre.v(at), dpre.e(at), At(x, (begin + k) * h + j), 0.0};
        });
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < f; ++j) {
        Dot(dw2, (e * n + i) * f + j, end - begin, acc_, [&](std::int64_t k) {
          const std::int64_t at = (begin + k) * f + j;
          return std::array{act.v(at), act.e(at), At(dy, (begin + k) * n + i), 0.0};
        });
      }
    }
  }

  Pair dact_;
};

GroupedMlpProblem Problem(const Case& test, DType dtype) {
  return {dtype,   static_cast<std::int64_t>(test.split_sizes.size()), 0, test.hidden, test.ffn,
          test.out};
}

struct HalfInputs {
  Tensor pre, dy, scale, splits;
  Margins margins;
};
// The second half alone gives what the whole gives, from the same P.
void CheckHalf(const Context& ctx, const Case& test, DType dtype, const Exact& exact,
               const HalfInputs& in) {
  const std::int64_t all = in.pre.dim(0), rows = exact.x.dim(0);
  const Strided y({all, test.out}, dtype, in.margins), act({all, test.ffn}, dtype, in.margins),
      dpre({all, 2 * test.ffn}, dtype, in.margins);
  const Tensor dscale = Tensor::Empty({all}, ComputeType(dtype));
  SwiGluLinearForward(ctx, {in.pre, in.splits}, exact.w2, in.scale, act.view, Write(y.view));
  SwiGluLinearBackward(ctx, {in.dy, in.splits}, in.pre, exact.w2, in.scale, Write(dpre.view),
                       Write(dscale));
  const auto check = [&](const char* name, const Tensor& got, const Exact::Pair& want) {
    EXPECT_TRUE(Agrees(check::Compare(name, got.Slice(0, 0, rows), want.value,
                                      [&](std::int64_t i) { return want.e(i); })));
  };
  check("half y", y.Values(), exact.y);
  check("half act", act.Values(), exact.act);
  check("half dpre", dpre.Values(), exact.dpre);
  check("half dscale", dscale, exact.dscale);
  EXPECT_TRUE(y.UntouchedBeyond(rows));
  EXPECT_TRUE(act.UntouchedBeyond(rows));
  EXPECT_TRUE(dpre.UntouchedBeyond(rows));
}

void CheckCase(const Context& ctx, const Case& test, DType dtype, const Exact& exact,
               WriteMode mode, Margins margins = Margins::kOdd) {
  const Tensor splits = Tensor::FromSpan<std::int64_t>(
      {static_cast<std::int64_t>(test.split_sizes.size())}, test.split_sizes);
  const std::int64_t rows = exact.x.dim(0), all = rows + test.rows_beyond;
  const DType acc = ComputeType(dtype);
  const auto padded = [&](const Tensor& t) {
    Strided s({all, t.dim(1)}, dtype, margins);
    s.Assign(t);
    return s;
  };
  const Strided x = padded(exact.x), dy = padded(exact.dy);
  const Tensor scale =
      test.has_scale
          ? test.rows_beyond > 0 ? testing::Pad(exact.scale, test.rows_beyond).whole : exact.scale
          : Tensor();
  // Accumulating outputs begin at one: exact in every dtype.
  const auto start = [&](const Tensor& t) {
    FillPoison(t);
    if (mode == WriteMode::kWrite) return Output{t, mode};
    const Tensor ones = Tensor::Zeros(t.shape(), DType::kF64);
    for (double& v : ones.span<double>()) v = 1;
    Convert(ones, t);
    return Output{t, mode};
  };
  const auto check = [&](const char* name, const Tensor& got, const Exact::Pair& want, DType out) {
    const double one = mode == WriteMode::kAccumulate && std::string_view(name) != "pre" ? 1 : 0;
    Tensor expected = want.value.Clone();
    for (double& v : expected.span<double>()) v += one;
    EXPECT_TRUE(Agrees(check::Compare(name, got, expected, [&](std::int64_t i) {
      // Adding to one rounds once more, in the accumulator or in the dtype.
      return want.e(i) + one * (check::UnitRoundoff(out) + check::UnitRoundoff(acc)) *
                             (1 + std::abs(want.v(i)) + want.e(i));
    })));
  };
  const Strided pre({all, 2 * test.ffn}, dtype, margins), y({all, test.out}, dtype, margins),
      dx({all, test.hidden}, dtype, margins);
  if (mode == WriteMode::kAccumulate) {
    for (const Strided* t : {&y, &dx}) {
      const Tensor ones = Tensor::Zeros(t->view.shape(), dtype);
      start(ones);
      t->Assign(ones);
    }
  }
  const GroupedMlpWeights weights{exact.w1, exact.w2};
  GroupedMlpForward(ctx, {x.view, splits}, weights, scale, pre.view, {y.view, mode});
  check("pre", pre.Values().Slice(0, 0, rows), exact.pre, dtype);
  check("y", y.Values().Slice(0, 0, rows), exact.y, dtype);
  EXPECT_TRUE(pre.UntouchedBeyond(rows));
  const Strided used_up({all, 2 * test.ffn}, dtype, margins);
  used_up.Assign(pre.Values().Slice(0, 0, rows));
  if (mode == WriteMode::kWrite) {
    EXPECT_TRUE(y.UntouchedBeyond(rows));
  }

  CheckHalf(ctx, test, dtype, exact, {pre.view, dy.view, scale, splits, margins});

  const Output dscale = start(Tensor::Empty({all}, acc));
  const Output dw1 = start(Tensor::Empty(exact.w1.shape(), acc));
  const Output dw2 = start(Tensor::Empty(exact.w2.shape(), acc));
  GroupedMlpBackward(ctx, {dy.view, splits}, x.view, used_up.view, weights, scale,
                     {.dx = Output{dx.view, mode}, .dscale = dscale, .dw1 = dw1, .dw2 = dw2});
  EXPECT_TRUE(used_up.UntouchedBeyond(rows));
  check("dx", dx.Values().Slice(0, 0, rows), exact.dx, dtype);
  check("dscale", dscale.tensor.Slice(0, 0, rows), exact.dscale, acc);
  check("dw1", dw1.tensor, exact.dw1, acc);
  check("dw2", dw2.tensor, exact.dw2, acc);
  if (mode == WriteMode::kWrite) {
    EXPECT_TRUE(dx.UntouchedBeyond(rows));
  }
}

// All but the implementation that wants its tensors aligned.
std::vector<GroupedMlpImpl> AnyTensors() {
  std::vector<GroupedMlpImpl> impls(GroupedMlpImpls().begin(), GroupedMlpImpls().end());
  std::erase_if(impls, [](const GroupedMlpImpl& impl) { return impl.name == "hopper"; });
  return impls;
}

TEST(GroupedMlpOp, WithinTheBoundOfF64) {
  const internal::ScopedWaveBytes several_waves(1 << 14);
  const std::vector<GroupedMlpImpl> impls = AnyTensors();
  for (const Case& test : Cases()) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("{} {} seed {}", test.name, Name(dtype), testing::TestSeed()));
      const Exact exact(test, dtype);
      const Exact on_gpu(test, dtype, dtype == DType::kBF16);
      testing::ForEachImplementation(
          std::span<const GroupedMlpImpl>(impls), Problem(test, dtype), [&](const Context& ctx) {
            const bool gpu = ctx.device().type == DeviceType::kCuda;
            for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
              CheckCase(ctx, test, dtype, gpu ? on_gpu : exact, mode);
            }
          });
    }
  }
}

// The context of the implementation that fuses, where there is a GPU for it.
std::optional<Context> HopperContext(const Case& test) {
  if (!testing::HasCuda()) return std::nullopt;
  for (const GroupedMlpImpl& impl : GroupedMlpImpls()) {
    if (impl.name != "hopper") continue;
    GroupedMlpProblem problem = Problem(test, DType::kBF16);
    problem.max_rows = 1;
    const Support support = impl.supports(problem);
    if (support) return testing::CudaContext().WithImpl("grouped_mlp=hopper");
    std::printf("[  hopper  ] not run: %s\n", support.reason.c_str());
  }
  return std::nullopt;
}

TEST(GroupedMlpHopper, WithinTheBoundOfF64) {
  for (const Case& test : {
           Case{"one token", {0, 1, 0}, 24, 16, 24},
           Case{"0, 1, 7, 33", {0, 1, 7, 33, 0}, 72, 40, 24, 9},
           Case{"no rows at all", {0, 0}, 8, 16, 8, 3},
           Case{"all rows on one group", {0, 0, 300, 0}, 64, 136, 32, 5},
           Case{"wider than a tile", {150, 3, 129}, 40, 264, 48, 130},
           Case{"no row scale", {5, 40}, 16, 72, 32, 2, false},
       }) {
    const std::optional<Context> ctx = HopperContext(test);
    if (!ctx) GTEST_SKIP() << "no GPU that the Hopper kernels run on";
    SCOPED_TRACE(fmt::format("{} seed {}", test.name, testing::TestSeed()));
    const Exact exact(test, DType::kBF16, /*rounds_argument=*/true);
    for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
      CheckCase(*ctx, test, DType::kBF16, exact, mode, Margins::kAligned);
    }
  }
}

// Everything that a forward and a backward pass of one implementation write.
struct Written {
  Tensor pre, y, dx, dscale, dw1, dw2;
};
Written RunAll(const Context& ctx, const Case& test) {
  const auto groups = static_cast<std::int64_t>(test.split_sizes.size());
  const std::int64_t rows =
      std::accumulate(test.split_sizes.begin(), test.split_sizes.end(), test.rows_beyond);
  const std::int64_t h = test.hidden, f = test.ffn, n = test.out;
  constexpr DType kDType = DType::kBF16;
  const Tensor splits = Tensor::FromSpan<std::int64_t>({groups}, test.split_sizes);
  const Tensor x = testing::Normal({rows, h}, kDType, "x");
  const Tensor dy = testing::Normal({rows, n}, kDType, "dy");
  const GroupedMlpWeights w{testing::Normal({groups, 2 * f, h}, kDType, "w1"),
                            testing::Normal({groups, n, f}, kDType, "w2")};
  const Tensor scale =
      test.has_scale ? testing::Uniform({rows}, DType::kF32, "scale", 0.1, 1.0) : Tensor();
  Written out{Tensor::Empty({rows, 2 * f}, kDType),     Tensor::Empty({rows, n}, kDType),
              Tensor::Empty({rows, h}, kDType),         Tensor::Empty({rows}, DType::kF32),
              Tensor::Empty(w.w1.shape(), DType::kF32), Tensor::Empty(w.w2.shape(), DType::kF32)};
  for (const Tensor& t : {out.pre, out.y, out.dx, out.dscale, out.dw1, out.dw2}) FillPoison(t);
  GroupedMlpForward(ctx, {x, splits}, w, scale, out.pre, Write(out.y));
  GroupedMlpBackward(ctx, {dy, splits}, x, out.pre.Clone(), w, scale,
                     {.dx = Write(out.dx),
                      .dscale = Write(out.dscale),
                      .dw1 = Write(out.dw1),
                      .dw2 = Write(out.dw2)});
  return out;
}

// One op after another gives the same bits, but for the gradient of the row scale, which is summed
// in another order; two runs give the same bits in everything.
TEST(GroupedMlpHopper, TheBitsOfOneOpAfterAnother) {
  std::vector<std::int64_t> many(128);
  for (std::size_t e = 0; e < many.size(); ++e) many[e] = static_cast<std::int64_t>(e * 37 % 23);
  for (const Case& test : {
           Case{"0, 1, 7, 33", {0, 1, 7, 33, 0}, 136, 200, 72, 9},
           Case{"all rows on one group", {0, 0, 1500, 0}, 256, 384, 128, 200},
           Case{"random", {259, 1, 640, 77, 300, 0, 128, 129}, 192, 520, 264, 7},
           Case{"128 groups", many, 64, 88, 64, 3},
           Case{"no row scale", {300, 40}, 128, 256, 128, 0, false},
           // Tiles of 256 columns, which are chosen for several waves of long sums.
           Case{"long sums", {2000, 48}, 3136, 4096, 64},
       }) {
    const std::optional<Context> ctx = HopperContext(test);
    if (!ctx) GTEST_SKIP() << "no GPU that the Hopper kernels run on";
    SCOPED_TRACE(test.name);
    const Written got = RunAll(*ctx, test), again = RunAll(*ctx, test);
    const Written ops = RunAll(testing::CudaContext().WithImpl("grouped_mlp=cuda"), test);
    const auto same = [](const char* name, const Tensor& a, const Tensor& b) {
      EXPECT_TRUE(Agrees(check::CompareBitwise(name, a, b)));
    };
    same("pre", got.pre, ops.pre);
    same("y", got.y, ops.y);
    same("dx", got.dx, ops.dx);
    same("dw1", got.dw1, ops.dw1);
    same("dw2", got.dw2, ops.dw2);
    for (const auto& [a, b] : {std::pair(got.pre, again.pre), std::pair(got.y, again.y),
                               std::pair(got.dx, again.dx), std::pair(got.dscale, again.dscale),
                               std::pair(got.dw1, again.dw1), std::pair(got.dw2, again.dw2)}) {
      same("again", a, b);
    }
  }
}

// Trap zero-token-expert: its gradients are zeros in Write, left alone in Accumulate.
TEST(GroupedMlpOp, ZeroTokenExpert) {
  const Case test{"zero tokens", {0, 4, 0}, 8, 6, 8};
  const Exact exact(test, DType::kF32);
  const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, test.split_sizes);
  const Tensor pre = Tensor::Empty({4, 12}, DType::kF32), y = Tensor::Empty({4, 8}, DType::kF32);
  for (const char* impl : {"cpu", "ref"}) {
    const Context ctx = Context().WithImpl(impl);
    GroupedMlpForward(ctx, {exact.x, splits}, {exact.w1, exact.w2}, {}, pre, Write(y));
    const Tensor dw1 = exact.w1.Clone(), dw2 = exact.w2.Clone();
    GroupedMlpBackward(ctx, {exact.dy, splits}, exact.x, pre.Clone(), {exact.w1, exact.w2}, {},
                       {.dw1 = Accumulate(dw1), .dw2 = Accumulate(dw2)});
    for (const std::int64_t e : {0, 2}) {
      EXPECT_TRUE(Agrees(check::CompareBitwise("dw1", dw1.Select(e), exact.w1.Select(e))));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dw2", dw2.Select(e), exact.w2.Select(e))));
    }
    FillPoison(dw1);
    FillPoison(dw2);
    GroupedMlpBackward(ctx, {exact.dy, splits}, exact.x, pre, {exact.w1, exact.w2}, {},
                       {.dw1 = Write(dw1), .dw2 = Write(dw2)});
    for (const std::int64_t e : {0, 2}) {
      for (const float v : dw1.Select(e).span<float>()) EXPECT_EQ(v, 0);
      for (const float v : dw2.Select(e).span<float>()) EXPECT_EQ(v, 0);
    }
  }
}

TEST(GroupedMlpOp, TheSameBitsWhoeverComputes) {
  const Case test{"several pieces", {500, 90, 300}, 24, 40, 24};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, test.split_sizes);
    const Tensor x = testing::Normal({890, 24}, dtype, "x");
    const GroupedMlpWeights w{testing::Normal({3, 80, 24}, dtype, "w1"),
                              testing::Normal({3, 24, 40}, dtype, "w2")};
    Tensor first;
    for (int i = 0; i < 4; ++i) {
      const Tensor y = Tensor::Empty({890, 24}, dtype);
      GroupedMlpForward(Context(), {x, splits}, w, {}, {}, Write(y));
      if (first) {
        EXPECT_TRUE(Agrees(check::CompareBitwise("y", y, first)));
      }
      first = y;
    }
  }
}

TEST(GroupedMlpOp, BadInputNamesOpAndValues) {
  const auto run = [](const std::vector<std::int64_t>& counts, const Shape& w2) {
    return [=] {
      const Tensor x = Tensor::Zeros({5, 8}, DType::kF32), y = x.Clone();
      GroupedMlpForward(
          Context(),
          {x, Tensor::FromSpan<std::int64_t>({static_cast<std::int64_t>(counts.size())}, counts)},
          {Tensor::Zeros({2, 12, 8}, DType::kF32), Tensor::Zeros(w2, DType::kF32)}, {}, {},
          Write(y));
    };
  };
  EXPECT_NO_THROW(run({2, 3}, {2, 8, 6})());
  EXPECT_THAT(run({2, 3}, {2, 8, 7}),
              ThrowsMessage<Error>(HasSubstr("w1 is f32 [2, 12, 8], expected f32 [2, 14, 8]")));
  EXPECT_THAT(run({2, -3}, {2, 8, 6}), ThrowsMessage<Error>(HasSubstr("-3 is negative")));
  EXPECT_THAT(run({2, 4}, {2, 8, 6}), ThrowsMessage<Error>(HasSubstr("more than the 5 rows")));
  EXPECT_THAT(run({2, 3, 0}, {2, 8, 6}), ThrowsMessage<Error>(HasSubstr("split_sizes")));
}

TEST(RowPieces, CoverEveryRowOnceAndLeaveNoSliver) {
  for (const int threads : {1, 2, 16}) {
    const std::vector<std::int64_t> offsets = {0, 0, 1, 64, 191, 1000, 1000, 9000};
    std::vector<internal::RowPiece> pieces = internal::PlanRowPieces(offsets, threads, 1024);
    std::sort(pieces.begin(), pieces.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::int64_t at = 0;
    for (const internal::RowPiece& p : pieces) {
      EXPECT_EQ(p.begin, at);
      at = p.end;
      const auto e = static_cast<std::size_t>(p.group);
      EXPECT_GE(p.begin, offsets[e]);
      EXPECT_LE(p.end, offsets[e + 1]);
      EXPECT_GE(p.rows(), std::min<std::int64_t>(56, offsets[e + 1] - offsets[e]));
      EXPECT_LE(p.rows(), 1024 + 8);
    }
    EXPECT_EQ(at, 9000);
  }
}

TEST(GroupedMlpOp, GradientOfReference) {
  const Context ctx = Context().WithImpl("ref");
  constexpr std::int64_t kRows = 6, kHidden = 4, kFfn = 3, kOut = 5;
  const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, std::vector<std::int64_t>{2, 0, 4});
  const Tensor x = testing::Normal({kRows, kHidden}, DType::kF64, "x");
  const Tensor w1 = testing::Normal({3, 2 * kFfn, kHidden}, DType::kF64, "w1");
  const Tensor w2 = testing::Normal({3, kOut, kFfn}, DType::kF64, "w2");
  const Tensor scale = testing::Uniform({kRows}, DType::kF64, "scale", 0.2, 1.0);
  const Tensor dy = testing::Normal({kRows, kOut}, DType::kF64, "dy");
  const Tensor y = Tensor::Empty({kRows, kOut}, DType::kF64);
  const Tensor pre = Tensor::Empty({kRows, 2 * kFfn}, DType::kF64);
  const auto loss = [&] {
    GroupedMlpForward(ctx, {x, splits}, {w1, w2}, scale, pre, Write(y));
    return testing::Inner(y, dy);
  };
  loss();
  const Tensor dx = Tensor::Empty(x.shape(), DType::kF64);
  const Tensor dscale = Tensor::Empty(scale.shape(), DType::kF64);
  const Tensor dw1 = Tensor::Empty(w1.shape(), DType::kF64);
  const Tensor dw2 = Tensor::Empty(w2.shape(), DType::kF64);
  GroupedMlpBackward(
      ctx, {dy, splits}, x, pre, {w1, w2}, scale,
      {.dx = Write(dx), .dscale = Write(dscale), .dw1 = Write(dw1), .dw2 = Write(dw2)});
  EXPECT_TRUE(Agrees(testing::CheckGradient("dx", loss, x, dx)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dscale", loss, scale, dscale)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dw1", loss, w1, dw1)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dw2", loss, w2, dw2)));
}

}  // namespace
}  // namespace cistron::ops
