// format_example: the worked examples of docs/formats, as the library computes them.
//
//   format_example NAME      codes, bf16, mxfp8, mxfp8_square, current, delayed, block or
//   scale_tiles
//
// Prints Markdown; scripts/update_docs.py puts it into the pages, and a test compares.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cistron/ops/quantize/delayed_scaling.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantize/scale_tiles.h"

namespace cistron {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The 32 numbers of every page: of both signs, over five decades, with zeros of both signs.
constexpr std::array<float, 32> kNumbers = {
    1.0f,  -1.0f, 0.5f,   0.75f,   1.5f,   -2.0f,   3.0f,     -0.25f,  0.1f,    0.2f,  -0.3f,
    0.4f,  0.6f,  -0.7f,  0.9f,    1.1f,   2.7183f, -3.1416f, 1.4142f, 0.6931f, 0.01f, -0.02f,
    0.03f, 0.05f, 0.001f, -0.002f, 0.003f, 0.0001f, 1e-5f,    -1e-5f,  0.0f,    -0.0f};

// Casts without a scale: the corners of the formats.
constexpr std::array<float, 32> kCorners = {
    1.0f,     -1.0f,      1.0625f,  1.1875f,    1.125f,    448.0f,    464.0f,   465.0f,
    1000.0f,  57344.0f,   61440.0f, 1e6f,       kInf,      -kInf,     kNaN,     -kNaN,
    0x1p-6f,  0x1.cp-7f,  0x1p-9f,  0x1.8p-10f, 0x1p-10f,  -0x1p-11f, 0x1p-14f, 0x1.8p-15f,
    0x1p-16f, 0x1.8p-17f, 0x1p-17f, -0x1p-18f,  0x1p-126f, 0x1p-149f, 0.0f,     -0.0f};

std::string Code(const Tensor& codes, std::int64_t i) {
  return fmt::format("0x{:02X}", static_cast<const std::uint8_t*>(codes.raw())[i]);
}

// Rows of two numbers side by side; cells(i) are those of number i.
template <class F>
void PrintPairs(const std::string& head, std::int64_t count, F&& cells) {
  const auto columns = std::count(head.begin(), head.end(), '|') + 1;
  fmt::print("| {} | {} |\n|", head, head);
  for (std::ptrdiff_t i = 0; i < 2 * columns; ++i) fmt::print("---|");
  fmt::print("\n");
  for (std::int64_t i = 0; i < count / 2; ++i) {
    fmt::print("| {} | {} |\n", cells(i), cells(i + count / 2));
  }
}

QuantizedTensor QuantizeAs(const Tensor& x, const QuantizedLayout& layout, bool power_of_two,
                           const ops::TensorScale& scale = {}) {
  const ops::Context ctx;
  QuantizedTensor q = ops::EmptyQuantized(ctx, x.shape(), {}, layout, {});
  ops::Quantize(ctx, x, power_of_two, scale, q);
  return q;
}

Tensor Decode(const QuantizedTensor& q, Direction direction = Direction::kRowwise) {
  const ops::Context ctx;
  const Tensor y = ctx.Empty(q.shape, DType::kF32);
  ops::Dequantize(ctx, q, direction, ops::Write(y));
  return y;
}

Tensor Row() {
  return Tensor::FromSpan<float>({1, 32}, kNumbers);
}

// The first row of q.
void PrintRow(const QuantizedTensor& q) {
  const Tensor y = Decode(q);
  PrintPairs("x | code | decoded", 32, [&](std::int64_t i) {
    return fmt::format("{} | {} | {:.6g}", kNumbers[static_cast<std::size_t>(i)],
                       Code(q.rowwise.codes, i), y.data<float>()[i]);
  });
}

std::string E8m0(const QuantizedTensor& q) {
  const int code = static_cast<const std::uint8_t*>(q.rowwise.scales.raw())[0];
  return fmt::format("scale code {} = 0x{:02X}, the scale 2^{}", code, code, code - 127);
}

// What one special value does to its block: x[0] is the value, the other 31 are 1.
void PrintSpecials(const QuantizedLayout& layout, bool power_of_two) {
  struct Special {
    const char* name;
    float first, others;
  };
  constexpr Special kSpecials[] = {
      {"0, others 0", 0.0f, 0.0f}, {"−0, others 0", -0.0f, 0.0f},
      {"NaN", kNaN, 1.0f},         {"all NaN", kNaN, kNaN},
      {"Inf", kInf, 1.0f},         {"largest fp32", 0x1.fffffep127f, 1.0f},
      {"2^-149", 0x1p-149f, 1.0f}, {"2^-149, others 0", 0x1p-149f, 0.0f}};
  fmt::print(
      "\n| first of 32, others 1 | scale | its code | decoded | code of the others | decoded |\n"
      "|---|---|---|---|---|---|\n");
  for (const Special& s : kSpecials) {
    std::array<float, 32> values{};
    values.fill(s.others);
    values[0] = s.first;
    const QuantizedTensor q =
        QuantizeAs(Tensor::FromSpan<float>({1, 32}, values), layout, power_of_two);
    const Tensor y = Decode(q);
    const Tensor& scales = q.rowwise.scales;
    const std::string scale = scales.dtype() == DType::kE8M0
                                  ? "code " + Code(scales, 0)
                                  : fmt::format("{:.6g}", scales.data<float>()[0]);
    fmt::print("| {} | {} | {} | {:.6g} | {} | {:.6g} |\n", s.name, scale, Code(q.rowwise.codes, 0),
               y.data<float>()[0], Code(q.rowwise.codes, 1), y.data<float>()[1]);
  }
}

void Codes() {
  PrintPairs("x | e4m3 | is | e5m2 | is", 32, [](std::int64_t i) {
    const float x = kCorners[static_cast<std::size_t>(i)];
    const e4m3 a(x);
    const e5m2 b(x);
    return fmt::format("{:.6g} | 0x{:02X} | {:.6g} | 0x{:02X} | {:.6g}", x, a.bits,
                       static_cast<float>(a), b.bits, static_cast<float>(b));
  });
}

void Bf16() {
  PrintPairs("x | bits | bf16", 32, [](std::int64_t i) {
    const float x = kNumbers[static_cast<std::size_t>(i)];
    return fmt::format("{} | 0x{:04X} | {:.6g}", x, bf16(x).bits, static_cast<float>(bf16(x)));
  });
}

void Mxfp8() {
  for (const DType format : {DType::kE4M3, DType::kE5M2}) {
    const QuantizedTensor q = QuantizeAs(Row(), {.format = format}, true);
    const float t = 3.1416f * (1.0f / ops::MaxOf(format));
    fmt::print("{}{}: amax = 3.1416, t = {:.6g} = {:.4f} · 2^{}; {}.\n\n",
               format == DType::kE4M3 ? "" : "\n", Name(format), t, t / std::exp2(std::ilogb(t)),
               std::ilogb(t), E8m0(q));
    PrintRow(q);
  }
  PrintSpecials({}, true);
}

// 32 rows, all the 32 numbers, one of them 16 times as large.
void Mxfp8Square() {
  const Tensor x = Tensor::Empty({32, 32}, DType::kF32);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data<float>()[i] = kNumbers[static_cast<std::size_t>(i % 32)] * (i / 32 == 5 ? 16.0f : 1.0f);
  }
  const QuantizedTensor strips = QuantizeAs(x, {}, true);
  const QuantizedTensor square = QuantizeAs(x, {.scaling = Scaling::kMxfp8Block32x32}, true);
  fmt::print("Row 0 as a strip: {}. In the square: {}; one copy serves both directions: {}.\n\n",
             E8m0(strips), E8m0(square),
             square.rowwise.codes.raw() == square.columnwise.codes.raw() ? "yes" : "no");
  PrintRow(square);
}

