// Tensor: a typed, strided view of shared storage on a device.
//
// Copies of a Tensor share storage, as in the frameworks that users know; `Clone` copies the data.
// Storage is freed with the last tensor that refers to it. A default-constructed Tensor is
// undefined
// (`!t`), which APIs use for "not given".
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cistron/base/dtype.h"
#include "cistron/tensor/allocator.h"
#include "cistron/tensor/device.h"
#include "cistron/tensor/shape.h"

namespace cistron {

class Tensor {
 public:
  using Strides = std::array<std::int64_t, Shape::kMaxRank>;

  Tensor() = default;

  // Contiguous tensors. Empty leaves the contents undefined.
  static Tensor Empty(const Shape& shape, DType dtype, Allocator& allocator = CpuAllocator());
  static Tensor Zeros(const Shape& shape, DType dtype, Allocator& allocator = CpuAllocator());
  // Copies host values.
  template <class T>
  static Tensor FromSpan(const Shape& shape, std::span<const T> values);
  // A rank-0 f64 tensor: how values that change from step to step reach an op.
  static Tensor Scalar(double value);
  // Wraps memory owned elsewhere, which must outlive every copy of the tensor.
  static Tensor Borrow(void* data, const Shape& shape, DType dtype, Device device = {});

  explicit operator bool() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  // Negative i counts from the last dimension.
  std::int64_t dim(int i) const { return shape_[i < 0 ? i + rank() : i]; }
  // In elements.
  std::int64_t stride(int i) const {
    return strides_[static_cast<std::size_t>(i < 0 ? i + rank() : i)];
  }
  std::int64_t numel() const { return shape_.numel(); }
  std::int64_t bytes() const { return numel() * static_cast<std::int64_t>(SizeOf(dtype_)); }
  bool IsContiguous() const;

  void* raw() const { return data_; }
  // Pointer to the first element; throws when T is not the dtype.
  template <class T>
  T* data() const {
    if (kDTypeOf<T> != dtype_) [[unlikely]]
      ThrowDType(kDTypeOf<T>);
    return static_cast<T*>(data_);
  }
  // All elements of a contiguous host tensor.
  template <class T>
  std::span<T> span() const {
    CheckHostContiguous();
    return {data<T>(), static_cast<std::size_t>(numel())};
  }
  // Value of a one-element tensor of any dtype, as double. On a device it waits for the work
  // before.
  double item() const;

  // Views; they share storage.
  Tensor Reshape(const Shape& shape) const;  // contiguous tensors only
  Tensor Slice(int dim, std::int64_t begin, std::int64_t length) const;
  Tensor Select(std::int64_t index) const;  // t[index]: drops the first dimension

  // Contiguous tensors; the copy is on the same device.
  Tensor Clone() const;
  // This tensor where `device` is its own, else a copy there.
  Tensor To(Device device) const;
  Tensor ToHost() const { return To(Device{}); }

 private:
  [[noreturn]] void ThrowDType(DType asked) const;
  void CheckHostContiguous() const;

  std::shared_ptr<void> storage_;
  void* data_ = nullptr;
  Shape shape_;
  Strides strides_{};
  DType dtype_ = DType::kF32;
  Device device_;
};

// Whether the host can read it.
inline bool OnHost(const Tensor& t) {
  return t.device().type == DeviceType::kCpu;
}

// "f32 [8, 128]", for messages.
std::string Describe(const Tensor& t);

// Copies between contiguous tensors of equal shape and dtype, on any devices, in the order of the
// device's stream; the host may use its side when this returns.
void CopyTo(const Tensor& from, const Tensor& to);

// Helpers on contiguous tensors. Those of other devices are converted and poisoned on the host and
// copied: for setting up and reading out, not for a step.
void FillZero(const Tensor& t);
// Every float element becomes NaN, every integer element its largest value: poison for tests.
void FillPoison(const Tensor& t);
// Element-wise conversion between tensors of equal shape, rounded once (RNE; FP8 saturates). To an
// integer type fractions are cut; a value that does not fit is an error.
void Convert(const Tensor& from, const Tensor& to);
Tensor ConvertTo(const Tensor& from, DType dtype);
// Element i of a contiguous float or integer tensor as double.
double ElementAsDouble(const Tensor& t, std::int64_t i);

template <class T>
Tensor Tensor::FromSpan(const Shape& shape, std::span<const T> values) {
  CISTRON_CHECK(shape.numel() == static_cast<std::int64_t>(values.size()),
                "Tensor::FromSpan: {} values do not fill shape {}", values.size(), ToString(shape));
  Tensor t = Empty(shape, kDTypeOf<T>);
  std::copy(values.begin(), values.end(), t.data<T>());
  return t;
}

}  // namespace cistron
