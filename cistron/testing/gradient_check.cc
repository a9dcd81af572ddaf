#include "cistron/testing/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/testing/random.h"

namespace cistron::testing {
namespace {

constexpr double kU = 0x1p-53;

struct Estimate {
  double value;
  double bound;  // without the analytic gradient's own rounding
};

// `at(s)` is f at distance s along the line.
template <class F>
Estimate Differentiate(F&& at, double h, double noise) {
  const double d1 = (at(h) - at(-h)) / (2 * h);
  const double d2 = (at(2 * h) - at(-2 * h)) / (4 * h);
  const double d4 = (at(4 * h) - at(-4 * h)) / (8 * h);
  const double near = (4 * d1 - d2) / 3;
  const double far = (4 * d2 - d4) / 3;
  return {near, std::abs(near - far) + 1.5 * noise / h};
}

void Require(const std::string& name, const Tensor& x, const Tensor& analytic) {
  CISTRON_CHECK(x && analytic && x.dtype() == DType::kF64 && analytic.dtype() == DType::kF64 &&
                    x.shape() == analytic.shape(),
                "gradient check {}: {} and its gradient {} must be f64 of one shape", name,
                Describe(x), Describe(analytic));
}

}  // namespace

double Inner(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) sum += ElementAsDouble(a, i) * ElementAsDouble(b, i);
  return sum;
}

check::Comparison CheckGradient(const std::string& name, const ScalarFunction& f, const Tensor& x,
                                const Tensor& analytic, const GradientCheckOptions& options) {
  Require(name, x, analytic);
  const std::span<double> values = x.span<double>();
  const std::span<double> gradient = analytic.span<double>();
  const double magnitude = options.magnitude > 0 ? options.magnitude : std::max(1.0, std::abs(f()));
  const double noise = options.roundings * kU * magnitude;

  // All elements, or a draw without order: a repeated one costs time and nothing else.
  const std::int64_t n = x.numel();
  const std::int64_t count = std::min(n, options.max_elements);
  const RandomStream stream(TestSeed(), name);
  const Tensor got = Tensor::Empty({count}, DType::kF64);
  const Tensor expected = Tensor::Empty({count}, DType::kF64);
  std::vector<double> bounds;
  std::vector<std::size_t> indices;
  for (std::int64_t k = 0; k < count; ++k) {
    const auto draw = static_cast<std::uint64_t>(k);
    const std::size_t i = count == n ? draw : stream.Below(draw, static_cast<std::uint64_t>(n));
    const double original = values[i];
    const auto at = [&](double s) {
      values[i] = original + s;
      const double result = f();
      values[i] = original;
      return result;
    };
    const double h =
        options.step *
        std::max(1.0, std::exp2(std::round(std::log2(std::max(1.0, std::abs(original))))));
    const Estimate estimate = Differentiate(at, h, noise);
    got.span<double>()[draw] = gradient[i];
    expected.span<double>()[draw] = estimate.value;
    bounds.push_back(estimate.bound + options.roundings * kU * (std::abs(gradient[i]) + magnitude));
    indices.push_back(i);
  }
  check::Comparison result = check::Compare(
      name, got, expected, [&](std::int64_t k) { return bounds[static_cast<std::size_t>(k)]; });
  if (result.worst_index >= 0) {
    const std::size_t worst = indices[static_cast<std::size_t>(result.worst_index)];
    result.message += fmt::format(" (element {} of {})", worst, Describe(x));
  }
  return result;
}

check::Comparison CheckGradientAlong(const std::string& name, const ScalarFunction& f,
                                     std::span<const Tensor> x, std::span<const Tensor> analytic,
                                     const GradientCheckOptions& options) {
  CISTRON_CHECK(x.size() == analytic.size(), "gradient check {}: {} tensors, {} gradients", name,
                x.size(), analytic.size());
  std::vector<Tensor> original;
  std::vector<Tensor> direction;
  double projected = 0;
  double absolute = 0;
  for (std::size_t k = 0; k < x.size(); ++k) {
    Require(name, x[k], analytic[k]);
    original.push_back(x[k].Clone());
    direction.push_back(Normal(x[k].shape(), DType::kF64, fmt::format("{}.{}", name, k)));
    const std::span<double> v = direction.back().span<double>();
    const std::span<double> g = analytic[k].span<double>();
    for (std::size_t i = 0; i < v.size(); ++i) {
      projected += g[i] * v[i];
      absolute += std::abs(g[i] * v[i]);
    }
  }
  const auto at = [&](double s) {
    for (std::size_t k = 0; k < x.size(); ++k) {
      const std::span<double> values = x[k].span<double>();
      const std::span<double> base = original[k].span<double>();
      const std::span<double> v = direction[k].span<double>();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = base[i] + s * v[i];
    }
    return f();
  };
  const double magnitude = options.magnitude > 0 ? options.magnitude : std::max(1.0, std::abs(f()));
  const double noise = options.roundings * kU * magnitude;
  const Estimate estimate = Differentiate(at, options.step, noise);
  for (std::size_t k = 0; k < x.size(); ++k) Convert(original[k], x[k]);
  return check::Compare(name, Tensor::Scalar(projected), Tensor::Scalar(estimate.value),
                        estimate.bound + options.roundings * kU * (absolute + magnitude));
}

}  // namespace cistron::testing
