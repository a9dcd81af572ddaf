// quantize: every implementation bit for bit as the codecs of base/float_types.h and as the
// reference, over all codes, special values and shapes of quantize_cases.h; what it must not touch;
// its errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cistron/base/philox.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantize/quantize_cases.h"
#include "cistron/testing/guarded_allocator.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

namespace cistron::ops {
namespace {

using ::testing::HasSubstr;
constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};
constexpr DType kValueTypes[] = {DType::kF32, DType::kBF16};

// Calls f with every implementation, on every instruction set.
template <class F>
void ForAll(F&& f) {
  testing::ForEachImplementation(QuantizeImpls(),
                                 QuantizeProblem{Scaling::kMxfp8, DType::kE4M3, DType::kF32}, f);
}

template <class F>
void ForAllButReference(F&& f) {
  ForAll([&](const Context& ctx) {
    if (ctx.PreferredImpl("quantize") != "ref") f(ctx);
  });
}

std::uint8_t CodeOf(float value, DType format) {
  return format == DType::kE4M3 ? e4m3(value).bits : e5m2(value).bits;
}
float ValueOf(std::uint8_t code, DType format) {
  return format == DType::kE4M3 ? static_cast<float>(e4m3::FromBits(code))
                                : static_cast<float>(e5m2::FromBits(code));
}
const std::uint8_t* Bytes(const Tensor& t) {
  return static_cast<const std::uint8_t*>(t.raw());
}

::testing::AssertionResult SameBytes(const Tensor& got, const Tensor& expected) {
  for (std::int64_t i = 0; i < expected.bytes(); ++i) {
    if (Bytes(got)[i] == Bytes(expected)[i]) continue;
    return ::testing::AssertionFailure()
           << Describe(got) << " byte " << i << ": got " << int{Bytes(got)[i]} << ", expected "
           << int{Bytes(expected)[i]};
  }
  return ::testing::AssertionSuccess();
}

// Codes of x with one scale for the whole tensor.
void ExpectCodes(const Tensor& x, float scale) {
  const std::int64_t cols = x.dim(1);
  for (const DType format : kFormats) {
    std::vector<std::uint8_t> expected;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const float value =
          x.dtype() == DType::kF32 ? x.data<float>()[i] : static_cast<float>(x.data<bf16>()[i]);
      expected.push_back(CodeOf(value * scale, format));
    }
    ForAll([&](const Context& ctx) {
      const Tensor s = Tensor::FromSpan<float>({1}, std::vector{scale});
      const QuantizedTensor q = EmptyQuantized(ctx, x.shape(), {}, {Scaling::kTensor, format}, {});
      Quantize(ctx, x, false, {s, {}}, q);
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        ASSERT_EQ(int{Bytes(q.rowwise.codes)[i]}, int{expected[static_cast<std::size_t>(i)]})
            << Name(format) << " scale " << scale << " at " << i / cols << ", " << i % cols;
      }
    });
  }
}

// The values of a format, the middles between them, and their neighbours in f32.
std::vector<float> NearBoundaries(DType format) {
  std::vector<float> near;
  for (int code = 0; code < 256; ++code) {
    const auto c = static_cast<std::uint8_t>(code);
    const float value = ValueOf(c, format),
                next = ValueOf(static_cast<std::uint8_t>(c ^ 1), format);
    for (const float middle : {value, (value + next) / 2, value + (value - next) / 2}) {
      const auto bits = std::bit_cast<std::uint32_t>(middle);
      for (std::uint32_t d = 0; d < 5; ++d) near.push_back(std::bit_cast<float>(bits + d - 2));
    }
  }
  return near;
}

TEST(QuantizeExact, EveryBf16) {
  const Tensor x = Tensor::Empty({256, 256}, DType::kBF16);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data<bf16>()[i] = bf16::FromBits(static_cast<std::uint16_t>(i));
  }
  for (const float scale : {1.0f, 0.3f, 0x1p100f, 0x1p-100f}) ExpectCodes(x, scale);
}

