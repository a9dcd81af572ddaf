#include "cistron/base/dtype.h"

#include <array>

namespace cistron {
namespace {

struct Traits {
  DType dtype;
  std::size_t size;
  std::string_view name;
  std::string_view safetensors;
};

// In the order of the enumeration. Names of safetensors: its format description, field `dtype`.
constexpr std::array<Traits, 10> kTraits = {{
    {DType::kF64, 8, "f64", "F64"},
    {DType::kF32, 4, "f32", "F32"},
    {DType::kBF16, 2, "bf16", "BF16"},
    {DType::kF16, 2, "f16", "F16"},
    {DType::kE4M3, 1, "e4m3", "F8_E4M3"},
    {DType::kE5M2, 1, "e5m2", "F8_E5M2"},
    {DType::kE8M0, 1, "e8m0", "F8_E8M0"},
    {DType::kI64, 8, "i64", "I64"},
    {DType::kI32, 4, "i32", "I32"},
    {DType::kU8, 1, "u8", "U8"},
}};

const Traits& Of(DType dtype) {
  return kTraits[static_cast<std::size_t>(dtype)];
}

}  // namespace

std::size_t SizeOf(DType dtype) {
  return Of(dtype).size;
}
std::string_view Name(DType dtype) {
  return Of(dtype).name;
}
std::string_view SafetensorsName(DType dtype) {
  return Of(dtype).safetensors;
}

std::optional<DType> FromSafetensorsName(std::string_view name) {
  for (const Traits& t : kTraits) {
    if (t.safetensors == name) return t.dtype;
  }
  return std::nullopt;
}

bool IsFloat(DType dtype) {
  return dtype != DType::kI64 && dtype != DType::kI32 && dtype != DType::kU8;
}

DType ComputeType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

}  // namespace cistron
