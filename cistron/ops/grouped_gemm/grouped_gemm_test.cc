#include "cistron/ops/grouped_gemm/grouped_gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "cistron/base/threads.h"
#include "cistron/check/bounds.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_cases.h"
#include "cistron/ops/grouped_gemm/grouped_tasks.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::Margins;
using testing::Strided;

constexpr GroupedGemmKind kKinds[] = {GroupedGemmKind::kForward, GroupedGemmKind::kDgrad,
                                      GroupedGemmKind::kWgrad};
constexpr WriteMode kModes[] = {WriteMode::kWrite, WriteMode::kAccumulate};

// What runs on this machine in any dtype and shape; every test goes through all of it.
std::vector<GroupedGemmImpl> Impls() {
  std::vector<GroupedGemmImpl> impls = testing::RunnableImplementations(GroupedGemmImpls());
  std::erase_if(impls, [](const GroupedGemmImpl& impl) { return impl.name == "hopper"; });
  return impls;
}

struct Types {
  DType in, out;
};
constexpr Types kTypes[] = {{DType::kF64, DType::kF64},
                            {DType::kF32, DType::kF32},
                            {DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32}};

Tensor Splits(const std::vector<std::int64_t>& sizes) {
  return Tensor::FromSpan<std::int64_t>({static_cast<std::int64_t>(sizes.size())}, sizes);
}

