#include "cistron/check/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace cistron::check {
namespace {

std::string Coordinates(const Shape& shape, std::int64_t flat) {
  std::string text;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    text = fmt::format("{}{}{}", flat % shape[i], text.empty() ? "" : ", ", text);
    flat /= shape[i];
  }
  return "[" + text + "]";
}

// |got − expected| of two i64 elements: fp64 alone cannot tell those above 2^53 apart.
double Distance(const Tensor& got, const Tensor& expected, std::int64_t i) {
  const std::int64_t a = got.span<std::int64_t>()[static_cast<std::size_t>(i)];
  const std::int64_t b = expected.span<std::int64_t>()[static_cast<std::size_t>(i)];
  const auto low = static_cast<std::uint64_t>(std::min(a, b));
  return static_cast<double>(static_cast<std::uint64_t>(std::max(a, b)) - low);
}

void RequireSameShape(const std::string& name, const Tensor& got, const Tensor& expected) {
  CISTRON_CHECK(got && expected && got.shape() == expected.shape(), "compare {}: {} against {}",
                name, Describe(got), Describe(expected));
}

void Finish(const std::string& name, const Shape& shape, Comparison& c) {
  c.ok = c.failed == 0;
  if (c.ok) {
    c.message = fmt::format("{}: {} elements agree, worst error {:.3g} of bound {:.3g}", name,
                            c.compared, c.worst_error, c.worst_bound);
    return;
  }
  c.message = fmt::format(
      "{}: {} of {} elements differ; worst at {}: got {:.9g}, expected {:.9g}, error {:.3g} > "
      "bound "
      "{:.3g}",
      name, c.failed, c.compared, Coordinates(shape, c.worst_index), c.worst_got, c.worst_expected,
      c.worst_error, c.worst_bound);
}

}  // namespace

Comparison Compare(const std::string& name, const Tensor& got, const Tensor& expected,
                   const std::function<double(std::int64_t)>& bound) {
  RequireSameShape(name, got, expected);
  const bool integers = got.dtype() == DType::kI64 && expected.dtype() == DType::kI64;
  Comparison c;
  double worst_ratio = -1;
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    const double g = ElementAsDouble(got, i);
    const double e = ElementAsDouble(expected, i);
    const double limit = bound(i);
    double error = integers ? Distance(got, expected, i) : std::abs(g - e);
    bool pass = false;
    if (std::isfinite(g) && std::isfinite(e)) {
      pass = error <= limit;
    } else {
      pass = (std::isnan(g) && std::isnan(e)) || g == e;  // equal infinities
      error = pass ? 0 : std::numeric_limits<double>::infinity();
    }
    ++c.compared;
    if (!pass) ++c.failed;
    // A failure always outranks a pass, so that the report shows one.
    double ratio = error == 0 ? 0 : error / std::max(limit, 1e-300);
    if (!pass && !(ratio > 1)) ratio = std::numeric_limits<double>::infinity();
    if (ratio > worst_ratio) {
      worst_ratio = ratio;
      c.worst_index = i;
      c.worst_got = g;
      c.worst_expected = e;
      c.worst_error = error;
      c.worst_bound = limit;
    }
  }
  Finish(name, got.shape(), c);
  return c;
}

Comparison Compare(const std::string& name, const Tensor& got, const Tensor& expected,
                   double bound) {
  return Compare(name, got, expected, [bound](std::int64_t) { return bound; });
}

Comparison CompareBitwise(const std::string& name, const Tensor& got, const Tensor& expected) {
  RequireSameShape(name, got, expected);
  CISTRON_CHECK(got.dtype() == expected.dtype(), "compare {}: {} against {}", name, Describe(got),
                Describe(expected));
  CISTRON_CHECK(got.IsContiguous() && expected.IsContiguous(),
                "compare {}: bitwise comparison needs contiguous tensors", name);
  Comparison c;
  const std::size_t size = SizeOf(got.dtype());
  const char* a = static_cast<const char*>(got.raw());
  const char* b = static_cast<const char*>(expected.raw());
  for (std::int64_t i = 0; i < got.numel(); ++i, a += size, b += size) {
    ++c.compared;
    if (std::memcmp(a, b, size) == 0) continue;
    if (c.failed++ == 0) {
      c.worst_index = i;
      c.worst_got = ElementAsDouble(got, i);
      c.worst_expected = ElementAsDouble(expected, i);
      c.worst_error = std::abs(c.worst_got - c.worst_expected);
    }
  }
  Finish(name, got.shape(), c);
  return c;
}

Comparison CompareToMaximum(const std::string& name, const Tensor& got, const Tensor& expected,
                            double bound) {
  RequireSameShape(name, got, expected);
  double largest = 0;
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const double e = std::abs(ElementAsDouble(expected, i));
    if (std::isfinite(e) && e > largest) largest = e;
  }
  return Compare(name, got, expected, bound * largest);
}

}  // namespace cistron::check
