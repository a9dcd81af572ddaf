// quantize: bitwise against values made with numpy and ml_dtypes, every implementation against the
// reference, and the promises of quantize.h.
#include "cistron/ops/quantize/quantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cistron/check/compare.h"
#include "cistron/ops/quantize/delayed_scaling.h"
#include "cistron/ops/quantize/scale_tiles.h"
#include "cistron/testing/golden_file.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;

const testing::GoldenFile& Golden(int file) {
  static const testing::GoldenFile first(std::string(CISTRON_SOURCE_DIR) +
                                         "/tests/golden/numerics.safetensors");
  static const testing::GoldenFile second(std::string(CISTRON_SOURCE_DIR) +
                                          "/tests/golden/numerics2.safetensors");
  return file == 1 ? first : second;
}

DType FormatOf(const std::string& name) {
  return name.find("e5m2") != std::string::npos ? DType::kE5M2 : DType::kE4M3;
}

bool IsNanCode(std::uint8_t code, DType format) {
  return format == DType::kE4M3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c;
}

// Codes as bytes, bit for bit; the sign of a NaN is free.
::testing::AssertionResult SameCodes(const Tensor& got, const Tensor& expected, DType format) {
  if (got.numel() != expected.numel()) {
    return ::testing::AssertionFailure() << Describe(got) << " against " << Describe(expected);
  }
  const auto* a = static_cast<const std::uint8_t*>(got.raw());
  const auto* b = static_cast<const std::uint8_t*>(expected.raw());
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    if (a[i] == b[i] || (IsNanCode(a[i], format) && IsNanCode(b[i], format))) continue;
    return ::testing::AssertionFailure()
           << "code " << i << ": got " << int{a[i]} << ", expected " << int{b[i]};
  }
  return ::testing::AssertionSuccess();
}

