// Verification of a numerics file: the table, products, layers and schedules.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <regex>

#include "cistron/base/error.h"
#include "cistron/check/bounds.h"
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantized_gemm/quantized_gemm.h"
#include "cistron/ops/split_sizes.h"
#include "cistron/train/numerics_file.h"
#include "cistron/train/schedule.h"

namespace cistron::train {
namespace {

constexpr const char* kBitwise = "bitwise";
constexpr const char* kBound = "bound";

Tensor ToF32(const Tensor& t) {
  Tensor f = Tensor::Empty(t.shape(), DType::kF32);
  Convert(t, f);
  return f;
}

// y = a·bᵀ of decoded operands: Σ|a||b| of each element, by group.
struct Operands {
  QuantizedTensor x, w, dy;
};

Tensor Decoded(const ops::Context& ctx, const QuantizedTensor& q, Direction direction) {
  const Tensor y = ctx.Zeros(q.shape, DType::kF32);
  ops::Dequantize(ctx, q, direction, ops::Write(y));
  return y;
}

// Σ|a||b| of every element of the three grouped products.
Tensor AbsoluteSums(const ops::Context& ctx, ops::QuantizedGemmKind kind, const Operands& o,
                    const Shape& shape) {
  using Kind = ops::QuantizedGemmKind;
  const bool wgrad = kind == Kind::kWgrad;
  const QuantizedTensor& left = kind == Kind::kForward ? o.x : o.dy;
  const Tensor a = Decoded(ctx, left, wgrad ? Direction::kColumnwise : Direction::kRowwise);
  const Tensor b = Decoded(ctx, wgrad ? o.x : o.w,
                           kind == Kind::kForward ? Direction::kRowwise : Direction::kColumnwise);
  const auto offsets = ops::RowOffsets("verify", left.split_sizes, left.shape[0]);
  const Tensor sums = ctx.Zeros(shape, DType::kF64);
  const std::int64_t inner = a.dim(1), cols = shape[shape.rank() - 1];
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const auto group = static_cast<std::int64_t>(e);
    for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (std::int64_t i = 0; i < inner; ++i) {
        const double p = std::abs(static_cast<double>(a.data<float>()[r * inner + i]));
        for (std::int64_t c = 0; c < cols; ++c) {
          const std::int64_t at = wgrad ? (group * inner + i) * cols + c : r * cols + c;
          const std::int64_t from =
              wgrad
                  ? r * cols + c
                  : group * inner * cols + (kind == Kind::kForward ? c * inner + i : i * cols + c);
          sums.data<double>()[at] += p * std::abs(static_cast<double>(b.data<float>()[from]));
        }
      }
    }
  }
  return sums;
}

// Rows of column-wise MXFP8 scales that groups of these sizes use: every group starts a block.
std::int64_t ColumnwiseScaleRows(const Tensor& split_sizes) {
  constexpr std::int64_t kBlock = 32;
  std::int64_t rows = 0;
  for (std::int64_t e = 0; e < split_sizes.numel(); ++e) {
    rows += (static_cast<std::int64_t>(ElementAsDouble(split_sizes, e)) + kBlock - 1) / kBlock;
  }
  return rows;
}

// The dimensions that are not 1: a scalar of the library may be [1] in the file, [n] be [1, n].
std::vector<std::int64_t> Squeezed(const Shape& shape) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] != 1) dims.push_back(shape[i]);
  }
  return dims;
}

// Whether every element of one has its element in the other, of the same type; the file keeps
// formats of 8 bits as bytes.
bool Comparable(const Tensor& got, const Tensor& expected) {
  const bool same_type = got.dtype() == expected.dtype() ||
                         (SizeOf(got.dtype()) == 1 && expected.dtype() == DType::kU8);
  return same_type && Squeezed(got.shape()) == Squeezed(expected.shape());
}

std::string Differs(const std::string& group, const Tensor& got, const Tensor& expected) {
  return fmt::format("{}: got {}, expected {}", group, Describe(got), Describe(expected));
}