void Current() {
  const QuantizedTensor q = QuantizeAs(Row(), {.scaling = Scaling::kTensor}, false);
  fmt::print(
      "amax = 3.1416: s = {:.8g}, kept as 1/s = {:.8g}. With power_of_two_scales s = {:.8g}.\n\n",
      ops::ScaleFromAmax(3.1416f, DType::kE4M3, false), q.rowwise.scales.data<float>()[0],
      ops::ScaleFromAmax(3.1416f, DType::kE4M3, true));
  PrintRow(q);
  PrintSpecials({.scaling = Scaling::kTensor}, false);
}

void Delayed() {
  const ops::Context ctx;
  const Tensor scale = Tensor::FromSpan<float>({1}, std::array<float, 1>{1.0f});
  const Tensor history = ctx.Zeros({4, 1}, DType::kF32);
  fmt::print(
      "| step | amax | s in this step | history after it | s of the next step |\n"
      "|---|---|---|---|---|\n");
  int step = 1;
  QuantizedTensor shown;
  for (const float amax : {0.5f, 1.0f, 3.1416f, 0.0f, kInf, 0.25f}) {
    const float before = scale.data<float>()[0];
    if (amax == 3.1416f) {
      shown = QuantizeAs(Row(), {.scaling = Scaling::kTensor}, false, {scale.Clone(), {}});
    }
    ops::UpdateDelayedScale(ctx, Tensor::FromSpan<float>({1}, std::array<float, 1>{amax}),
                            DType::kE4M3, 0, ops::AmaxCompute::kMax, history, scale);
    std::string slots;
    for (const float v : history.span<float>())
      slots += fmt::format("{}{:.6g}", slots.empty() ? "" : ", ", v);
    fmt::print("| {} | {:.6g} | {:.6g} | {} | {:.6g} |\n", step++, amax, before, slots,
               scale.data<float>()[0]);
  }
  fmt::print("\nThe 32 numbers in step 3, with the scale of smaller steps:\n\n");
  PrintRow(shown);
}