std::int64_t Sum(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

Tensor Absolute(const Tensor& t) {
  Tensor absolute = ConvertTo(t, DType::kF64);
  for (double& v : absolute.span<double>()) v = std::abs(v);
  return absolute;
}

void RunKind(const Context& ctx, GroupedGemmKind kind, const Tensor& splits, const Tensor& a,
             const Tensor& b, const Output& c) {
  switch (kind) {
    case GroupedGemmKind::kForward: return GroupedGemmForward(ctx, {a, splits}, b, c);
    case GroupedGemmKind::kDgrad: return GroupedGemmDgrad(ctx, {a, splits}, b, c);
    case GroupedGemmKind::kWgrad: return GroupedGemmWgrad(ctx, {a, splits}, {b, splits}, c);
  }
}

// Operands and the shape of the result of a case, without rows beyond the groups.
struct Operands {
  Tensor a, b;
  Shape c;
};
Operands MakeOperands(GroupedGemmKind kind, const GroupedGemmCase& test, DType dtype) {
  const std::int64_t rows = Sum(test.split_sizes);
  const std::int64_t groups = static_cast<std::int64_t>(test.split_sizes.size());
  const Tensor x = testing::Normal({rows, test.k}, dtype, "x");
  const Tensor dy = testing::Normal({rows, test.n}, dtype, "dy");
  const Tensor w = testing::Normal({groups, test.n, test.k}, dtype, "w");
  switch (kind) {
    case GroupedGemmKind::kForward: return {x, w, {rows, test.n}};
    case GroupedGemmKind::kDgrad: return {dy, w, {rows, test.k}};
    case GroupedGemmKind::kWgrad: break;
  }
  return {dy, x, w.shape()};
}

Tensor Exact(GroupedGemmKind kind, const Tensor& splits, const Tensor& a, const Tensor& b,
             const Tensor& start) {
  Tensor c = ConvertTo(start, DType::kF64);
  RunKind(Context().WithImpl("ref"), kind, splits, ConvertTo(a, DType::kF64),
          ConvertTo(b, DType::kF64), Accumulate(c));
  return c;
}

// Longest sum of a case, with the starting value.
std::int64_t Terms(GroupedGemmKind kind, const GroupedGemmCase& test) {
  switch (kind) {
    case GroupedGemmKind::kForward: return test.k + 1;
    case GroupedGemmKind::kDgrad: return test.n + 1;
    case GroupedGemmKind::kWgrad: break;
  }
  return *std::max_element(test.split_sizes.begin(), test.split_sizes.end()) + 1;
}

// Rows of `values` in a larger buffer, NaN beyond them and between them.
Strided Padded(const Tensor& values, std::int64_t rows_beyond, Margins margins) {
  Strided padded({values.dim(0) + rows_beyond, values.dim(1)}, values.dtype(), margins);
  padded.Assign(values);
  return padded;
}

void CheckCase(const GroupedGemmImpl& impl, GroupedGemmKind kind, const GroupedGemmCase& test,
               Types types, WriteMode mode, Margins margins = Margins::kOdd) {
  SCOPED_TRACE(fmt::format("{} {} kind {} {}->{} {} seed {}", impl.name, test.name,
                           static_cast<int>(kind), Name(types.in), Name(types.out),
                           mode == WriteMode::kWrite ? "write" : "accumulate",
                           testing::TestSeed()));
  const bool wgrad = kind == GroupedGemmKind::kWgrad;
  const Operands operands = MakeOperands(kind, test, types.in);
  const Tensor splits = Splits(test.split_sizes);
  const Tensor start = mode == WriteMode::kAccumulate ? testing::Normal(operands.c, types.out, "c")
                                                      : Tensor::Zeros(operands.c, types.out);

  const Strided a = Padded(operands.a, test.rows_beyond, margins);
  const Strided b = wgrad ? Padded(operands.b, test.rows_beyond, margins) : a;
  Tensor got;
  if (wgrad) {
    // A row more than the weight has, poisoned: dw ends with its last expert.
    const testing::PaddedTensor c = testing::MakePadded(operands.c, types.out, 1);
    if (mode == WriteMode::kAccumulate) Convert(start, c.used);
    RunKind(testing::ContextOf(impl), kind, splits, a.view, b.view, {c.used, mode});
    EXPECT_TRUE(testing::IsPoisoned(c.tail));
    got = c.used;
  } else {
    Strided c({operands.c[0] + test.rows_beyond, operands.c[1]}, types.out, margins);
    if (mode == WriteMode::kAccumulate) c.Assign(start);
    RunKind(testing::ContextOf(impl), kind, splits, a.view, operands.b, {c.view, mode});
    EXPECT_TRUE(c.UntouchedBeyond(operands.c[0]));
    got = c.Values().Slice(0, 0, operands.c[0]);
  }

  const Tensor expected = Exact(kind, splits, operands.a, operands.b, start);
  const Tensor abs_sum =
      Exact(kind, splits, Absolute(operands.a), Absolute(operands.b), Absolute(start));
  const std::int64_t terms = Terms(kind, test);
  const DType acc = ComputeType(types.in);
  EXPECT_TRUE(Agrees(check::Compare("grouped_gemm", got, expected, [&](std::int64_t i) {
    const double sum = ElementAsDouble(abs_sum, i);
    return check::DotBound(terms, sum, acc, types.out) +
           check::DotBound(terms, sum, DType::kF64, DType::kF64);
  })));
}

TEST(GroupedGemm, CasesAgreeWithExactProducts) {
  int checked = 0;
  for (const GroupedGemmImpl& impl : Impls()) {
    for (const GroupedGemmCase& test : GroupedGemmCases()) {
      for (const Types types : kTypes) {
        for (const GroupedGemmKind kind : kKinds) {
          if (!impl.supports({kind, types.in, types.out, 1, 1, test.n, test.k})) continue;
          for (const WriteMode mode : kModes) {
            CheckCase(impl, kind, test, types, mode);
            if (impl.device == DeviceType::kCpu) ++checked;
          }
        }
      }
    }
  }
  EXPECT_EQ(checked, static_cast<int>(GroupedGemmCases().size()) * 7 * 3 * 2);
}

// The kernel of compute capability 9.0 takes bf16 in rows of whole vectors: every case with its
// widths rounded up to them, and cases of several tiles.
std::vector<GroupedGemmCase> HopperCases() {
  std::vector<GroupedGemmCase> cases = GroupedGemmCases();
  for (GroupedGemmCase& test : cases) {
    test.n = (test.n + 7) / 8 * 8;
    test.k = (test.k + 7) / 8 * 8;
  }
  cases.push_back({"several tiles", {130, 0, 300, 1, 513}, 264, 520, 7});
  cases.push_back({"many experts", std::vector<std::int64_t>(128, 3), 72, 136, 5});
  return cases;
}

TEST(GroupedGemm, HopperCasesAgreeWithExactProducts) {
  std::vector<GroupedGemmCase> cases = HopperCases();
  std::vector<std::int64_t> most(512);
  for (std::size_t e = 0; e < most.size(); ++e) most[e] = static_cast<std::int64_t>(e * 7 % 5);
  cases.push_back({"512 experts", most, 24, 16, 5});
  int checked = 0;
  for (const GroupedGemmImpl& impl : testing::RunnableImplementations(GroupedGemmImpls())) {
    if (impl.name != "hopper") continue;
    for (const GroupedGemmCase& test : cases) {
      for (const Types types : {Types{DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32}}) {
        for (const GroupedGemmKind kind : kKinds) {
          if (!impl.supports({kind, types.in, types.out, 1, 1, test.n, test.k})) continue;
          for (const WriteMode mode : kModes) {
            CheckCase(impl, kind, test, types, mode, Margins::kAligned);
            ++checked;
          }
        }
      }
    }
  }
  if (checked == 0) GTEST_SKIP() << "no GPU of compute capability 9.0";
}

// Σ c² in f64 of f32 squares.
double SumOfSquares(const Tensor& c) {
  double sum = 0;
  for (std::int64_t i = 0; i < c.numel(); ++i) {
    const auto v = static_cast<float>(ElementAsDouble(c, i));
    sum += static_cast<double>(v * v);
  }
  return sum;
}

// What is stored is what GroupedGemmWgrad stores; the squares' sum is within the bound that the
// header states, and twice the same, for poisoned sums as well as for results of any shape.
TEST(GroupedGemm, WeightGradientsWithSquares) {
  std::vector<GroupedGemmCase> cases = HopperCases();
  cases.push_back({"no rows", {0, 0}, 40, 48, 0});
  int checked = 0;
  for (const GroupedGemmImpl& impl : testing::RunnableImplementations(GroupedGemmImpls())) {
    const Context ctx = testing::ContextOf(impl);
    for (const GroupedGemmCase& test : cases) {
      const Tensor splits = Splits(test.split_sizes);
      for (const DType out : {DType::kBF16, DType::kF32}) {
        SCOPED_TRACE(fmt::format("{} {} {}", impl.name, test.name, Name(out)));
        if (!impl.supports({GroupedGemmKind::kWgrad, DType::kBF16, out, 1, 1, test.n, test.k})) {
          continue;
        }
        const Operands operands = MakeOperands(GroupedGemmKind::kWgrad, test, DType::kBF16);
        const Strided dy = Padded(operands.a, test.rows_beyond, Margins::kAligned);
        const Strided x = Padded(operands.b, test.rows_beyond, Margins::kAligned);
        const Tensor plain = Tensor::Empty(operands.c, out), dw = plain.Clone();
        FillPoison(dw);
        GroupedGemmWgrad(ctx, {dy.view, splits}, {x.view, splits}, Write(plain));
        Tensor sums = GroupedGemmWgradWithSquares(ctx, {dy.view, splits}, {x.view, splits}, dw);
        EXPECT_TRUE(Agrees(check::CompareBitwise("dw", dw, plain)));
        if (!sums) {
          EXPECT_NE(impl.name, "hopper");
          continue;
        }
        ++checked;
        ASSERT_EQ(sums.dtype(), DType::kF64);
        const Tensor host = sums.ToHost().Clone();  // in managed memory they are one
        const std::span<const double> parts = host.span<double>();
        const double want = SumOfSquares(dw.ToHost());
        const double got = std::accumulate(parts.begin(), parts.end(), 0.0);
        const auto terms = static_cast<double>(dw.numel() + host.numel());
        EXPECT_LE(std::abs(got - want), want * (std::ldexp(8, -24) + std::ldexp(2 * terms, -53)));
        // The memory that the second call is likely to get.
        CopyTo(Tensor::FromSpan<double>(sums.shape(), std::vector<double>(parts.size(), NAN)),
               sums);
        sums = Tensor();
        const Tensor again =
            GroupedGemmWgradWithSquares(ctx, {dy.view, splits}, {x.view, splits}, dw);
        EXPECT_TRUE(Agrees(check::CompareBitwise("squares", again.ToHost(), host)));
      }
    }
  }
  if (checked == 0) GTEST_SKIP() << "no implementation here makes them";
}

// The case of a name, on every implementation, dtype, product and mode.
void CheckNamed(const char* name) {
  bool found = false;
  for (const GroupedGemmCase& test : GroupedGemmCases()) {
    if (std::string_view(test.name) != name) continue;
    found = true;
    for (const GroupedGemmKind kind : kKinds) {
      for (const WriteMode mode : kModes) {
        for (const GroupedGemmImpl& impl : Impls()) {
          CheckCase(impl, kind, test, {DType::kF32, DType::kF32}, mode);
          CheckCase(impl, kind, test, {DType::kBF16, DType::kF32}, mode);
        }
      }
    }
  }
  EXPECT_TRUE(found) << name;
}

// An expert without tokens has a zero weight gradient in Write, an unchanged one in Accumulate.
TEST(GroupedGemm, ZeroTokenExpert) {
  for (const char* name :
       {"first group empty", "middle group empty", "last group empty", "all groups empty"}) {
    CheckNamed(name);
  }
  for (const GroupedGemmImpl& impl : Impls()) {
    for (const Types types : {Types{DType::kF32, DType::kF32}, Types{DType::kBF16, DType::kBF16}}) {
      const Tensor splits = Splits({3, 0, 2});
      const Tensor dy = testing::Normal({5, 4}, types.in, "dy");
      const Tensor x = testing::Normal({5, 6}, types.in, "x");
      const Tensor dw = Tensor::Empty({3, 4, 6}, types.out);
      FillPoison(dw);
      const Context ctx = testing::ContextOf(impl);
      GroupedGemmWgrad(ctx, {dy, splits}, {x, splits}, Write(dw));
      EXPECT_TRUE(
          Agrees(check::CompareBitwise("dw", dw.Select(1), Tensor::Zeros({4, 6}, types.out))));
      const Tensor old = testing::Normal({3, 4, 6}, types.out, "old");
      Convert(old, dw);
      GroupedGemmWgrad(ctx, {dy, splits}, {x, splits}, Accumulate(dw));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dw", dw.Select(1), old.Select(1))));
    }
  }
}

// Where the width that is summed over is 0 the result is zeros in Write, unchanged in Accumulate.
TEST(GroupedGemm, ASumOverNothingIsZeros) {
  const Tensor splits = Splits({2, 0, 3});
  for (const GroupedGemmImpl& impl : testing::RunnableImplementations(GroupedGemmImpls())) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("{} {}", impl.name, Name(dtype)));
      if (!impl.supports({GroupedGemmKind::kForward, dtype, dtype, 3, 5, 8, 0})) {
        EXPECT_EQ(impl.name, "hopper");
        continue;
      }
      EXPECT_NE(impl.name, "hopper");
      const Context ctx = testing::ContextOf(impl);
      const Tensor wide = testing::Normal({5, 8}, dtype, "wide"),
                   got = Tensor::Empty({5, 8}, dtype);
      const Tensor none = Tensor::Zeros({5, 0}, dtype);
      const Tensor zeros = Tensor::Zeros({5, 8}, dtype);
      FillPoison(got);
      GroupedGemmForward(ctx, {none, splits}, Tensor::Zeros({3, 8, 0}, dtype), Write(got));
      EXPECT_TRUE(Agrees(check::CompareBitwise("y", got, zeros)));
      FillPoison(got);
      GroupedGemmDgrad(ctx, {none, splits}, Tensor::Zeros({3, 0, 8}, dtype), Write(got));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dx", got, zeros)));
      Convert(wide, got);
      GroupedGemmForward(ctx, {none, splits}, Tensor::Zeros({3, 8, 0}, dtype), Accumulate(got));
      EXPECT_TRUE(Agrees(check::CompareBitwise("y added to", got, wide)));
    }
  }
  // The same answer in every build.
  for (const GroupedGemmImpl& impl : GroupedGemmImpls()) {
    if (impl.name != "hopper") continue;
    const Support none =
        impl.supports({GroupedGemmKind::kForward, DType::kBF16, DType::kBF16, 3, 5, 8, 0});
    EXPECT_EQ(none.reason, "a width is 0");
  }
}