void VerifyGrouped(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  using Kind = ops::QuantizedGemmKind;
  if (!file.Has("grouped.in.split_sizes")) return;
  const Tensor splits = file.Get("grouped.in.split_sizes");
  const auto quantized = [&](const Tensor& t, const Tensor& split_sizes, Scaling scaling) {
    const QuantizedTensor q = ops::EmptyQuantized(ctx, t.shape(), split_sizes, {scaling}, {});
    ops::Quantize(ctx, t, true, {}, q);
    return q;
  };
  const Tensor w = file.Get("grouped.in.w");
  const Operands o{quantized(file.Get("grouped.in.x"), splits, Scaling::kMxfp8),
                   quantized(w, {}, Scaling::kMxfp8),
                   quantized(file.Get("grouped.in.dy"), splits, Scaling::kMxfp8)};
  for (const auto& [direction, name] :
       {std::pair{Direction::kRowwise, "rowwise"}, {Direction::kColumnwise, "columnwise"}}) {
    const std::string key = std::string("grouped.e4m3.") + name;
    const QuantizedCopy& copy = o.x.copy(direction);
    // Column-wise there is room for more scales than these groups have; what is used is compared.
    const Tensor scales = direction == Direction::kRowwise
                              ? copy.scales
                              : copy.scales.Slice(0, 0, ColumnwiseScaleRows(splits));
    table.Codes("grouped mxfp8 codes", copy.codes, file.Get(key + ".codes"));
    table.Bitwise("grouped mxfp8 scales", scales, file.Get(key + ".scales"));
  }
  const QuantizedTensor squares = quantized(w, {}, Scaling::kMxfp8Block32x32);
  for (std::int64_t e = 0; e < w.dim(0); ++e) {
    const std::string key = fmt::format("grouped.w{}.block32x32.", e);
    table.Codes("mxfp8 32x32 codes", squares.rowwise.codes.Select(e), file.Get(key + "codes"));
    table.Bitwise("mxfp8 32x32 scales", squares.rowwise.scales.Select(e), file.Get(key + "scales"));
  }
  const auto terms = [&](Kind kind) -> std::int64_t {
    if (kind != Kind::kWgrad) return kind == Kind::kForward ? w.dim(2) : w.dim(1);
    const auto counts = splits.span<std::int64_t>();
    return *std::max_element(counts.begin(), counts.end());
  };
  for (const auto& [kind, name] :
       {std::pair{Kind::kForward, "y"}, {Kind::kDgrad, "dx"}, {Kind::kWgrad, "dw"}}) {
    const Tensor expected = file.Get(std::string("grouped.mxfp8.") + name);
    const Tensor got = ctx.Zeros(expected.shape(), DType::kF32);
    if (kind == Kind::kForward) ops::QuantizedGemmForward(ctx, o.x, o.w, ops::Write(got));
    if (kind == Kind::kDgrad) ops::QuantizedGemmDgrad(ctx, o.dy, o.w, ops::Write(got));
    if (kind == Kind::kWgrad) ops::QuantizedGemmWgrad(ctx, o.dy, o.x, ops::Write(got));
    const Tensor sums = AbsoluteSums(ctx, kind, o, expected.shape());
    table.Bound(
        std::string("grouped mxfp8 ") + name, got, expected, [&, &k = kind](std::int64_t i) {
          return check::DotBound(terms(k), sums.data<double>()[i], DType::kF32, DType::kF32);
        });
  }
}

void VerifySwiGlu(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"((scaled_swiglu\.\d+x\d+\.)in\.x)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const std::string prefix = match[1];
    const Tensor x = ToF32(file.Get(name)), dy = ToF32(file.Get(prefix + "in.dy"));
    const std::int64_t rows = x.dim(0);
    const Tensor scale = ToF32(file.Get(prefix + "in.scale")).Reshape({rows});
    const Tensor y = ctx.Empty(dy.shape(), DType::kF32), dx = ctx.Empty(x.shape(), DType::kF32);
    const Tensor dscale = ctx.Empty({rows}, DType::kF32);
    ops::SwiGluForward(ctx, x, scale, {}, ops::Write(y));
    ops::SwiGluBackward(ctx, dy, x, scale, {}, ops::Write(dx), ops::Write(dscale), {});
    // Inputs are rounded to f32, and the formulas in it; the bound is the file's.
    table.ToMaximum("scaled swiglu", y, file.Get(prefix + "y"), 1e-6);
    table.ToMaximum("scaled swiglu gradients", dx, file.Get(prefix + "dx"), 1e-6);
    table.ToMaximum("scaled swiglu gradients", dscale, file.Get(prefix + "dscale").Reshape({rows}),
                    1e-6);
  }
}

void VerifySchedule(NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(
      R"(schedule\.warmup(\d+)\.decay(\d+)\.floor([-+.0-9e]+)\.peak([-+.0-9e]+))");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const Schedule schedule{std::stod(match[4]), std::stoll(match[1]), std::stoll(match[2]),
                            std::stod(match[3])};
    const Tensor expected = file.Get(name);
    const Tensor got = Tensor::Empty(expected.shape(), DType::kF64);
    for (std::int64_t t = 0; t < got.numel(); ++t) {
      got.data<double>()[t] = LearningRate(schedule, t + 1);
    }
    // A cosine and a handful of operations in fp64, relative to the peak.
    table.Bound("schedule", got, expected,
                [&](std::int64_t) { return check::Gamma(16, DType::kF64) * schedule.peak; });
  }
}

}  // namespace