TEST(QuantizeExact, Fp32PatternsFarAndNearTheRoundingBoundaries) {
  // Every 4099th pattern of all 2^32, in rows that no vector divides.
  const Tensor x = Tensor::Empty({1021, 1027}, DType::kF32);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data<float>()[i] = std::bit_cast<float>(static_cast<std::uint32_t>(i * 4099));
  }
  ExpectCodes(x, 1.0f);
  std::vector<float> near;
  for (const DType format : kFormats) {
    for (const float v : NearBoundaries(format)) near.push_back(v);
  }
  ExpectCodes(Tensor::FromSpan<float>({1, static_cast<std::int64_t>(near.size())}, near), 1.0f);
}

TEST(QuantizeExact, EveryCodeDecodesUnderEveryScale) {
  for (const DType format : kFormats) {
    const Context ref = Context().WithImpl("ref");
    const QuantizedTensor q = EmptyQuantized(ref, {256, 256}, {}, {Scaling::kMxfp8, format}, {});
    for (int r = 0; r < 256; ++r) {
      for (int c = 0; c < 256; ++c) {
        static_cast<std::uint8_t*>(q.rowwise.codes.raw())[r * 256 + c] =
            static_cast<std::uint8_t>(c);
        static_cast<std::uint8_t*>(q.columnwise.codes.raw())[r * 256 + c] =
            static_cast<std::uint8_t>(c);
      }
    }
    for (std::int64_t i = 0; i < 2048; ++i) {
      q.rowwise.scales.data<e8m0>()[i] = e8m0::FromBits(static_cast<std::uint8_t>(i / 8));
      q.columnwise.scales.data<e8m0>()[i] = e8m0::FromBits(static_cast<std::uint8_t>(i * 37));
    }
    ForAll([&](const Context& ctx) {
      for (const Direction direction : {Direction::kRowwise, Direction::kColumnwise}) {
        const Tensor y = ctx.Empty({256, 256}, DType::kF32);
        const Tensor half = ctx.Empty({256, 256}, DType::kBF16);
        FillPoison(y);
        FillPoison(half);
        Dequantize(ctx, q, direction, Write(y));
        Dequantize(ctx, q, direction, Write(half));
        for (std::int64_t i = 0; i < 65536; ++i) {
          const std::int64_t r = i / 256, c = i % 256;
          const bool rows = direction == Direction::kRowwise;
          const e8m0 scale = rows ? q.rowwise.scales.data<e8m0>()[r * 8 + c / 32]
                                  : q.columnwise.scales.data<e8m0>()[r / 32 * 256 + c];
          const float expected =
              ValueOf(static_cast<std::uint8_t>(c), format) * static_cast<float>(scale);
          const float got = y.data<float>()[i], rounded = half.data<bf16>()[i];
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(got) && std::isnan(rounded)) << r << ", " << c;
          } else {
            ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected))
                << Name(format) << " " << r << ", " << c;
            ASSERT_EQ(half.data<bf16>()[i].bits, bf16(expected).bits) << r << ", " << c;
          }
        }
      }
    });
  }
}

// Values of every size, block by block, with special ones strewn in: mostly none, so that blocks
// without are common.
Tensor MixedValues(const Shape& shape, DType dtype) {
  const Tensor t = testing::Normal(shape, DType::kF32, "values");
  const RandomStream stream(testing::TestSeed(), "special");
  const std::int64_t cols = std::max<std::int64_t>(1, shape[shape.rank() - 1]);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {
      0.0f,      -0.0f,      kInf,        -kInf,   std::numeric_limits<float>::quiet_NaN(),
      0x1p-149f, -0x1p-127f, 0x1.8p-126f, 3.4e38f, -0x1.fffffep127f};
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const auto draw = static_cast<std::uint64_t>(i);
    const std::int64_t region = i / cols / 16 * 64 + i % cols / 16;
    float& value = t.data<float>()[i];
    const int exponent =
        static_cast<int>(stream.Below(static_cast<std::uint64_t>(region) + (1ull << 40), 9));
    // Regions of ordinary, huge, tiny and subnormal values, and of zeros.
    constexpr int kExponents[] = {0, 3, -20, 60, 120, -100, -130, -145, 999};
    value = kExponents[exponent] == 999 ? std::copysign(0.0f, value)
                                        : std::ldexp(value, kExponents[exponent]);
    if (stream.Below(draw, 700) == 0) value = kSpecial[stream.Below(draw + (1ull << 41), 10)];
  }
  return ConvertTo(t, dtype);
}

