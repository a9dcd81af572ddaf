#include "cistron/check/bounds.h"

#include <cmath>
#include <limits>

namespace cistron::check {
namespace {

double SmallestSubnormal(DType dtype) {
  switch (dtype) {
    case DType::kF64: return std::numeric_limits<double>::denorm_min();
    case DType::kF32: return 0x1p-149;
    case DType::kBF16: return 0x1p-133;
    case DType::kF16: return 0x1p-24;
    case DType::kE4M3: return 0x1p-9;
    case DType::kE5M2: return 0x1p-16;
    default: return 0;
  }
}

}  // namespace

double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 0x1p-53;
    case DType::kF32: return 0x1p-24;
    case DType::kBF16: return 0x1p-8;
    case DType::kF16: return 0x1p-11;
    case DType::kE4M3: return 0x1p-4;
    case DType::kE5M2: return 0x1p-3;
    default: break;
  }
  CISTRON_THROW(kInvalidArgument, "UnitRoundoff: {} has no rounding", Name(dtype));
}

double Gamma(std::int64_t n, DType dtype) {
  const double nu = static_cast<double>(n) * UnitRoundoff(dtype);
  CISTRON_CHECK(nu < 1, "Gamma: {} roundings in {} have no bound", n, Name(dtype));
  return nu / (1 - nu);
}

double DotBound(std::int64_t terms, double abs_sum, DType accumulator, DType output) {
  const double gamma = Gamma(terms, accumulator);
  const double rounding = output == accumulator ? 0.0 : UnitRoundoff(output) * (1 + gamma);
  return (gamma + rounding) * abs_sum + SmallestSubnormal(output) / 2 +
         static_cast<double>(terms) * SmallestSubnormal(accumulator);
}

}  // namespace cistron::check
