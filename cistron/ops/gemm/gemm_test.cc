#include "cistron/ops/gemm/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/base/threads.h"
#include "cistron/check/bounds.h"
#include "cistron/ops/gemm/gemm_cases.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/transpose.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/instruction_set.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::Strided;

Tensor Absolute(const Tensor& t) {
  Tensor absolute = ConvertTo(t, DType::kF64);
  for (double& v : absolute.span<double>()) v = std::abs(v);
  return absolute;
}

Shape Stored(std::int64_t rows, std::int64_t cols, Transpose transpose) {
  return transpose == Transpose::kYes ? Shape{cols, rows} : Shape{rows, cols};
}

// Product of two matrices and a starting value in f64 by the reference.
Tensor Exact(const GemmCase& test, const Tensor& a, const Tensor& b, const Tensor& start) {
  Tensor c = ConvertTo(start, DType::kF64);
  Gemm(Context().WithImpl("ref"), ConvertTo(a, DType::kF64), test.trans_a,
       ConvertTo(b, DType::kF64), test.trans_b, Accumulate(c));
  return c;
}

struct Types {
  DType in, out;
};
constexpr Types kTypes[] = {{DType::kF64, DType::kF64},
                            {DType::kF32, DType::kF32},
                            {DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32}};

void CheckCase(const GemmImpl& impl, const GemmCase& test, Types types, WriteMode mode) {
  SCOPED_TRACE(fmt::format("{} {} {}->{} {} seed {}", impl.name, test.name, Name(types.in),
                           Name(types.out), mode == WriteMode::kWrite ? "write" : "accumulate",
                           testing::TestSeed()));
  const Tensor a = testing::Normal(Stored(test.m, test.k, test.trans_a), types.in, "a");
  const Tensor b = testing::Normal(Stored(test.k, test.n, test.trans_b), types.in, "b");
  const bool accumulate = mode == WriteMode::kAccumulate;
  const Tensor start = accumulate ? testing::Normal({test.m, test.n}, types.out, "c")
                                  : Tensor::Zeros({test.m, test.n}, types.out);
  const Strided sa(a), sb(b), c({test.m, test.n}, types.out);
  if (accumulate) c.Assign(start);
  Gemm(testing::ContextOf(impl), sa.view, test.trans_a, sb.view, test.trans_b, {c.view, mode});
  EXPECT_TRUE(c.SurroundingsUntouched());

  const Tensor expected = Exact(test, a, b, start);
  const Tensor abs_sum = Exact(test, Absolute(a), Absolute(b), Absolute(start));
  // The expected value is itself an f64 sum.
  const DType acc = ComputeType(types.in);
  EXPECT_TRUE(Agrees(check::Compare("gemm.c", c.Values(), expected, [&](std::int64_t i) {
    const double sum = ElementAsDouble(abs_sum, i);
    return check::DotBound(test.k + 1, sum, acc, types.out) +
           check::DotBound(test.k + 1, sum, DType::kF64, DType::kF64);
  })));
}

bool Runs(const GemmImpl& impl, const GemmCase& test, Types types) {
  return static_cast<bool>(
      impl.supports({types.in, types.out, test.trans_a, test.trans_b, test.m, test.n, test.k}));
}

TEST(Gemm, CasesAgreeWithExactProduct) {
  int checked = 0;
  for (const GemmImpl& impl : testing::RunnableImplementations(GemmImpls())) {
    for (const GemmCase& test : kGemmCases) {
      for (const Types types : kTypes) {
        if (!Runs(impl, test, types)) continue;
        CheckCase(impl, test, types, WriteMode::kWrite);
        CheckCase(impl, test, types, WriteMode::kAccumulate);
        if (impl.device == DeviceType::kCpu) ++checked;
      }
    }
  }
  // Both implementations of the CPU, f32 and two bf16 results in each; f64 in the reference.
  EXPECT_EQ(checked, static_cast<int>(std::size(kGemmCases)) * 7);
}

TEST(Transpose, EverySizeOnEveryInstructionSet) {
  for (const std::int64_t target : testing::InstructionSets()) {
    const testing::ScopedInstructionSet scope(target);
    for (const std::int64_t rows : {1, 3, 4, 15, 16, 17, 33}) {
      for (const std::int64_t cols : {1, 2, 4, 5, 7, 8, 30}) {
        SCOPED_TRACE(fmt::format("{} x {}", rows, cols));
        const Strided from(testing::Normal({rows, cols}, DType::kF32, "from"));
        const Strided to({cols, rows}, DType::kF32);
        internal::TransposeF32(from.view.data<float>(), from.view.stride(0), rows, cols,
                               to.view.data<float>(), to.view.stride(0));
        EXPECT_TRUE(to.SurroundingsUntouched());
        const Tensor in = from.Values(), out = to.Values();
        for (std::int64_t i = 0; i < rows * cols; ++i) {
          EXPECT_EQ(ElementAsDouble(out, i % cols * rows + i / cols), ElementAsDouble(in, i));
        }
      }
    }
  }
}

