#include "cistron/tensor/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "cistron/base/threads.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron {

std::string ToString(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Shape::Shape(std::initializer_list<std::int64_t> dims)
    : Shape(std::span<const std::int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const std::int64_t> dims) {
  CISTRON_CHECK(dims.size() <= kMaxRank, "Shape: {} dimensions, at most {} are supported",
                dims.size(), static_cast<int>(kMaxRank));
  rank_ = static_cast<int>(dims.size());
  std::copy(dims.begin(), dims.end(), dims_.begin());
  Validate();
}

void Shape::Validate() const {
  std::int64_t product = 1;
  bool zero = false;
  for (const std::int64_t d : *this) {
    CISTRON_CHECK(d >= 0, "Shape: dimension {} is negative", d);
    zero = zero || d == 0;
    if (d != 0) {
      CISTRON_CHECK(!__builtin_mul_overflow(product, d, &product),
                    "Shape: the product of the dimensions exceeds 2^63 - 1");
    }
  }
}

std::int64_t Shape::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t d : *this) product *= d;
  return product;
}

bool operator==(const Shape& a, const Shape& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

std::string ToString(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

namespace {

Tensor::Strides ContiguousStrides(const Shape& shape) {
  Tensor::Strides strides{};
  std::int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[static_cast<std::size_t>(i)] = step;
    step *= shape[i];
  }
  return strides;
}

// One element, rounded once.
template <class T, class F>
T ConvertElement(F value) {
  if constexpr (std::is_same_v<T, F>) {
    return value;
  } else if constexpr (std::is_integral_v<T>) {
    // Through fp64, which holds every float, i32 and u8 value; i64 only narrows.
    if constexpr (std::is_integral_v<F>) {
      CISTRON_CHECK(std::in_range<T>(value), "Convert: {} does not fit {}", value,
                    Name(kDTypeOf<T>));
    } else {
      const double wide = static_cast<double>(static_cast<Compute<F>>(value));
      // 2^63 is no i64; the largest double below it is.
      CISTRON_CHECK(wide >= static_cast<double>(std::numeric_limits<T>::min()) &&
                        wide < static_cast<double>(std::numeric_limits<T>::max()) + 1.0,
                    "Convert: {} does not fit {}", wide, Name(kDTypeOf<T>));
      return static_cast<T>(wide);
    }
    return static_cast<T>(value);
  } else if constexpr (std::is_arithmetic_v<T> && std::is_arithmetic_v<F>) {
    return static_cast<T>(value);
  } else if constexpr (std::is_same_v<F, double> || std::is_integral_v<F>) {
    return T(internal::RoundToOdd(static_cast<double>(value)));
  } else {
    return T(static_cast<float>(value));
  }
}

// Calls f with a tag of the element type, for every dtype.
template <class F>
decltype(auto) DispatchAny(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64: return f(TypeTag<double>{});
    case DType::kF32: return f(TypeTag<float>{});
    case DType::kBF16: return f(TypeTag<bf16>{});
    case DType::kF16: return f(TypeTag<f16>{});
    case DType::kE4M3: return f(TypeTag<e4m3>{});
    case DType::kE5M2: return f(TypeTag<e5m2>{});
    case DType::kE8M0: return f(TypeTag<e8m0>{});
    case DType::kI64: return f(TypeTag<std::int64_t>{});
    case DType::kI32: return f(TypeTag<std::int32_t>{});
    case DType::kU8: break;
  }
  return f(TypeTag<std::uint8_t>{});
}

Allocator& AllocatorOf(Device device) {
  return device.type == DeviceType::kCpu ? CpuAllocator() : cuda::DeviceAllocator(device.index);
}

}  // namespace