struct Made {
  QuantizedTensor q;
  Tensor amax;
};

Made MakeCase(const Context& ctx, const Tensor& x, const QuantizeCase& c, Scaling scaling,
              DType format, bool power_of_two, const QuantizeCopies& copies) {
  Tensor splits;
  if (!c.split_sizes.empty()) {
    splits = Tensor::FromSpan<std::int64_t>({static_cast<std::int64_t>(c.split_sizes.size())},
                                            c.split_sizes);
  }
  Made made{EmptyQuantized(ctx, x.shape(), splits,
                           {scaling, format, splits ? 1 : c.row_parts, c.col_parts}, copies),
            {}};
  for (const QuantizedCopy* copy : {&made.q.rowwise, &made.q.columnwise}) {
    if (!*copy) continue;
    FillPoison(copy->codes);
    FillPoison(copy->scales);
  }
  if (scaling == Scaling::kTensor) {
    made.amax = ctx.Empty({made.q.num_groups()}, DType::kF32);
    FillPoison(made.amax);
  }
  Quantize(ctx, x, power_of_two, {{}, made.amax}, made.q);
  return made;
}

void ExpectSame(const Made& got, const Made& expected) {
  for (const auto direction : {Direction::kRowwise, Direction::kColumnwise}) {
    if (!got.q.copy(direction)) continue;
    EXPECT_TRUE(SameBytes(got.q.copy(direction).codes, expected.q.copy(direction).codes));
    EXPECT_TRUE(SameBytes(got.q.copy(direction).scales, expected.q.copy(direction).scales));
  }
  if (got.amax) {
    EXPECT_TRUE(SameBytes(got.amax, expected.amax));
  }
}

// Every bf16 up to the largest of its block, whatever the size of that: normal codes, subnormal
// ones and what rounds to zero, alone and among each other.
TEST(QuantizeExact, EveryBf16InBlocksOfEverySize) {
  for (const int exponent : {0, 97, 98, -60, -63, -64, -125}) {
    const Tensor x = Tensor::Empty({32 * 36, 32 * 36}, DType::kBF16);
    const bf16 largest(std::ldexp(1.75f, exponent));
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const std::int64_t r = i / x.dim(1), c = i % x.dim(1);
      const bool anchor = r % 32 == 0 || c % 32 == 0;
      // Some rows of blocks hold neighbours in value, the others all sizes together.
      const std::int64_t draw = r / 32 % 2 == 0 ? i / 9 : i * 7919;
      const auto bits = static_cast<std::uint16_t>(draw % (largest.bits + 1));
      const auto sign = static_cast<std::uint16_t>(i % 2 << 15);
      x.data<bf16>()[i] =
          bf16::FromBits(static_cast<std::uint16_t>((anchor ? largest.bits : bits) | sign));
    }
    for (const DType format : kFormats) {
      for (const Scaling scaling : {Scaling::kMxfp8, Scaling::kMxfp8Block32x32}) {
        SCOPED_TRACE(fmt::format("2^{} {} {}", exponent, Name(format), Name(scaling)));
        const QuantizeCase c{"every bf16", x.shape()};
        const Made expected = MakeCase(Context().WithImpl("ref"), x, c, scaling, format, true, {});
        ForAllButReference([&](const Context& ctx) {
          ExpectSame(MakeCase(ctx, x, c, scaling, format, true, {}), expected);
        });
      }
    }
  }
}

