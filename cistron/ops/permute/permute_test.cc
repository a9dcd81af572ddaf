#include "cistron/ops/permute/permute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistron/check/bounds.h"
#include "cistron/ops/permute/permute_cases.h"
#include "cistron/testing/golden_file.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::Strided;

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16};
constexpr WriteMode kModes[] = {WriteMode::kWrite, WriteMode::kAccumulate};

// K distinct experts a token, −1 for masked tokens.
Tensor MakeExperts(const PermuteCase& test) {
  const Tensor experts = Tensor::Empty({test.tokens, test.top_k}, DType::kI32);
  const std::int64_t used = test.experts_used == 0 ? test.experts : test.experts_used;
  const Tensor draws = Tensor::Empty({test.tokens, used}, DType::kF32);
  testing::FillUniform(draws, "experts");
  for (std::int64_t t = 0; t < test.tokens; ++t) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(used));
    std::iota(order.begin(), order.end(), 0);
    const float* draw = draws.data<float>() + t * used;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return draw[a] < draw[b]; });
    const bool masked = test.masked_every != 0 && t % test.masked_every == 0;
    for (std::int64_t k = 0; k < test.top_k; ++k) {
      experts.data<std::int32_t>()[t * test.top_k + k] =
          masked ? -1 : order[static_cast<std::size_t>(k)];
    }
  }
  return experts;
}