Tensor Tensor::Empty(const Shape& shape, DType dtype, Allocator& allocator) {
  Tensor t;
  t.shape_ = shape;
  t.strides_ = ContiguousStrides(shape);
  t.dtype_ = dtype;
  t.device_ = allocator.device();
  std::int64_t bytes = 0;
  CISTRON_CHECK(
      !__builtin_mul_overflow(shape.numel(), static_cast<std::int64_t>(SizeOf(dtype)), &bytes),
      "Tensor: shape {} of {} exceeds 2^63 - 1 bytes", ToString(shape), Name(dtype));
  // A tensor without elements still has an address, so that it counts as defined.
  const std::size_t size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* data = allocator.Allocate(size);
  t.storage_ = std::shared_ptr<void>(
      data, [&allocator, size](void* pointer) { allocator.Deallocate(pointer, size); });
  t.data_ = data;
  return t;
}

Tensor Tensor::Zeros(const Shape& shape, DType dtype, Allocator& allocator) {
  Tensor t = Empty(shape, dtype, allocator);
  FillZero(t);
  return t;
}

Tensor Tensor::Scalar(double value) {
  Tensor t = Empty(Shape{}, DType::kF64);
  *t.data<double>() = value;
  return t;
}

Tensor Tensor::Borrow(void* data, const Shape& shape, DType dtype, Device device) {
  Tensor t;
  t.shape_ = shape;
  t.strides_ = ContiguousStrides(shape);
  t.dtype_ = dtype;
  t.device_ = device;
  t.data_ = data;
  return t;
}

bool Tensor::IsContiguous() const {
  if (numel() == 0) return true;
  std::int64_t dense = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && stride(i) != dense) return false;
    dense *= shape_[i];
  }
  return true;
}

double Tensor::item() const {
  CISTRON_CHECK(numel() == 1, "Tensor::item: {} does not have exactly one element",
                Describe(*this));
  return ElementAsDouble(ToHost(), 0);
}

Tensor Tensor::Reshape(const Shape& shape) const {
  CISTRON_CHECK(shape.numel() == numel(), "Tensor::Reshape: {} does not have the elements of {}",
                ToString(shape), Describe(*this));
  CISTRON_CHECK(IsContiguous(), "Tensor::Reshape: the {} view is not contiguous", Describe(*this));
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = ContiguousStrides(shape);
  return t;
}

Tensor Tensor::Slice(int dim, std::int64_t begin, std::int64_t length) const {
  const int d = dim < 0 ? dim + rank() : dim;
  CISTRON_CHECK(d >= 0 && d < rank(), "Tensor::Slice: dimension {} of {}", dim, Describe(*this));
  CISTRON_CHECK(begin >= 0 && length >= 0 && begin <= shape_[d] - length,
                "Tensor::Slice: [{}, {} + {}) is outside dimension {} of {}", begin, begin, length,
                d, Describe(*this));
  Tensor t = *this;
  t.shape_[d] = length;
  t.data_ =
      static_cast<char*>(data_) + begin * stride(d) * static_cast<std::int64_t>(SizeOf(dtype_));
  return t;
}

Tensor Tensor::Select(std::int64_t index) const {
  CISTRON_CHECK(rank() >= 1, "Tensor::Select: a scalar has no dimension to select from");
  const Tensor row = Slice(0, index, 1);
  Tensor t = row;
  t.shape_ = Shape(std::span(shape_.begin() + 1, shape_.end()));
  std::copy(strides_.begin() + 1, strides_.end(), t.strides_.begin());
  return t;
}

Tensor Tensor::Clone() const {
  Tensor t = Empty(shape_, dtype_, AllocatorOf(device_));
  CopyTo(*this, t);
  return t;
}

Tensor Tensor::To(Device device) const {
  if (device == device_ || data_ == nullptr) return *this;
  Tensor t = Empty(shape_, dtype_, AllocatorOf(device));
  CopyTo(*this, t);
  return t;
}

void Tensor::ThrowDType(DType asked) const {
  CISTRON_THROW(kInvalidArgument, "Tensor: data<{}>() of a {} tensor", Name(asked),
                Describe(*this));
}

void Tensor::CheckHostContiguous() const {
  CISTRON_CHECK(device_.type == DeviceType::kCpu, "Tensor: {} is not in host memory",
                Describe(*this));
  CISTRON_CHECK(IsContiguous(), "Tensor: the {} view is not contiguous", Describe(*this));
}