TEST(GroupedGemm, OddRows) {
  CheckNamed("odd rows");
}

TEST(GroupedGemm, OneToken) {
  CheckNamed("one token");
}

// NaN beyond the groups is neither read nor overwritten: every case with rows beyond runs so; here
// they are most of the buffer.
TEST(GroupedGemm, PaddedTail) {
  const GroupedGemmCase test{"padded tail", {3, 1}, 16, 8, 60};
  for (const GroupedGemmKind kind : kKinds) {
    for (const WriteMode mode : kModes) {
      for (const GroupedGemmImpl& impl : Impls()) {
        CheckCase(impl, kind, test, {DType::kF32, DType::kF32}, mode);
        CheckCase(impl, kind, test, {DType::kBF16, DType::kBF16}, mode);
      }
    }
  }
}

// A group's rows depend on its own rows alone: NaN in all other groups does not cross the boundary.
TEST(GroupedGemm, TileCrossesGroup) {
  const std::vector<std::int64_t> sizes = {17, 5, 133, 1, 15};
  const Tensor splits = Splits(sizes);
  const std::int64_t rows = Sum(sizes), n = 48, k = 40;
  for (const GroupedGemmImpl& impl : testing::RunnableImplementations(GroupedGemmImpls())) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      if (!impl.supports({GroupedGemmKind::kForward, dtype, dtype, 5, rows, n, k})) continue;
      SCOPED_TRACE(fmt::format("{} {}", impl.name, Name(dtype)));
      const Context ctx = testing::ContextOf(impl);
      const Tensor w = testing::Normal({5, n, k}, dtype, "w");
      std::int64_t first = 0;
      for (std::size_t e = 0; e < sizes.size(); first += sizes[e++]) {
        const Tensor x = Tensor::Empty({rows, k}, dtype), dy = Tensor::Empty({rows, n}, dtype);
        FillPoison(x);
        FillPoison(dy);
        testing::FillNormal(x.Slice(0, first, sizes[e]), "x");
        testing::FillNormal(dy.Slice(0, first, sizes[e]), "dy");
        const Tensor y = Tensor::Zeros({rows, n}, dtype), dx = Tensor::Zeros({rows, k}, dtype);
        const Tensor dw = Tensor::Zeros({5, n, k}, DType::kF32);
        GroupedGemmForward(ctx, {x, splits}, w, Write(y));
        GroupedGemmDgrad(ctx, {dy, splits}, w, Write(dx));
        GroupedGemmWgrad(ctx, {dy, splits}, {x, splits}, Write(dw));
        EXPECT_TRUE(testing::IsFinite(y.Slice(0, first, sizes[e])));
        EXPECT_TRUE(testing::IsFinite(dx.Slice(0, first, sizes[e])));
        EXPECT_TRUE(testing::IsFinite(dw.Select(static_cast<std::int64_t>(e))));
      }
    }
  }
}