// NaN and Inf of an operand reach exactly the results that use them.
TEST(Gemm, NanAndInfPropagate) {
  for (const GemmImpl& impl : testing::RunnableImplementations(GemmImpls())) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor a = testing::Normal({20, 24}, DType::kF32, "a");
      const Tensor b = testing::Normal({18, 24}, DType::kF32, "b");
      a.data<float>()[3 * 24 + 5] = std::numeric_limits<float>::quiet_NaN();
      a.data<float>()[7 * 24 + 2] = std::numeric_limits<float>::infinity();
      const Tensor c = Tensor::Empty({20, 18}, DType::kF32);
      Gemm(testing::ContextOf(impl), ConvertTo(a, dtype), Transpose::kNo, ConvertTo(b, dtype),
           Transpose::kYes, Write(c));
      for (std::int64_t i = 0; i < c.numel(); ++i) {
        const float v = c.data<float>()[i];
        EXPECT_EQ(std::isnan(v), i / 18 == 3) << impl.name << " element " << i;
        EXPECT_EQ(std::isinf(v), i / 18 == 7) << impl.name << " element " << i;
      }
    }
  }
}

// atomics: the same call gives the same bits every time.
TEST(Gemm, Atomics) {
  const Tensor a = testing::Normal({300, 200}, DType::kF32, "a");
  const Tensor b = testing::Normal({130, 200}, DType::kF32, "b");
  for (const GemmImpl& impl : testing::RunnableImplementations(GemmImpls())) {
    const Context ctx = testing::ContextOf(impl);
    const Tensor first = Tensor::Empty({300, 130}, DType::kF32);
    Gemm(ctx, a, Transpose::kNo, b, Transpose::kYes, Write(first));
    for (int repeat = 0; repeat < 20; ++repeat) {
      const Tensor again = Tensor::Empty({300, 130}, DType::kF32);
      Gemm(ctx, a, Transpose::kNo, b, Transpose::kYes, Write(again));
      ASSERT_TRUE(Agrees(check::CompareBitwise("gemm.c", again, first)));
    }
  }
}

// library-heuristic-miss: where cuBLAS has no algorithm the plain kernel runs, and says so once.
TEST(Gemm, LibraryHeuristicMiss) {
  if (!testing::HasCuda()) GTEST_SKIP() << "there is no GPU here";
  // No other test has these sizes.
  const Tensor a = testing::Normal({37, 43}, DType::kF32, "a");
  const Tensor b = testing::Normal({43, 59}, DType::kF32, "b");
  const auto product = [&](const char* impl) {
    const Tensor c = Tensor::Empty({37, 59}, DType::kF32);
    FillPoison(c);
    Gemm(testing::CudaContext().WithImpl(impl), a, Transpose::kNo, b, Transpose::kNo, Write(c));
    return c;
  };
  internal::cublas_knows_nothing = true;
  ::testing::internal::CaptureStderr();
  const Tensor first = product("gemm=cublas");
  internal::cublas_knows_nothing = false;
  const Tensor second = product("gemm=cublas");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, ::testing::HasSubstr("cublas has no algorithm for [37, 59, 43]"));
  EXPECT_EQ(log.find("has no algorithm"), log.rfind("has no algorithm"));
  const Tensor plain = product("gemm=cuda");
  EXPECT_TRUE(Agrees(check::CompareBitwise("first", first, plain)));
  EXPECT_TRUE(Agrees(check::CompareBitwise("second", second, plain)));
}

TEST(Gemm, GradientOfReferenceIsItsOwnProducts) {
  const Context ctx = Context().WithImpl("ref");
  const Tensor a = testing::Normal({4, 6}, DType::kF64, "a");
  const Tensor b = testing::Normal({5, 6}, DType::kF64, "b");
  const Tensor weight = testing::Normal({4, 5}, DType::kF64, "dc");
  const auto loss = [&] {
    const Tensor c = Tensor::Empty({4, 5}, DType::kF64);
    Gemm(ctx, a, Transpose::kNo, b, Transpose::kYes, Write(c));
    double sum = 0;
    for (std::int64_t i = 0; i < c.numel(); ++i) {
      sum += c.data<double>()[i] * weight.data<double>()[i];
    }
    return sum;
  };
  const Tensor da = Tensor::Empty({4, 6}, DType::kF64);
  const Tensor db = Tensor::Empty({5, 6}, DType::kF64);
  Gemm(ctx, weight, Transpose::kNo, b, Transpose::kNo, Write(da));
  Gemm(ctx, weight, Transpose::kYes, a, Transpose::kNo, Write(db));
  EXPECT_TRUE(Agrees(testing::CheckGradient("gemm.da", loss, a, da)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("gemm.db", loss, b, db)));
}

template <class F>
std::string MessageOf(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    return e.message();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Gemm, ErrorsNameShapesAndDtypes) {
  const Context ctx;
  const Tensor a = Tensor::Zeros({3, 4}, DType::kF32);
  const Tensor b = Tensor::Zeros({5, 6}, DType::kF32);
  const Tensor c = Tensor::Zeros({3, 6}, DType::kF32);
  EXPECT_THAT(
      MessageOf([&] { Gemm(ctx, a, Transpose::kNo, b, Transpose::kNo, Write(c)); }),
      ::testing::AllOf(::testing::HasSubstr("gemm: shapes"), ::testing::HasSubstr("f32 [3, 4]"),
                       ::testing::HasSubstr("f32 [5, 6]")));
  const Tensor b4 = Tensor::Zeros({4, 6}, DType::kBF16);
  EXPECT_THAT(MessageOf([&] { Gemm(ctx, a, Transpose::kNo, b4, Transpose::kNo, Write(c)); }),
              ::testing::HasSubstr("dtypes do not fit"));
  EXPECT_THAT(MessageOf([&] { Gemm(ctx, Tensor(), Transpose::kNo, b4, Transpose::kNo, Write(c)); }),
              ::testing::HasSubstr("an undefined tensor"));
}

}  // namespace
}  // namespace cistron::ops