// Scales of either type, bit for bit, over as many as are expected.
::testing::AssertionResult SameScales(const Tensor& got, const Tensor& expected) {
  const std::size_t bytes = static_cast<std::size_t>(expected.bytes());
  if (got.bytes() >= expected.bytes() && SizeOf(got.dtype()) == SizeOf(expected.dtype()) &&
      std::memcmp(got.raw(), expected.raw(), bytes) == 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << Describe(got) << " differs from " << Describe(expected);
}

QuantizedTensor Quantized(const Context& ctx, const Tensor& x, const Tensor& split_sizes,
                          const QuantizedLayout& layout, bool power_of_two) {
  QuantizedTensor q = EmptyQuantized(ctx, x.shape(), split_sizes, layout, {});
  for (const QuantizedCopy* copy : {&q.rowwise, &q.columnwise}) {
    FillPoison(copy->codes);
    FillPoison(copy->scales);
  }
  Quantize(ctx, x, power_of_two, {}, q);
  return q;
}

// Calls f with every implementation, on every instruction set.
template <class F>
void ForAll(Scaling scaling, F&& f) {
  testing::ForEachImplementation(QuantizeImpls(),
                                 QuantizeProblem{scaling, DType::kE4M3, DType::kF32}, f);
}

TEST(QuantizeGolden, Mxfp8) {
  ForAll(Scaling::kMxfp8, [](const Context& ctx) {
    int compared = 0;
    for (const int file : {1, 2}) {
      for (const char* prefix : {"mxfp8.", "edge."}) {
        for (const std::string& name : Golden(file).Names(prefix)) {
          const std::size_t end = name.rfind("wise.codes");
          if (end == std::string::npos) continue;
          SCOPED_TRACE(name);
          const Direction direction =
              name.find("row", end - 3) == end - 3 ? Direction::kRowwise : Direction::kColumnwise;
          const DType format = FormatOf(name);
          const std::string stem =
              name.substr(0, name.find(format == DType::kE4M3 ? "e4m3" : "e5m2"));
          const QuantizedTensor q =
              Quantized(ctx, Golden(file).Get(stem + "in.x"), {}, {Scaling::kMxfp8, format}, true);
          EXPECT_TRUE(SameCodes(q.copy(direction).codes, Golden(file).Get(name), format));
          EXPECT_TRUE(SameScales(q.copy(direction).scales,
                                 Golden(file).Get(name.substr(0, name.size() - 5) + "scales")));
          ++compared;
        }
      }
    }
    EXPECT_EQ(compared, 40);
  });
}

TEST(QuantizeGolden, ColumnwiseBlocksRestartAtEveryGroup) {
  ForAll(Scaling::kMxfp8, [](const Context& ctx) {
    const auto& golden = Golden(2);
    const QuantizedTensor q =
        Quantized(ctx, golden.Get("grouped.in.x"), golden.Get("grouped.in.split_sizes"), {}, true);
    for (const auto& [direction, name] :
         {std::pair{Direction::kRowwise, "rowwise"}, {Direction::kColumnwise, "columnwise"}}) {
      const std::string key = std::string("grouped.e4m3.") + name;
      EXPECT_TRUE(SameCodes(q.copy(direction).codes, golden.Get(key + ".codes"), DType::kE4M3));
      EXPECT_TRUE(SameScales(q.copy(direction).scales, golden.Get(key + ".scales")));
    }
  });
}

TEST(QuantizeGolden, Squares32x32) {
  ForAll(Scaling::kMxfp8Block32x32, [](const Context& ctx) {
    const auto& golden = Golden(2);
    const QuantizedTensor q =
        Quantized(ctx, golden.Get("grouped.in.w"), {}, {Scaling::kMxfp8Block32x32}, true);
    EXPECT_EQ(q.rowwise.codes.raw(), q.columnwise.codes.raw());
    for (std::int64_t e = 0; e < 5; ++e) {
      const std::string key = fmt::format("grouped.w{}.block32x32.", e);
      EXPECT_TRUE(SameCodes(q.rowwise.codes.Select(e), golden.Get(key + "codes"), DType::kE4M3));
      EXPECT_TRUE(SameScales(q.rowwise.scales.Select(e), golden.Get(key + "scales")));
    }
  });
}

TEST(QuantizeGolden, CurrentScaling) {
  ForAll(Scaling::kTensor, [](const Context& ctx) {
    for (const int file : {1, 2}) {
      for (const std::string& name : Golden(file).Names("current.")) {
        if (name.find(".codes") == std::string::npos) continue;
        SCOPED_TRACE(name);
        const std::string stem = name.substr(0, name.size() - 5);
        const std::string input =
            file == 1
                ? "scaled" + name.substr(name.find('.', 9), name.size() - name.find('.', 9) - 5)
                : name.substr(0, name.find(FormatOf(name) == DType::kE4M3 ? "e4m3" : "e5m2"));
        const Tensor& x = Golden(file).Get(input + "in.x");
        const DType format = FormatOf(name);
        const QuantizedTensor q = Quantized(ctx, x, {}, {Scaling::kTensor, format}, false);
        EXPECT_TRUE(SameCodes(q.rowwise.codes, Golden(file).Get(name), format));
        const float s = Golden(file).Get(stem + "scale").data<float>()[0];
        EXPECT_EQ(q.rowwise.scales.data<float>()[0], 1.0f / s);
      }
    }
  });
}

TEST(QuantizeGolden, BlockScaling) {
  ForAll(Scaling::kBlock1x128, [](const Context& ctx) {
    const auto& golden = Golden(1);
    for (const auto& [prefix, scaling] : {std::pair{"block1x128.", Scaling::kBlock1x128},
                                          {"block128x128.", Scaling::kBlock128x128}}) {
      for (const std::string& name : golden.Names(prefix)) {
        if (name.find(".codes") == std::string::npos) continue;
        SCOPED_TRACE(name);
        const std::string middle = name.substr(name.find("e4m3.") + 5);
        const Tensor& x = golden.Get("scaled." + middle.substr(0, middle.size() - 5) + "in.x");
        const QuantizedTensor q = Quantized(ctx, x, {}, {scaling}, true);
        EXPECT_TRUE(SameCodes(q.rowwise.codes, golden.Get(name), DType::kE4M3));
        EXPECT_TRUE(SameScales(q.rowwise.scales,
                               golden.Get(name.substr(0, name.size() - 5) + "scale_inv")));
      }
    }
  });
}

TEST(DelayedScaling, FollowsTheGoldenHistory) {
  const auto run = [](const Tensor& amax, const Tensor& expected, std::int64_t slots, int margin,
                      AmaxCompute algorithm, DType format) {
    const Context ctx;
    const std::int64_t groups = amax.dim(1);
    const Tensor history = ctx.Zeros({slots, groups}, DType::kF32);
    const Tensor scale = ctx.Empty({groups}, DType::kF32);
    std::fill_n(scale.data<float>(), groups, 1.0f);
    for (std::int64_t step = 0; step < amax.dim(0); ++step) {
      UpdateDelayedScale(ctx, amax.Select(step), format, margin, algorithm, history, scale);
      EXPECT_TRUE(SameScales(scale, expected.Select(step))) << "step " << step;
    }
  };
  run(Golden(1).Get("delayed.in.amax_per_step"), Golden(1).Get("delayed.scale_after_step"), 4, 0,
      AmaxCompute::kMax, DType::kE4M3);
  int compared = 0;
  for (const std::string& name : Golden(2).Names("delayed.history")) {
    SCOPED_TRACE(name);
    run(Golden(2).Get("delayed.in.amax_per_step"), Golden(2).Get(name), name[15] - '0',
        name[name.find("margin") + 6] - '0',
        name.find("most_recent") != std::string::npos ? AmaxCompute::kMostRecent
                                                      : AmaxCompute::kMax,
        FormatOf(name));
    ++compared;
  }
  EXPECT_EQ(compared, 16);
}

TEST(ScaleTiles, ConvertBothWaysAsTheGoldenTiles) {
  const Context ctx;
  for (const char* shape : {"128x4", "200x9", "300x16"}) {
    const Tensor& bytes = Golden(2).Get(fmt::format("swizzle.{}.in.scales", shape));
    const Tensor scales = Tensor::Borrow(bytes.raw(), bytes.shape(), DType::kE8M0);
    const Tensor tiles = ctx.Empty({ScaleTileBytes(bytes.dim(0), bytes.dim(1))}, DType::kU8);
    PackScaleTiles(ctx, scales, tiles);
    EXPECT_TRUE(Agrees(check::CompareBitwise(
        shape, tiles, Golden(2).Get(fmt::format("swizzle.{}.tiles", shape)))));
    const Tensor back = ctx.Empty(bytes.shape(), DType::kE8M0);
    UnpackScaleTiles(ctx, tiles, back);
    EXPECT_TRUE(Agrees(check::CompareBitwise(shape, back, scales)));
  }
}

}  // namespace
}  // namespace cistron::ops
