// Choice of an implementation: the first that runs a problem, the user's, and what strict refuses.
#include "cistron/ops/implementation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "cistron/ops/rope/rope.h"

namespace cistron::ops {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Problem {
  int size;
};
// A list whose best runs even sizes, whose second runs sizes up to 9, and whose last runs all.
std::string RunToy(const Context& ctx, int size) {
  using Entry = Implementation<Problem, std::string>;
  static const std::array<Entry, 3> list = {
      Entry{"best",
            [](const Problem& p) {
              return p.size % 2 == 0 ? Support::Yes() : Support::No("size is odd");
            },
            "best ran"},
      Entry{"good",
            [](const Problem& p) {
              return p.size < 10 ? Support::Yes() : Support::No("size is above 9");
            },
            "good ran"},
      Entry{"ref", [](const Problem&) { return Support::Yes(); }, "ref ran"}};
  return Select<Problem, std::string>(ctx, "toy", list, Problem{size});
}

std::string ErrorOf(const Context& ctx, int size) {
  try {
    return "no error: " + RunToy(ctx, size);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    return e.message();
  }
}

const Context kPlain = Context().WithImpl("");

TEST(Select, TakesTheFirstThatRunsTheProblem) {
  EXPECT_EQ(RunToy(kPlain, 4), "best ran");
  EXPECT_EQ(RunToy(kPlain, 5), "good ran");
  EXPECT_EQ(RunToy(kPlain, 11), "ref ran");
}

TEST(Select, AChoiceThatRefusesIsAnError) {
  EXPECT_EQ(RunToy(kPlain.WithImpl("toy=good"), 4), "good ran");
  EXPECT_THAT(ErrorOf(kPlain.WithImpl("toy=good"), 11),
              AllOf(HasSubstr("toy"), HasSubstr("good: size is above 9"), Not(HasSubstr("odd"))));
  EXPECT_THAT(ErrorOf(kPlain.WithImpl("quick"), 4), HasSubstr("named 'quick'"));
}

TEST(Select, StrictRefusesWhatIsNotTheBest) {
  const Context strict = kPlain.WithStrict();
  EXPECT_EQ(RunToy(strict, 4), "best ran");
  EXPECT_THAT(ErrorOf(strict, 5),
              AllOf(HasSubstr("toy: strict: 'good' would run"), HasSubstr("best: size is odd"),
                    HasSubstr("CISTRON_IMPL=toy=good"), HasSubstr("strict=false")));
  // Every refusal before it is named.
  EXPECT_THAT(ErrorOf(strict, 11), AllOf(HasSubstr("'ref' would run"), HasSubstr("size is odd"),
                                         HasSubstr("good: size is above 9")));
  EXPECT_EQ(RunToy(strict.WithStrict(false), 5), "good ran");
}

TEST(Select, StrictAcceptsWhatTheUserAskedFor) {
  const Context strict = kPlain.WithStrict();
  EXPECT_EQ(RunToy(strict.WithImpl("toy=ref"), 4), "ref ran");
  EXPECT_EQ(RunToy(strict.WithImpl("ref"), 5), "ref ran");
  // A choice for another op is none for this one.
  EXPECT_THAT(ErrorOf(strict.WithImpl("attention=ref"), 5), HasSubstr("strict"));
}

TEST(Select, StrictHoldsForTheOps) {
  const Context strict = kPlain.WithStrict();
  const Tensor table = RopeTable(4, 2, 1e4, DType::kF64);
  const Tensor positions = Tensor::Zeros({3}, DType::kI64);
  const Tensor x = Tensor::Zeros({3, 2}, DType::kF64);  // f64 runs in the reference only
  RopeForward(kPlain, table, positions, 2, x);
  RopeForward(strict.WithImpl("rope=ref"), table, positions, 2, x);
  try {
    RopeForward(strict, table, positions, 2, x);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_THAT(e.message(), AllOf(HasSubstr("rope: strict: 'ref'"), HasSubstr("f64")));
  }
  // The context keeps it through its other copies.
  EXPECT_TRUE(strict.WithImpl("ref").WithAllocator(CpuAllocator()).strict());
}

}  // namespace
}  // namespace cistron::ops
