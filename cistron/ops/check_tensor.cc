#include "cistron/ops/check_tensor.h"

namespace cistron::ops {

void CheckTensor(std::string_view op, std::string_view name, const Tensor& t, const Shape& shape,
                 DType dtype) {
  CISTRON_CHECK(t, "{}: {} is not given, expected {} {}", op, name, Name(dtype), ToString(shape));
  CISTRON_CHECK(t.shape() == shape && t.dtype() == dtype, "{}: {} is {}, expected {} {}", op, name,
                Describe(t), Name(dtype), ToString(shape));
  CISTRON_CHECK(t.IsContiguous(), "{}: {} ({}) is not contiguous", op, name, Describe(t));
}

void CheckMatrix(std::string_view op, std::string_view name, const Tensor& t, std::int64_t rows,
                 std::int64_t width, DType dtype) {
  CISTRON_CHECK(t && t.rank() == 2 && t.dim(0) == rows && t.dim(1) == width && t.dtype() == dtype,
                "{}: {} is {}, expected {} [{}, {}]", op, name, Describe(t), Name(dtype), rows,
                width);
  CISTRON_CHECK(width <= 1 || t.stride(1) == 1,
                "{}: the rows of {} are not contiguous: the last stride is {}", op, name,
                t.stride(1));
}

void CheckRowValues(std::string_view op, std::string_view name, const Tensor& t, std::int64_t rows,
                    DType dtype) {
  CISTRON_CHECK(t.rank() == 1 && t.dim(0) == rows && t.dtype() == dtype && t.IsContiguous(),
                "{}: {} is {}, expected {} [{}]", op, name, Describe(t), Name(dtype), rows);
}

}  // namespace cistron::ops
