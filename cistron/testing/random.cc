#include "cistron/testing/random.h"

#include <string>

#include "cistron/base/env.h"
#include "cistron/base/philox.h"

namespace cistron::testing {
namespace {

template <class F>
void FillFloat(const Tensor& t, F&& value) {
  const Tensor wide = Tensor::Empty(t.shape(), DType::kF64);
  const std::span<double> out = wide.span<double>();
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = value(i);
  Convert(wide, t);
}

}  // namespace

std::uint64_t TestSeed() {
  static const std::uint64_t seed = [] {
    const auto text = GetEnv("CISTRON_TEST_SEED");
    return text ? std::stoull(*text) : 20250604u;
  }();
  return seed;
}

void FillNormal(const Tensor& t, std::string_view name, double std, double mean) {
  const RandomStream stream(TestSeed(), name);
  FillFloat(t, [&](std::uint64_t i) { return mean + std * stream.Normal(i); });
}

void FillUniform(const Tensor& t, std::string_view name, double low, double high) {
  const RandomStream stream(TestSeed(), name);
  FillFloat(t, [&](std::uint64_t i) { return low + (high - low) * double{stream.Uniform(i)}; });
}

void FillIntegers(const Tensor& t, std::string_view name, std::int64_t low, std::int64_t high) {
  CISTRON_CHECK(low < high, "FillIntegers: [{}, {}) is empty", low, high);
  const RandomStream stream(TestSeed(), name);
  const Tensor wide = Tensor::Empty(t.shape(), DType::kI64);
  const std::span<std::int64_t> out = wide.span<std::int64_t>();
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] =
        low + static_cast<std::int64_t>(stream.Below(i, static_cast<std::uint64_t>(high - low)));
  }
  Convert(wide, t);
}

Tensor Normal(const Shape& shape, DType dtype, std::string_view name, double std) {
  Tensor t = Tensor::Empty(shape, dtype);
  FillNormal(t, name, std);
  return t;
}

Tensor Uniform(const Shape& shape, DType dtype, std::string_view name, double low, double high) {
  Tensor t = Tensor::Empty(shape, dtype);
  FillUniform(t, name, low, high);
  return t;
}

Tensor RandomSplit(std::int64_t groups, std::int64_t rows, std::string_view name) {
  CISTRON_CHECK(groups >= 1 && rows >= 0, "RandomSplit: {} rows over {} groups", rows, groups);
  const RandomStream stream(TestSeed(), name);
  Tensor split = Tensor::Zeros({groups}, DType::kI64);
  const std::span<std::int64_t> counts = split.span<std::int64_t>();
  // The product of two uniforms favours low groups; one group in four receives nothing.
  const std::int64_t empty = groups >= 4 ? 1 + static_cast<std::int64_t>(stream.Below(0, 4)) : 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto i = static_cast<std::uint64_t>(row);
    const auto bound = static_cast<std::uint64_t>(groups);
    std::uint64_t group = stream.Below(2 * i + 1, 1 + stream.Below(2 * i + 2, bound));
    if (empty != 0 && static_cast<std::int64_t>(group % 4) == empty - 1)
      group = (group + 1) % bound;
    ++counts[group];
  }
  return split;
}

}  // namespace cistron::testing