// Ties and their neighbours in blocks of any size: the largest of each block is the format's
// largest value times a power of two.
TEST(QuantizeExact, Fp32NearRoundingBoundariesInBlocksOfEverySize) {
  for (const DType format : kFormats) {
    const float most = static_cast<float>(format == DType::kE4M3 ? e4m3::kMax : e5m2::kMax);
    std::vector<float> near;
    for (const float v : NearBoundaries(format)) {
      if (std::fabs(v) <= most) near.push_back(v);
    }
    const int top = std::ilogb(most);
    for (const int exponent : {0, -20, 97 - top, 98 - top, -63 - top, -64 - top, -120, -140}) {
      const Tensor x = Tensor::Empty({64, 96}, DType::kF32);
      for (std::int64_t i = 0, next = 0; i < x.numel(); ++i) {
        const bool anchor = i / 96 % 32 == 0 || i % 32 == 0;
        const auto at = static_cast<std::size_t>(next) % near.size();
        x.data<float>()[i] = std::ldexp(anchor ? most : near[at], exponent);
        next += anchor ? 0 : 1;
      }
      for (const Scaling scaling : {Scaling::kMxfp8, Scaling::kMxfp8Block32x32}) {
        SCOPED_TRACE(fmt::format("2^{} {} {}", exponent, Name(format), Name(scaling)));
        const QuantizeCase c{"near boundaries", x.shape()};
        const Made expected = MakeCase(Context().WithImpl("ref"), x, c, scaling, format, true, {});
        ForAllButReference([&](const Context& ctx) {
          ExpectSame(MakeCase(ctx, x, c, scaling, format, true, {}), expected);
        });
      }
    }
  }
}

// Poison stays where no group's rows are, so equal bytes say that those are untouched.
TEST(QuantizeExact, EveryCaseIsTheReferenceBitForBit) {
  for (const QuantizeCase& c : QuantizeCases()) {
    for (const DType dtype : kValueTypes) {
      const Tensor x = MixedValues(c.shape, dtype);
      if (!c.split_sizes.empty()) {
        std::int64_t used = 0;
        for (const std::int64_t n : c.split_sizes) used += n;
        FillPoison(x.Slice(0, used, x.dim(0) - used));
      }
      for (const Scaling scaling : kScalings) {
        for (const DType format : kFormats) {
          const bool power_of_two = format == DType::kE5M2;
          SCOPED_TRACE(
              fmt::format("{} {} {} {}", c.name, Name(dtype), Name(scaling), Name(format)));
          const Made expected =
              MakeCase(Context().WithImpl("ref"), x, c, scaling, format, power_of_two, {});
          ForAllButReference([&](const Context& ctx) {
            for (const QuantizeCopies copies :
                 {QuantizeCopies{true, true}, {true, false}, {false, true}}) {
              ExpectSame(MakeCase(ctx, x, c, scaling, format, power_of_two, copies), expected);
            }
          });
        }
      }
    }
  }
}

TEST(QuantizeExact, DequantizeIsTheReferenceBitForBit) {
  for (const QuantizeCase& c : QuantizeCases()) {
    for (const Scaling scaling : kScalings) {
      SCOPED_TRACE(fmt::format("{} {}", c.name, Name(scaling)));
      const Context ref = Context().WithImpl("ref");
      const Tensor x = testing::Normal(c.shape, DType::kF32, "x", 3.0);
      const Made made = MakeCase(ref, x, c, scaling, DType::kE4M3, false, {});
      for (const DType dtype : kValueTypes) {
        for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
          for (const Direction direction : {Direction::kRowwise, Direction::kColumnwise}) {
            const auto decode = [&](const Context& ctx) {
              const Tensor y = ctx.Empty(c.shape, dtype);
              FillPoison(y);
              if (mode == WriteMode::kAccumulate) Convert(x, y);
              Dequantize(ctx, made.q, direction, {y, mode});
              return y;
            };
            const Tensor expected = decode(ref);
            ForAllButReference(
                [&](const Context& ctx) { EXPECT_TRUE(SameBytes(decode(ctx), expected)); });
          }
        }
      }
    }
  }
}

