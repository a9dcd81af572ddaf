// Argument checks that every op makes of its tensors.
#pragma once

#include <string_view>

#include "cistron/tensor/tensor.h"

namespace cistron::ops {

// Throws kInvalidArgument, naming op and argument, unless `t` is a contiguous tensor of that shape
// and dtype.
void CheckTensor(std::string_view op, std::string_view name, const Tensor& t, const Shape& shape,
                 DType dtype);

// The same for a matrix [rows, width] with contiguous rows, any row stride.
void CheckMatrix(std::string_view op, std::string_view name, const Tensor& t, std::int64_t rows,
                 std::int64_t width, DType dtype);
// The same for one value a row, [rows].
void CheckRowValues(std::string_view op, std::string_view name, const Tensor& t, std::int64_t rows,
                    DType dtype);

}  // namespace cistron::ops
