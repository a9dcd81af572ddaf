#include "cistron/ops/check_tensor.h"

namespace cistron::ops {

void CheckTensor(std::string_view op, std::string_view name, const Tensor& t, const Shape& shape,
                 DType dtype) {
  CISTRON_CHECK(t, "{}: {} is not given, expected {} {}", op, name, Name(dtype), ToString(shape));
  CISTRON_CHECK(t.shape() == shape && t.dtype() == dtype, "{}: {} is {}, expected {} {}", op, name,
                Describe(t), Name(dtype), ToString(shape));
  CISTRON_CHECK(t.IsContiguous(), "{}: {} ({}) is not contiguous", op, name, Describe(t));
}

}  // namespace cistron::ops