std::string Describe(const Tensor& t) {
  if (!t) return "an undefined tensor";
  return fmt::format("{} {}", Name(t.dtype()), ToString(t.shape()));
}

void CopyTo(const Tensor& from, const Tensor& to) {
  CISTRON_CHECK(from.shape() == to.shape() && from.dtype() == to.dtype(),
                "CopyTo: {} does not fit {}", Describe(from), Describe(to));
  CISTRON_CHECK(from.IsContiguous() && to.IsContiguous(), "CopyTo: the {} view is not contiguous",
                Describe(from));
  const auto bytes = static_cast<std::size_t>(from.bytes());
  if (OnHost(from) && OnHost(to)) {
    if (bytes > 0) std::memcpy(to.raw(), from.raw(), bytes);
  } else {
    cuda::Copy(to.raw(), to.device(), from.raw(), from.device(), bytes);
  }
}

void FillZero(const Tensor& t) {
  CISTRON_CHECK(t.IsContiguous(), "FillZero: the {} view is not contiguous", Describe(t));
  if (!OnHost(t)) {
    return cuda::FillBytes(t.raw(), t.device(), 0, static_cast<std::size_t>(t.bytes()));
  }
  char* p = static_cast<char*>(t.raw());
  ParallelChunks(t.bytes(), 1 << 20, [p](std::int64_t begin, std::int64_t end, int) {
    std::memset(p + begin, 0, static_cast<std::size_t>(end - begin));
  });
}

void FillPoison(const Tensor& t) {
  if (!OnHost(t)) {
    const Tensor host = Tensor::Empty(t.shape(), t.dtype());
    FillPoison(host);
    return CopyTo(host, t);
  }
  DispatchAny(t.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (T& v : t.span<T>()) {
      if constexpr (std::is_same_v<T, e8m0>) {
        v = e8m0::FromBits(0xff);
      } else if constexpr (std::is_integral_v<T>) {
        v = std::numeric_limits<T>::max();
      } else {
        v = T(std::numeric_limits<float>::quiet_NaN());
      }
    }
  });
}

void Convert(const Tensor& from, const Tensor& to) {
  CISTRON_CHECK(from.shape() == to.shape(), "Convert: {} to {}", Describe(from), Describe(to));
  if (from.dtype() == to.dtype() && (!OnHost(from) || !OnHost(to))) return CopyTo(from, to);
  if (!OnHost(from)) return Convert(from.ToHost(), to);
  if (!OnHost(to)) return CopyTo(ConvertTo(from, to.dtype()), to);
  DispatchAny(from.dtype(), [&](auto from_tag) {
    using F = typename decltype(from_tag)::type;
    DispatchAny(to.dtype(), [&](auto to_tag) {
      using T = typename decltype(to_tag)::type;
      if constexpr (std::is_same_v<T, e8m0> && !std::is_same_v<F, e8m0>) {
        CISTRON_THROW(kInvalidArgument, "Convert: to e8m0 needs a rounding rule; see quantize");
      } else {
        const std::span<F> x = from.span<F>();
        const std::span<T> y = to.span<T>();
        ParallelFor(from.numel(), 1 << 15, [&](std::int64_t i) {
          const std::size_t j = static_cast<std::size_t>(i);
          y[j] = ConvertElement<T>(x[j]);
        });
      }
    });
  });
}

Tensor ConvertTo(const Tensor& from, DType dtype) {
  Tensor to = Tensor::Empty(from.shape(), dtype, AllocatorOf(from.device()));
  Convert(from, to);
  return to;
}

double ElementAsDouble(const Tensor& t, std::int64_t i) {
  return DispatchAny(t.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T v = t.span<T>()[static_cast<std::size_t>(i)];
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<double>(v);
    } else {
      return static_cast<double>(static_cast<float>(v));
    }
  });
}

}  // namespace cistron
