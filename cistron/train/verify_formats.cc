// Verification of a numerics file: 8-bit formats, scales, and their layouts.
#include <regex>

#include "cistron/ops/quantize/delayed_scaling.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantize/scale_tiles.h"
#include "cistron/train/numerics_file.h"

namespace cistron::train {
namespace {

DType FormatOf(const std::string& name) {
  return name == "e5m2" ? DType::kE5M2 : DType::kE4M3;
}

QuantizedTensor Quantized(const ops::Context& ctx, const Tensor& x, Scaling scaling, DType format,
                          bool power_of_two) {
  const QuantizedTensor q = ops::EmptyQuantized(ctx, x.shape(), {}, {scaling, format}, {});
  ops::Quantize(ctx, x, power_of_two, {}, q);
  return q;
}

// mxfp8.MxK.KIND.FORMAT.rowwise.codes, edge.MxK.FORMAT.columnwise.codes
void Mxfp8(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"(((?:mxfp8|edge)\..*)(e4m3|e5m2)\.(row|column)wise\.codes)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const DType format = FormatOf(match[2]);
    const QuantizedTensor q = Quantized(ctx, file.Get(match[1].str() + "in.x"), Scaling::kMxfp8,
                                        format, /*power_of_two=*/true);
    const QuantizedCopy& copy =
        q.copy(match[3] == "row" ? Direction::kRowwise : Direction::kColumnwise);
    const std::string group = "mxfp8 " + match[2].str();
    table.Codes(group + " codes", copy.codes, file.Get(name));
    table.Bitwise(group + " scales", copy.scales,
                  file.Get(name.substr(0, name.size() - 5) + "scales"));
  }
}

// One scale a tensor, `scale` in the file, its inverse in the library.
void Whole(const ops::Context& ctx, NumericsFile& file, NumericsTable& table, const Tensor& x,
           const std::string& format, const std::string& stem) {
  const QuantizedTensor q = Quantized(ctx, x, Scaling::kTensor, FormatOf(format), false);
  const Tensor scale = file.Get(stem + "scale");
  const Tensor inverse = Tensor::Empty(scale.shape(), DType::kF32);
  for (std::int64_t i = 0; i < scale.numel(); ++i) {
    inverse.data<float>()[i] = 1.0f / scale.data<float>()[i];
  }
  table.Codes("current " + format + " codes", q.rowwise.codes, file.Get(stem + "codes"));
  table.Bitwise("current " + format + " scales", q.rowwise.scales, inverse);
}

void Current(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kShaped(R"((current\.(e4m3|e5m2)\.(\d+x\d+\..*))codes)");
  static const std::regex kNamed(R"(((current\..*\.)(e4m3|e5m2)\.)codes)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (std::regex_match(name, match, kShaped)) {
      Whole(ctx, file, table, file.Get("scaled." + match[3].str() + "in.x"), match[2], match[1]);
    } else if (std::regex_match(name, match, kNamed)) {
      Whole(ctx, file, table, file.Get(match[2].str() + "in.x"), match[3], match[1]);
    }
  }
}

void Blocks(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"(block(1|128)x128\.(e4m3|e5m2)\.(.*)codes)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const QuantizedTensor q =
        Quantized(ctx, file.Get("scaled." + match[3].str() + "in.x"),
                  match[1] == "1" ? Scaling::kBlock1x128 : Scaling::kBlock128x128,
                  FormatOf(match[2]), /*power_of_two=*/true);
    const std::string group = "block " + match[1].str() + "x128";
    table.Codes(group + " codes", q.rowwise.codes, file.Get(name));
    table.Bitwise(group + " scales", q.rowwise.scales,
                  file.Get(name.substr(0, name.size() - 5) + "scale_inv"));
  }
}

void Delayed(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(
      R"(delayed\.(?:history(\d+)\.(max|most_recent)\.margin(\d+)\.(e4m3|e5m2)\.)?scale_after_step)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    // Without options in its name: history 4, max, margin 0, e4m3.
    const bool plain = !match[1].matched;
    const Tensor amax = file.Get("delayed.in.amax_per_step"), expected = file.Get(name);
    if (expected.dim(0) != amax.dim(0)) {
      table.Fail("delayed scales", fmt::format("{}: {} steps of scales for {} of amax", name,
                                               expected.dim(0), amax.dim(0)));
      continue;
    }
    const std::int64_t groups = amax.dim(1);
    const Tensor history =
        ctx.Zeros({plain ? 4 : std::int64_t{std::stoll(match[1])}, groups}, DType::kF32);
    const Tensor scale = ctx.Empty({groups}, DType::kF32);
    for (float& s : scale.span<float>()) s = 1.0f;
    for (std::int64_t step = 0; step < amax.dim(0); ++step) {
      ops::UpdateDelayedScale(
          ctx, amax.Select(step), plain ? DType::kE4M3 : FormatOf(match[4]),
          plain ? 0 : std::stoi(match[3]),
          match[2] == "most_recent" ? ops::AmaxCompute::kMostRecent : ops::AmaxCompute::kMax,
          history, scale);
      table.Bitwise("delayed scales", scale, expected.Select(step));
    }
  }
}

void Tiles(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"((swizzle\..*)in\.scales)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const Tensor bytes = file.Get(name);
    const Tensor scales = Tensor::Borrow(bytes.raw(), bytes.shape(), DType::kE8M0);
    const Tensor tiles = ctx.Empty({ops::ScaleTileBytes(bytes.dim(0), bytes.dim(1))}, DType::kU8);
    ops::PackScaleTiles(ctx, scales, tiles);
    table.Bitwise("scale tiles", tiles, file.Get(match[1].str() + "tiles"));
    const Tensor back = ctx.Empty(bytes.shape(), DType::kE8M0);
    ops::UnpackScaleTiles(ctx, tiles, back);
    table.Bitwise("scale tiles", back, bytes);
  }
}

}  // namespace

void VerifyFormats(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  Mxfp8(ctx, file, table);
  Current(ctx, file, table);
  Blocks(ctx, file, table);
  Delayed(ctx, file, table);
  Tiles(ctx, file, table);
}

}  // namespace cistron::train