TEST(GroupedGemm, ManyExperts) {
  for (const std::int64_t groups : {1, 2, 64, 65, 129, 512}) {
    GroupedGemmCase test{"many experts", {}, 24, 16, 5};
    const Tensor splits = testing::RandomSplit(groups, groups * 3, "splits");
    for (const std::int64_t size : splits.span<std::int64_t>()) test.split_sizes.push_back(size);
    for (const GroupedGemmKind kind : kKinds) {
      for (const GroupedGemmImpl& impl : Impls()) {
        if (impl.name == "ref") continue;
        CheckCase(impl, kind, test, {DType::kF32, DType::kF32}, WriteMode::kWrite);
        CheckCase(impl, kind, test, {DType::kF32, DType::kF32}, WriteMode::kAccumulate);
      }
    }
  }
}

// atomics: the same call gives the same bits every time, on threads that take tasks in any order.
TEST(GroupedGemm, Atomics) {
  const GroupedGemmCase test{"atomics", {211, 0, 77, 34, 150, 8}, 160, 96};
  const Tensor splits = Splits(test.split_sizes);
  for (const GroupedGemmImpl& impl : Impls()) {
    const Context ctx = testing::ContextOf(impl);
    for (const GroupedGemmKind kind : kKinds) {
      const Operands operands = MakeOperands(kind, test, DType::kF32);
      const Tensor first = Tensor::Empty(operands.c, DType::kF32);
      RunKind(ctx, kind, splits, operands.a, operands.b, Write(first));
      for (int repeat = 0; repeat < 10; ++repeat) {
        const Tensor again = Tensor::Empty(operands.c, DType::kF32);
        RunKind(ctx, kind, splits, operands.a, operands.b, Write(again));
        ASSERT_TRUE(Agrees(check::CompareBitwise("grouped_gemm", again, first)));
      }
    }
  }
}