TEST(QuantizeExact, StaysInsideItsBuffersAndReadsStridedRows) {
  const Tensor values = MixedValues({67, 109}, DType::kF32);
  for (const DType dtype : kValueTypes) {
    const testing::Strided x(ConvertTo(values, dtype));
    for (const Scaling scaling : kScalings) {
      SCOPED_TRACE(Name(scaling));
      const QuantizeCase c{"strided", {67, 109}};
      const Made expected =
          MakeCase(Context().WithImpl("ref"), x.view, c, scaling, DType::kE4M3, true, {});
      ForAll([&](const Context& ctx) {
        testing::GuardedAllocator guarded;
        {
          const Context inside = ctx.WithAllocator(guarded);
          const Made made = MakeCase(inside, x.view, c, scaling, DType::kE4M3, true, {});
          ExpectSame(made, expected);
          const testing::Strided y({67, 109}, dtype);
          Dequantize(inside, made.q, Direction::kColumnwise, Write(y.view));
          EXPECT_TRUE(y.SurroundingsUntouched());
        }
        EXPECT_THAT(guarded.TakeViolations(), ::testing::IsEmpty());
      });
    }
  }
}

TEST(QuantizeExact, AnyNumberOfThreadsGivesTheSameBits) {
  const QuantizeCase c{"threads", {700, 530}, {300, 0, 390}};
  const Tensor x = MixedValues(c.shape, DType::kBF16);
  for (const Scaling scaling : kScalings) {
    SCOPED_TRACE(Name(scaling));
    const Made expected =
        MakeCase(Context().WithImpl("ref"), x, c, scaling, DType::kE5M2, true, {});
    for (const int threads : {1, 2, 5}) {
      const testing::ThreadsForScope scope(threads);
      ExpectSame(MakeCase(Context(), x, c, scaling, DType::kE5M2, true, {}), expected);
    }
  }
}

TEST(QuantizeErrors, NameOpArgumentAndValues) {
  const Context ctx;
  const auto message = [](auto&& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(message([&] {
                EmptyQuantized(ctx, {9, 4}, {}, {.row_parts = 2}, {});
              }),
              HasSubstr("quantize: 2 row parts do not divide the rows of [9, 4]"));
  EXPECT_THAT(message([&] {
                EmptyQuantized(ctx, {8, 9}, {}, {.col_parts = 2}, {});
              }),
              HasSubstr("quantize: 2 column parts do not divide the columns of [8, 9]"));
  EXPECT_THAT(message([&] {
                EmptyQuantized(ctx, {8, 8}, {}, {.format = DType::kF32}, {});
              }),
              HasSubstr("quantize: format f32 is neither e4m3 nor e5m2"));
  const Tensor x = testing::Normal({8, 8}, DType::kF32, "x");
  const QuantizedTensor rows = EmptyQuantized(ctx, {8, 8}, {}, {}, {true, false});
  EXPECT_THAT(message([&] { Dequantize(ctx, rows, Direction::kColumnwise, Write(x)); }),
              HasSubstr("quantize: the tensor has no column-wise copy"));
  EXPECT_THAT(message([&] { Quantize(ctx, x.Slice(0, 0, 7), true, {}, rows); }),
              HasSubstr("quantize: x is f32 [7, 8], not of shape [8, 8]"));
  EXPECT_THAT(message([&] { Quantize(ctx, ConvertTo(x, DType::kF64), true, {}, rows); }),
              HasSubstr("its dtype must be f32 or bf16"));
  EXPECT_THAT(message([&] {
                Quantize(ctx, x, true, {ctx.Zeros({1}, DType::kF32), {}}, rows);
              }),
              HasSubstr("was given for scaling mxfp8"));
  const QuantizedTensor whole = EmptyQuantized(ctx, {8, 8}, {}, {Scaling::kTensor}, {});
  EXPECT_THAT(message([&] {
                Quantize(ctx, x, true, {ctx.Zeros({2}, DType::kF32), {}}, whole);
              }),
              HasSubstr("scale"));
  for (const auto& [counts, what] :
       {std::pair{std::vector<std::int64_t>{3, -1}, "split_sizes[1] = -1 is negative"},
        {{3, 6}, "split_sizes[0..1] sum to more than the 8 rows"},
        {{5, std::numeric_limits<std::int64_t>::max()}, "sum to more than the 8 rows"}}) {
    const Tensor splits = Tensor::FromSpan<std::int64_t>({2}, counts);
    const QuantizedTensor q = EmptyQuantized(ctx, {8, 8}, splits, {}, {});
    EXPECT_THAT(message([&] { Quantize(ctx, x, true, {}, q); }), HasSubstr(what));
  }
}

}  // namespace
}  // namespace cistron::ops