std::int64_t Routed(const RowMap& map) {
  const auto counts = map.split_sizes.span<std::int64_t>();
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// Calls f(context) with each implementation that runs here.
template <class F>
void ForEachPermute(DType dtype, F&& f) {
  testing::ForEachImplementation(PermuteImpls(), PermuteProblem{dtype, 1, 1, 1}, f);
}

void CheckRowMap(const PermuteCase& test) {
  const Tensor experts = MakeExperts(test);
  const auto expert = experts.span<std::int32_t>();
  ForEachPermute(DType::kF32, [&](const Context& ctx) {
    const RowMap map = BuildRowMap(ctx, experts, test.experts);
    std::vector<std::int32_t> slots;
    for (std::size_t s = 0; s < expert.size(); ++s) {
      if (expert[s] >= 0) slots.push_back(static_cast<std::int32_t>(s));
    }
    const auto of = [&](std::int32_t slot) { return expert[static_cast<std::size_t>(slot)]; };
    std::stable_sort(slots.begin(), slots.end(),
                     [&](std::int32_t a, std::int32_t b) { return of(a) < of(b); });
    const auto slot_of_row = map.slot_of_row.span<std::int32_t>();
    const auto row_of_slot = map.row_of_slot.span<std::int32_t>();
    ASSERT_EQ(slot_of_row.size(), expert.size());
    ASSERT_EQ(Routed(map), static_cast<std::int64_t>(slots.size()));
    for (std::size_t r = 0; r < expert.size(); ++r) {
      EXPECT_EQ(slot_of_row[r], r < slots.size() ? slots[r] : -1);
    }
    for (std::size_t s = 0; s < expert.size(); ++s) {
      if (expert[s] < 0) {
        EXPECT_EQ(row_of_slot[s], -1);
      } else {
        EXPECT_EQ(slot_of_row[static_cast<std::size_t>(row_of_slot[s])],
                  static_cast<std::int32_t>(s));
      }
    }
    for (std::int64_t e = 0; e < test.experts; ++e) {
      EXPECT_EQ(map.split_sizes.data<std::int64_t>()[e],
                std::count(expert.begin(), expert.end(), static_cast<std::int32_t>(e)));
    }
    EXPECT_EQ(map.top_k, test.top_k);
  });
}

TEST(RowMap, IsTheStableSortOfTheAssignments) {
  for (const PermuteCase& test : kPermuteCases) {
    SCOPED_TRACE(test.name);
    CheckRowMap(test);
  }
}

// More slots than a kernel's block sorts at once.
TEST(RowMap, ManySlots) {
  for (const PermuteCase& test :
       {PermuteCase{"exact", 512, 4, 16, 1, 5}, PermuteCase{"rest", 3001, 3, 40, 1, 7, 11}}) {
    SCOPED_TRACE(test.name);
    CheckRowMap(test);
  }
}

TEST(RowMap, RefusesExpertsOutOfRange) {
  for (const std::int32_t bad : {-2, 4, std::numeric_limits<std::int32_t>::max()}) {
    const std::int32_t values[] = {0, 1, 3, bad};
    try {
      BuildRowMap(Context(), Tensor::FromSpan<std::int32_t>({2, 2}, values), 4);
      ADD_FAILURE() << "no error for expert " << bad;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(e.message(),
                  ::testing::HasSubstr(fmt::format("token 1 slot 1 names expert {}", bad)));
    }
  }
}

struct Problem {
  RowMap map;
  std::int64_t routed;
  Tensor x, dy, rows, probs;  // rows [routed, H]
};

Problem MakeProblem(const PermuteCase& test, DType dtype) {
  Problem p;
  p.map = BuildRowMap(Context(), MakeExperts(test), test.experts);
  p.routed = Routed(p.map);
  p.x = testing::Normal({test.tokens, test.width}, dtype, "x");
  p.dy = testing::Normal({test.tokens, test.width}, dtype, "dy");
  p.rows = testing::Normal({p.routed, test.width}, dtype, "rows");
  p.probs = testing::Uniform({test.tokens, test.top_k}, ComputeType(dtype), "probs");
  return p;
}

Tensor Start(const Shape& shape, DType dtype, WriteMode mode, const char* name) {
  return mode == WriteMode::kAccumulate ? testing::Normal(shape, dtype, name)
                                        : Tensor::Zeros(shape, dtype);
}

// Where the op writes: `rows_beyond` poisoned rows after those in use.
Strided Target(const Tensor& start, WriteMode mode, std::int64_t rows_beyond) {
  Strided target({start.dim(0) + rows_beyond, start.dim(1)}, start.dtype());
  if (mode == WriteMode::kAccumulate) target.Assign(start);
  return target;
}

Strided Source(const Tensor& values, std::int64_t rows_beyond) {
  Strided source({values.dim(0) + rows_beyond, values.dim(1)}, values.dtype());
  source.Assign(values);
  return source;
}

Tensor As64(const Tensor& t) {
  return t ? ConvertTo(t, DType::kF64) : t;
}
Tensor Absolute(const Tensor& t) {
  Tensor absolute = As64(t);
  if (absolute) {
    for (double& v : absolute.span<double>()) v = std::abs(v);
  }
  return absolute;
}

constexpr std::int64_t kRowsBeyond = 3;

void CheckPermute(const Context& ctx, const PermuteCase& test, const Problem& p, DType dtype,
                  WriteMode mode) {
  const Tensor start = Start({p.routed, test.width}, dtype, mode, "start");
  const Strided x = Source(p.x, 0), rows = Target(start, mode, kRowsBeyond);
  Permute(ctx, p.map, x.view, {rows.view, mode});
  EXPECT_TRUE(rows.UntouchedBeyond(p.routed));
  const Tensor expected = As64(start);
  for (std::int64_t r = 0; r < p.routed; ++r) {
    const std::int64_t token = p.map.slot_of_row.data<std::int32_t>()[r] / test.top_k;
    for (std::int64_t j = 0; j < test.width; ++j) {
      expected.data<double>()[r * test.width + j] += ElementAsDouble(p.x, token * test.width + j);
    }
  }
  // Written rows are copies, accumulated ones a sum that is rounded once.
  const double relative = mode == WriteMode::kWrite ? 0 : 2 * check::UnitRoundoff(dtype);
  EXPECT_TRUE(Agrees(
      check::Compare("permute", rows.Values().Slice(0, 0, p.routed), expected, [&](std::int64_t i) {
        return relative * std::abs(ElementAsDouble(expected, i)) +
               (mode == WriteMode::kWrite ? 0 : 0x1p-130);
      })));
}

void CheckUnpermute(const Context& ctx, const PermuteCase& test, const Problem& p, DType dtype,
                    WriteMode mode, bool has_probs) {
  const Tensor probs = has_probs ? p.probs : Tensor();
  const Tensor start = Start({test.tokens, test.width}, dtype, mode, "start");
  const Strided rows = Source(p.rows, kRowsBeyond), y = Target(start, mode, 0);
  Unpermute(ctx, p.map, rows.view, probs, {y.view, mode});
  EXPECT_TRUE(y.SurroundingsUntouched());
  const auto exact = [&](const Tensor& rows64, const Tensor& probs64, const Tensor& start64) {
    for (std::int64_t s = 0; s < test.tokens * test.top_k; ++s) {
      const std::int64_t r = p.map.row_of_slot.data<std::int32_t>()[s];
      if (r < 0) continue;
      const double prob = has_probs ? probs64.data<double>()[s] : 1;
      for (std::int64_t j = 0; j < test.width; ++j) {
        start64.data<double>()[s / test.top_k * test.width + j] +=
            prob * rows64.data<double>()[r * test.width + j];
      }
    }
    return start64;
  };
  const Tensor expected = exact(As64(p.rows), As64(probs), As64(start));
  const Tensor size = exact(Absolute(p.rows), Absolute(probs), Absolute(start));
  const DType compute = ComputeType(dtype);
  EXPECT_TRUE(Agrees(check::Compare("unpermute", y.Values(), expected, [&](std::int64_t i) {
    const double sum = ElementAsDouble(size, i);
    return check::DotBound(test.top_k + 1, sum, compute, dtype) +
           check::DotBound(test.top_k + 1, sum, DType::kF64, DType::kF64);
  })));
}

void CheckUnpermuteBackward(const Context& ctx, const PermuteCase& test, const Problem& p,
                            DType dtype, WriteMode mode, bool has_probs) {
  const DType compute = ComputeType(dtype);
  const Tensor probs = has_probs ? p.probs : Tensor();
  const Tensor drows0 = Start({p.routed, test.width}, dtype, mode, "drows0");
  const Tensor dprobs0 = Start({test.tokens, test.top_k}, compute, mode, "dprobs0");
  const Strided dy = Source(p.dy, 0), rows = Source(p.rows, kRowsBeyond),
                drows = Target(drows0, mode, kRowsBeyond);
  const testing::PaddedTensor dprobs = testing::MakePadded({test.tokens, test.top_k}, compute, 1);
  if (mode == WriteMode::kAccumulate) Convert(dprobs0, dprobs.used);
  UnpermuteBackward(ctx, p.map, dy.view, rows.view, probs, {drows.view, mode}, {dprobs.used, mode});
  EXPECT_TRUE(drows.UntouchedBeyond(p.routed));
  EXPECT_TRUE(testing::IsPoisoned(dprobs.tail));

  const auto exact = [&](const Tensor& dy64, const Tensor& rows64, const Tensor& probs64,
                         const Tensor& drows64, const Tensor& dprobs64) {
    for (std::int64_t s = 0; s < test.tokens * test.top_k; ++s) {
      const std::int64_t r = p.map.row_of_slot.data<std::int32_t>()[s];
      if (r < 0) continue;
      const double prob = has_probs ? probs64.data<double>()[s] : 1;
      for (std::int64_t j = 0; j < test.width; ++j) {
        const double d = dy64.data<double>()[s / test.top_k * test.width + j];
        drows64.data<double>()[r * test.width + j] += prob * d;
        dprobs64.data<double>()[s] += d * rows64.data<double>()[r * test.width + j];
      }
    }
  };
  const Tensor drows_exact = As64(drows0), dprobs_exact = As64(dprobs0);
  const Tensor drows_size = Absolute(drows0), dprobs_size = Absolute(dprobs0);
  exact(As64(p.dy), As64(p.rows), As64(probs), drows_exact, dprobs_exact);
  exact(Absolute(p.dy), Absolute(p.rows), Absolute(probs), drows_size, dprobs_size);
  const auto bound = [&](const Tensor& size, std::int64_t terms, DType out) {
    return [=](std::int64_t i) {
      const double sum = ElementAsDouble(size, i);
      return check::DotBound(terms, sum, compute, out) +
             check::DotBound(terms, sum, DType::kF64, DType::kF64);
    };
  };
  EXPECT_TRUE(Agrees(check::Compare("drows", drows.Values().Slice(0, 0, p.routed), drows_exact,
                                    bound(drows_size, 2, dtype))));
  EXPECT_TRUE(Agrees(check::Compare("dprobs", dprobs.used, dprobs_exact,
                                    bound(dprobs_size, test.width + 1, compute))));
}

TEST(Permute, CasesAgreeWithExactSums) {
  for (const PermuteCase& test : kPermuteCases) {
    for (const DType dtype : kDTypes) {
      const Problem p = MakeProblem(test, dtype);
      for (const WriteMode mode : kModes) {
        SCOPED_TRACE(fmt::format("{} {} {} seed {}", test.name, Name(dtype),
                                 mode == WriteMode::kWrite ? "write" : "accumulate",
                                 testing::TestSeed()));
        testing::ForEachImplementation(
            PermuteImpls(), PermuteProblem{dtype, test.tokens, test.top_k, test.width},
            [&](const Context& ctx) {
              CheckPermute(ctx, test, p, dtype, mode);
              for (const bool has_probs : {false, true}) {
                CheckUnpermute(ctx, test, p, dtype, mode, has_probs);
                CheckUnpermuteBackward(ctx, test, p, dtype, mode, has_probs);
              }
            });
      }
    }
  }
}

TEST(Permute, SlotsAndBack) {
  for (const PermuteCase& test : kPermuteCases) {
    SCOPED_TRACE(test.name);
    for (const DType dtype : kDTypes) {
      const Problem p = MakeProblem(test, dtype);
      const Tensor slots = testing::Normal({test.tokens, test.top_k}, dtype, "slots");
      const testing::PaddedTensor rows = testing::MakePadded({p.routed}, dtype, 2);
      ForEachPermute(dtype, [&](const Context& ctx) {
        FillPoison(rows.whole);
        PermuteSlots(ctx, p.map, slots, Write(rows.whole));
        EXPECT_TRUE(testing::IsPoisoned(rows.tail));
        const Tensor back = Tensor::Empty({test.tokens, test.top_k}, dtype);
        FillPoison(back);
        UnpermuteSlots(ctx, p.map, rows.whole, Write(back));
        UnpermuteSlots(ctx, p.map, rows.whole, Accumulate(back));
        for (std::int64_t s = 0; s < slots.numel(); ++s) {
          const bool routed = p.map.row_of_slot.data<std::int32_t>()[s] >= 0;
          EXPECT_EQ(ElementAsDouble(back, s), routed ? 2 * ElementAsDouble(slots, s) : 0);
        }
      });
    }
  }
}

// Unpermute's backward and Permute's are the gradients of their forwards.
TEST(Permute, GradientByCentralDifferences) {
  const Context ctx = Context().WithImpl("ref");
  const PermuteCase test{"gradient", 5, 2, 4, 3, 4};
  const Problem p = MakeProblem(test, DType::kF64);
  const auto dot = [](const Tensor& a, const Tensor& b) {
    double sum = 0;
    for (std::int64_t i = 0; i < a.numel(); ++i) sum += a.data<double>()[i] * b.data<double>()[i];
    return sum;
  };
  const auto unpermute = [&] {
    const Tensor y = Tensor::Empty(p.dy.shape(), DType::kF64);
    Unpermute(ctx, p.map, p.rows, p.probs, Write(y));
    return dot(y, p.dy);
  };
  const Tensor drows = Tensor::Empty(p.rows.shape(), DType::kF64);
  const Tensor dprobs = Tensor::Empty(p.probs.shape(), DType::kF64);
  UnpermuteBackward(ctx, p.map, p.dy, p.rows, p.probs, Write(drows), Write(dprobs));
  EXPECT_TRUE(Agrees(testing::CheckGradient("unpermute.drows", unpermute, p.rows, drows)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("unpermute.dprobs", unpermute, p.probs, dprobs)));

  const auto permute = [&] {
    const Tensor rows = Tensor::Empty(p.rows.shape(), DType::kF64);
    Permute(ctx, p.map, p.x, Write(rows));
    return dot(rows, p.rows);
  };
  const Tensor dx = Tensor::Empty(p.x.shape(), DType::kF64);
  Unpermute(ctx, p.map, p.rows, {}, Write(dx));
  EXPECT_TRUE(Agrees(testing::CheckGradient("permute.dx", permute, p.x, dx)));
}

TEST(Permute, GoldenRouting) {
  const testing::GoldenFile golden(std::string(CISTRON_SOURCE_DIR) +
                                   "/tests/golden/numerics.safetensors");
  int found = 0;
  for (const std::string& name : golden.Names("router.")) {
    if (!name.ends_with(".permute.source_token")) continue;
    const std::string prefix =
        name.substr(0, name.size() - std::string_view("permute.source_token").size());
    SCOPED_TRACE(prefix);
    ++found;
    const Tensor topk = golden.Get(prefix + "softmax.topk_experts");
    const Tensor experts = Tensor::Empty(topk.shape(), DType::kI32);
    for (std::int64_t i = 0; i < topk.numel(); ++i) {
      experts.data<std::int32_t>()[i] = static_cast<std::int32_t>(ElementAsDouble(topk, i));
    }
    const Tensor counts = golden.Get(prefix + "tokens_per_expert");
    const Tensor tokens = golden.Get(name), slots = golden.Get(prefix + "permute.source_slot");
    const RowMap map = BuildRowMap(Context(), experts, counts.numel());
    for (std::int64_t e = 0; e < counts.numel(); ++e) {
      EXPECT_EQ(static_cast<double>(map.split_sizes.data<std::int64_t>()[e]),
                ElementAsDouble(counts, e));
    }
    ASSERT_EQ(tokens.numel(), experts.numel());
    for (std::int64_t r = 0; r < tokens.numel(); ++r) {
      const std::int32_t slot = map.slot_of_row.data<std::int32_t>()[r];
      EXPECT_EQ(slot / map.top_k, ElementAsDouble(tokens, r));
      EXPECT_EQ(slot % map.top_k, ElementAsDouble(slots, r));
    }
  }
  EXPECT_GT(found, 0);
}

// atomics: sums of a token's rows in slot order, the same bits on any number of threads.
TEST(Permute, Atomics) {
  const PermuteCase test{"atomics", 300, 4, 16, 70};
  const Problem p = MakeProblem(test, DType::kF32);
  const auto run = [&](const Context& ctx, int threads) {
    const testing::ThreadsForScope scope(threads);
    const Tensor y = Tensor::Empty(p.dy.shape(), DType::kF32);
    const Tensor drows = Tensor::Empty(p.rows.shape(), DType::kF32);
    const Tensor dprobs = Tensor::Empty(p.probs.shape(), DType::kF32);
    Unpermute(ctx, p.map, p.rows, p.probs, Write(y));
    UnpermuteBackward(ctx, p.map, p.dy, p.rows, p.probs, Write(drows), Write(dprobs));
    return std::vector<Tensor>{y, drows, dprobs};
  };
  ForEachPermute(DType::kF32, [&](const Context& ctx) {
    const auto first = run(ctx, 1);
    for (const int threads : {1, 2, 3, 4}) {
      const auto again = run(ctx, threads);
      for (std::size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(Agrees(check::CompareBitwise("permute", again[i], first[i])));
      }
    }
  });
}

TEST(Permute, ErrorsNameShapes) {
  const Context ctx;
  const PermuteCase test{"errors", 4, 2, 4, 6};
  const Problem p = MakeProblem(test, DType::kF32);
  const auto message = [&](const Tensor& x, const Tensor& rows) {
    try {
      Permute(ctx, p.map, x, Write(rows));
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("no error");
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(message(p.x, Tensor::Zeros({7, 6}, DType::kF32)), HasSubstr("8 routed rows"));
  EXPECT_THAT(message(p.x, Tensor::Zeros({8, 5}, DType::kF32)), HasSubstr("f32 [8, 5]"));
  EXPECT_THAT(message(Tensor::Zeros({5, 6}, DType::kF32), p.rows), HasSubstr("map of 4 tokens"));
}

}  // namespace
}  // namespace cistron::ops