// dgrad and wgrad are the gradients of forward.
TEST(GroupedGemm, GradientByCentralDifferences) {
  const Context ctx = Context().WithImpl("ref");
  const Tensor splits = Splits({2, 0, 3});
  const Tensor x = testing::Normal({6, 4}, DType::kF64, "x");
  const Tensor w = testing::Normal({3, 5, 4}, DType::kF64, "w");
  const Tensor dy = testing::Normal({6, 5}, DType::kF64, "dy");
  const auto loss = [&] {
    const Tensor y = Tensor::Zeros({6, 5}, DType::kF64);
    GroupedGemmForward(ctx, {x, splits}, w, Write(y));
    double sum = 0;
    for (std::int64_t i = 0; i < y.numel(); ++i) sum += y.data<double>()[i] * dy.data<double>()[i];
    return sum;
  };
  const Tensor dx = Tensor::Zeros({6, 4}, DType::kF64);  // the sixth row belongs to no group
  const Tensor dw = Tensor::Empty({3, 5, 4}, DType::kF64);
  GroupedGemmDgrad(ctx, {dy, splits}, w, Write(dx));
  GroupedGemmWgrad(ctx, {dy, splits}, {x, splits}, Write(dw));
  EXPECT_TRUE(Agrees(testing::CheckGradient("grouped_gemm.dx", loss, x, dx)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("grouped_gemm.dw", loss, w, dw)));
}