VerifyRow& NumericsTable::Row(const std::string& group, const char* how) {
  for (VerifyRow& row : rows_) {
    if (row.quantity == group) return row;
  }
  rows_.push_back({.quantity = group, .ok = true, .how = how});
  return rows_.back();
}

void NumericsTable::Merge(const std::string& group, double error, double bound, bool ok,
                          std::int64_t compared, const std::string& message) {
  VerifyRow& row = Row(group, kBound);
  // The value nearest to its bound, or furthest beyond it, stays in the row.
  const auto ratio = [](double e, double b) { return e == 0 ? 0.0 : b > 0 ? e / b : HUGE_VAL; };
  if (row.compared == 0 || !ok || ratio(error, bound) > ratio(row.error, row.bound)) {
    row.error = error;
    row.bound = bound;
  }
  row.compared += compared;
  if (!ok && row.ok) note_ += (note_.empty() ? "" : "\n        ") + message;
  row.ok = row.ok && ok;
}

void NumericsTable::Bitwise(const std::string& group, const Tensor& got, const Tensor& expected) {
  Row(group, kBitwise);
  if (!Comparable(got, expected)) return Fail(group, Differs(group, got, expected));
  const Tensor view = Tensor::Borrow(got.raw(), expected.shape(), expected.dtype());
  const check::Comparison c = check::CompareBitwise(group, view, expected);
  Merge(group, static_cast<double>(c.failed), 0, c.ok, c.compared, c.message);
}

void NumericsTable::Codes(const std::string& group, const Tensor& got, const Tensor& expected) {
  Row(group, kBitwise);
  if (!Comparable(got, expected)) return Fail(group, Differs(group, got, expected));
  const auto is_nan = [&](std::uint8_t code) {
    return got.dtype() == DType::kE4M3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c;
  };
  const auto* a = static_cast<const std::uint8_t*>(got.raw());
  const auto* b = static_cast<const std::uint8_t*>(expected.raw());
  std::int64_t failed = 0;
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    failed += a[i] == b[i] || (is_nan(a[i]) && is_nan(b[i])) ? 0 : 1;
  }
  Merge(group, static_cast<double>(failed), 0, failed == 0, got.numel(),
        fmt::format("{}: {} of {} codes differ", group, failed, got.numel()));
}

void NumericsTable::ToMaximum(const std::string& group, const Tensor& got, const Tensor& expected,
                              double bound) {
  const check::Comparison c = check::CompareToMaximum(group, got, expected, bound);
  Merge(group, c.worst_error, c.worst_bound, c.ok, c.compared, c.message);
}

void NumericsTable::Bound(const std::string& group, const Tensor& got, const Tensor& expected,
                          const std::function<double(std::int64_t)>& bound) {
  const check::Comparison c = check::Compare(group, got, expected, bound);
  Merge(group, c.worst_error, c.worst_bound, c.ok, c.compared, c.message);
}

void NumericsTable::Number(const std::string& group, double got, double expected,
                           double relative_bound) {
  const double error = std::abs(got - expected), bound = relative_bound * std::abs(expected);
  Merge(group, error, bound, error <= bound, 1,
        fmt::format("{}: got {}, expected {}", group, got, expected));
}

void NumericsTable::Fail(const std::string& group, const std::string& why) {
  Merge(group, HUGE_VAL, 0, false, 0, why);
}

void VerifyProducts(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  VerifyGrouped(ctx, file, table);
  VerifySwiGlu(ctx, file, table);
  VerifySchedule(file, table);
}

VerifyReport VerifyNumerics(const ops::Context& ctx, const std::filesystem::path& path) {
  NumericsFile file(path);
  NumericsTable table;
  VerifyFormats(ctx, file, table);
  VerifyProducts(ctx, file, table);
  VerifyRouting(ctx, file, table);
  // Nothing is passed over in silence.
  std::string unread;
  for (const std::string& name : file.unread()) unread += (unread.empty() ? "" : ", ") + name;
  if (!unread.empty()) table.Fail("unknown", "not compared, names not recognised: " + unread);
  VerifyReport report{path, table.rows(), table.note()};
  if (report.rows.empty()) CISTRON_THROW(kBadInput, "{}: the file holds no tensor", path.string());
  return report;
}

}  // namespace cistron::train
