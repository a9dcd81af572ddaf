// Element types of tensors and files.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "cistron/base/error.h"
#include "cistron/base/float_types.h"

namespace cistron {

enum class DType : std::uint8_t { kF64, kF32, kBF16, kF16, kE4M3, kE5M2, kE8M0, kI64, kI32, kU8 };

// Bytes of one element.
std::size_t SizeOf(DType dtype);

// Short name, "f32", as used in messages, configs and support matrices.
std::string_view Name(DType dtype);

// The name in a safetensors header ("F32"), and back; nothing for a name we do not read.
std::string_view SafetensorsName(DType dtype);
std::optional<DType> FromSafetensorsName(std::string_view name);

bool IsFloat(DType dtype);

// Type in which an op computes and in which it keeps statistics and gradients of weights:
// f64 for f64, f32 for every other floating type.
DType ComputeType(DType dtype);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<e4m3> {
  static constexpr DType value = DType::kE4M3;
};
template <>
struct DTypeOf<e5m2> {
  static constexpr DType value = DType::kE5M2;
};
template <>
struct DTypeOf<e8m0> {
  static constexpr DType value = DType::kE8M0;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <class T>
inline constexpr DType kDTypeOf = DTypeOf<T>::value;

// The C++ type in which values of T are computed: double for double, float otherwise.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

template <class T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) for the model dtypes f64, f32 and bf16; throws for others, naming `op`.
template <class F>
decltype(auto) DispatchFloat(std::string_view op, DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64: return f(TypeTag<double>{});
    case DType::kF32: return f(TypeTag<float>{});
    case DType::kBF16: return f(TypeTag<bf16>{});
    default: break;
  }
  CISTRON_THROW(kUnsupported, "{}: dtype {} is not one of f64, f32, bf16", op, Name(dtype));
}

}  // namespace cistron