// Tasks cover every result once and are balanced, from two threads to many.
TEST(GroupedTasks, CoverAndBalance) {
  using internal::GroupProduct;
  const std::vector<std::vector<GroupProduct>> problems = {
      {{8192, 768, 192}},  // all rows on one expert
      {{768, 192, 8192}},  // its weight gradient
      {{4000, 768, 192}, {100, 768, 192}, {0, 768, 192}, {4092, 768, 192}},
      std::vector<GroupProduct>(32, {256, 256, 256}),
      {{1, 8, 8}, {7, 8, 8}},
      {{768, 192, 0}, {768, 192, 10}},
      {},
  };
  for (const auto& products : problems) {
    for (const int threads : {1, 2, 3, 16, 64}) {
      const auto tasks = internal::PlanGroupTasks(products, threads);
      std::vector<std::vector<int>> covered;
      covered.reserve(products.size());
      for (const GroupProduct& p : products) {
        covered.emplace_back(static_cast<std::size_t>(p.m * p.n), 0);
      }
      double total = 0;
      std::vector<double> busy(static_cast<std::size_t>(threads), 0);
      for (const auto& t : tasks) {
        const GroupProduct& p = products[static_cast<std::size_t>(t.group)];
        for (std::int64_t i = t.row_begin; i < t.row_end; ++i) {
          for (std::int64_t j = t.col_begin; j < t.col_end; ++j) {
            ++covered[static_cast<std::size_t>(t.group)][static_cast<std::size_t>(i * p.n + j)];
          }
        }
        const double cost =
            static_cast<double>((t.row_end - t.row_begin) * (t.col_end - t.col_begin) * p.k);
        total += cost;
        *std::min_element(busy.begin(), busy.end()) += cost;  // the thread that is free first
      }
      for (const auto& group : covered) {
        for (const int times : group) ASSERT_EQ(times, 1);
      }
      // Large problems keep all threads busy to a tenth. (The weight gradient of one expert has few
      // results.)
      if (total > 1e9 && products[0].k < 1000) {
        const double longest = *std::max_element(busy.begin(), busy.end());
        EXPECT_LE(longest, 1.1 * total / threads) << threads << " threads";
      }
    }
  }
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

TEST(GroupedGemm, ErrorsNameTheValues) {
  using ::testing::HasSubstr;
  const Context ctx;
  const Tensor x = Tensor::Zeros({5, 4}, DType::kF32);
  const Tensor w = Tensor::Zeros({2, 3, 4}, DType::kF32);
  const Tensor y = Tensor::Zeros({5, 3}, DType::kF32);
  const auto forward = [&](const std::vector<std::int64_t>& sizes, const Tensor& weight) {
    return MessageOf([&] { GroupedGemmForward(ctx, {x, Splits(sizes)}, weight, Write(y)); });
  };
  EXPECT_THAT(forward({4, -1}, w), HasSubstr("split_sizes[1] = -1 is negative"));
  EXPECT_THAT(forward({4, 2}, w), HasSubstr("more than the 5 rows"));
  EXPECT_THAT(forward({std::numeric_limits<std::int64_t>::max(), 2}, w), HasSubstr("5 rows"));
  EXPECT_THAT(forward({1, 2, 2}, w), HasSubstr("3 groups"));
  EXPECT_THAT(forward({4, 1}, Tensor::Zeros({2, 4, 3}, DType::kF32)), HasSubstr("f32 [2, 4, 3]"));
  EXPECT_THAT(MessageOf([&] {
                GroupedGemmWgrad(ctx, {y, Splits({4, 1})}, {x, Splits({3, 2})}, Write(w));
              }),
              HasSubstr("different split_sizes"));
}

}  // namespace
}  // namespace cistron::ops