void Block() {
  const QuantizedTensor q = QuantizeAs(Row(), {.scaling = Scaling::kBlock1x128}, true);
  fmt::print("A ragged block of 32: s = {:.6g}, kept as 1/s = {:.6g}.\n\n",
             ops::ScaleFromAmax(3.1416f, DType::kE4M3, true), q.rowwise.scales.data<float>()[0]);
  PrintRow(q);
  PrintSpecials({.scaling = Scaling::kBlock1x128}, true);
}

// Where the scales of 256 × 6 blocks go.
void ScaleTiles() {
  const ops::Context ctx;
  constexpr std::int64_t kRows = 256, kBlocks = 6;
  const Tensor scales = Tensor::Empty({kRows, kBlocks}, DType::kE8M0);
  const Tensor tiles = ctx.Empty({ops::ScaleTileBytes(kRows, kBlocks)}, DType::kU8);
  fmt::print("{} bytes for {} scales.\n\n| row | block | byte |\n|---|---|---|\n", tiles.numel(),
             kRows * kBlocks);
  for (const auto& [row, block] :
       {std::pair{0, 0}, {0, 1}, {1, 0}, {32, 0}, {64, 3}, {127, 3}, {0, 4}, {128, 0}, {255, 5}}) {
    std::memset(scales.raw(), 0, static_cast<std::size_t>(scales.bytes()));
    static_cast<std::uint8_t*>(scales.raw())[row * kBlocks + block] = 1;
    ops::PackScaleTiles(ctx, scales, tiles);
    const auto* bytes = static_cast<const std::uint8_t*>(tiles.raw());
    fmt::print("| {} | {} | {} |\n", row, block,
               std::find(bytes, bytes + tiles.numel(), 1) - bytes);
  }
}

int Run(const std::string& name) {
  const std::map<std::string, void (*)()> examples = {
      {"codes", Codes},     {"bf16", Bf16},       {"mxfp8", Mxfp8}, {"mxfp8_square", Mxfp8Square},
      {"current", Current}, {"delayed", Delayed}, {"block", Block}, {"scale_tiles", ScaleTiles}};
  const auto example = examples.find(name);
  if (example == examples.end()) {
    fmt::print(stderr, "format_example: no example '{}'\n", name);
    return 2;
  }
  example->second();
  return 0;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  try {
    return cistron::Run(argc == 2 ? argv[1] : "");
  } catch (const cistron::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 2;
  }
}
