#include "cistron/ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include <vector>

#include "cistron/check/compare.h"
#include "cistron/ops/embedding/embedding_cases.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::ForEachImplementation;

using Case = EmbeddingCase;

void ForEachCase(const std::function<void(const Context&, const Case&, DType, const Tensor&)>& f) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const Case& c : kEmbeddingCases) {
      SCOPED_TRACE(fmt::format("{} T {} V {} H {}", Name(dtype), c.tokens, c.vocab, c.width));
      const Tensor tokens = Tensor::Empty({c.tokens}, DType::kI64);
      testing::FillIntegers(tokens, "tokens", 0, c.vocab);
      ForEachImplementation(EmbeddingImpls(), EmbeddingProblem{dtype, c.tokens, c.vocab, c.width},
                            [&](const Context& ctx) { f(ctx, c, dtype, tokens); });
    }
  }
}

TEST(Embedding, ForwardCopiesRows) {
  ForEachCase([](const Context& ctx, const Case& c, DType dtype, const Tensor& tokens) {
    const Tensor w = testing::Normal({c.vocab, c.width}, dtype, "w");
    const testing::PaddedTensor y = testing::MakePadded({c.tokens, c.width}, dtype, 3);
    EmbeddingForward(ctx, tokens, w, Write(y.used));
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      EXPECT_TRUE(Agrees(
          check::CompareBitwise("y", y.used.Select(t), w.Select(tokens.data<std::int64_t>()[t]))));
    }
    EXPECT_TRUE(testing::IsPoisoned(y.tail));
  });
}

TEST(Embedding, ForwardAccumulates) {
  ForEachCase([](const Context& ctx, const Case& c, DType dtype, const Tensor& tokens) {
    const Tensor w = testing::Normal({c.vocab, c.width}, dtype, "w");
    const Tensor y = Tensor::Zeros({c.tokens, c.width}, dtype), once = y.Clone();
    EmbeddingForward(ctx, tokens, w, Write(once));
    EmbeddingForward(ctx, tokens, w, Accumulate(y));
    EmbeddingForward(ctx, tokens, w, Accumulate(y));
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      EXPECT_EQ(ElementAsDouble(y, i), 2 * ElementAsDouble(once, i));  // doubling is exact
    }
  });
}

TEST(Embedding, BackwardSumsRowsOfEachToken) {
  ForEachCase([](const Context& ctx, const Case& c, DType dtype, const Tensor& tokens) {
    const Tensor integers = Tensor::Empty({c.tokens, c.width}, DType::kI64);
    testing::FillIntegers(integers, "dy", -8, 9);
    const Tensor dy = Tensor::Empty(integers.shape(), dtype);
    DispatchFloat("test", dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t i = 0; i < dy.numel(); ++i) {
        dy.data<T>()[i] = T(static_cast<float>(integers.data<std::int64_t>()[i]));
      }
    });
    const DType compute = ComputeType(dtype);
    const testing::PaddedTensor written = testing::MakePadded({c.vocab, c.width}, compute, 2);
    const Tensor accumulated = Tensor::Empty({c.vocab, c.width}, compute);
    Convert(Tensor::Zeros(accumulated.shape(), DType::kF32), accumulated);
    EmbeddingBackward(ctx, tokens, dy, Write(written.used));
    EmbeddingBackward(ctx, tokens, dy, Accumulate(accumulated));
    EmbeddingBackward(ctx, tokens, dy, Accumulate(accumulated));
    // Sums of integers are exact, so one closed form holds for every order.
    for (std::int64_t v = 0; v < c.vocab; ++v) {
      for (std::int64_t h = 0; h < c.width; ++h) {
        std::int64_t sum = 0;
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          if (tokens.data<std::int64_t>()[t] == v) {
            sum += integers.data<std::int64_t>()[t * c.width + h];
          }
        }
        const std::int64_t i = v * c.width + h;
        ASSERT_EQ(ElementAsDouble(written.used, i), static_cast<double>(sum));
        ASSERT_EQ(ElementAsDouble(accumulated, i), static_cast<double>(2 * sum));
      }
    }
    EXPECT_TRUE(testing::IsPoisoned(written.tail));
  });
}

// atomics: the order of the sum is that of the tokens, whatever the threads do.
TEST(EmbeddingBackward, Atomics) {
  ForEachCase([](const Context& ctx, const Case& c, DType dtype, const Tensor& tokens) {
    const Tensor dy = testing::Normal({c.tokens, c.width}, dtype, "dy");
    const Tensor expected = Tensor::Empty({c.vocab, c.width}, ComputeType(dtype));
    const Tensor dw = Tensor::Empty(expected.shape(), expected.dtype());
    EmbeddingBackward(Context().WithImpl("ref"), tokens, dy, Write(expected));
    for (const int threads : {1, 2, 3, 5}) {
      const testing::ThreadsForScope scope(threads);
      FillPoison(dw);
      EmbeddingBackward(ctx, tokens, dy, Write(dw));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dw", dw, expected)));
    }
  });
}

TEST(Embedding, NamesTheTokenOutsideTheVocabulary) {
  const Context ctx;
  const Tensor w = testing::Normal({4, 8}, DType::kF32, "w");
  const Tensor y = Tensor::Empty({3, 8}, DType::kF32);
  FillPoison(y);
  for (const std::int64_t bad : {std::int64_t{4}, std::int64_t{-1}}) {
    const Tensor tokens = Tensor::FromSpan<std::int64_t>({3}, std::vector<std::int64_t>{0, 1, bad});
    try {
      EmbeddingForward(ctx, tokens, w, Write(y));
      FAIL() << "token " << bad << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(error.message().find(fmt::format("token {} at position 2", bad)), std::string::npos)
          << error.message();
    }
    EXPECT_TRUE(testing::IsPoisoned(y));
    EXPECT_THROW(EmbeddingBackward(ctx, tokens, y, Write(w.Clone())), Error);
  }
}

TEST(Embedding, GradientOfReference) {
  const Context ctx = Context().WithImpl("ref");
  const Tensor tokens = Tensor::Empty({9}, DType::kI64);
  testing::FillIntegers(tokens, "tokens", 0, 5);
  const Tensor w = testing::Normal({5, 3}, DType::kF64, "w");
  const Tensor dy = testing::Normal({9, 3}, DType::kF64, "dy");
  const Tensor y = Tensor::Empty({9, 3}, DType::kF64), dw = Tensor::Empty({5, 3}, DType::kF64);
  const auto loss = [&] {
    EmbeddingForward(ctx, tokens, w, Write(y));
    return testing::Inner(y, dy);
  };
  EmbeddingBackward(ctx, tokens, dy, Write(dw));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dw", loss, w, dw)));
}

}  // namespace
}  // namespace cistron::ops
