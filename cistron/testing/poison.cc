#include "cistron/testing/poison.h"

#include <cmath>
#include <cstring>

namespace cistron::testing {

PaddedTensor MakePadded(const Shape& shape, DType dtype, std::int64_t extra_rows,
                        Allocator& allocator) {
  CISTRON_CHECK(shape.rank() >= 1 && extra_rows >= 1, "MakePadded: {} with {} more rows",
                ToString(shape), extra_rows);
  Shape padded = shape;
  padded[0] += extra_rows;
  PaddedTensor result;
  result.whole = Tensor::Empty(padded, dtype, allocator);
  FillPoison(result.whole);
  result.used = result.whole.Slice(0, 0, shape[0]);
  result.tail = result.whole.Slice(0, shape[0], extra_rows);
  return result;
}

PaddedTensor Pad(const Tensor& values, std::int64_t extra_rows, Allocator& allocator) {
  PaddedTensor result = MakePadded(values.shape(), values.dtype(), extra_rows, allocator);
  Convert(values, result.used);
  return result;
}

::testing::AssertionResult IsPoisoned(const Tensor& t) {
  const Tensor poison = Tensor::Empty(t.shape(), t.dtype());
  FillPoison(poison);
  return Agrees(check::CompareBitwise("poison", t, poison));
}

::testing::AssertionResult IsFinite(const Tensor& t) {
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const double v = ElementAsDouble(t, i);
    if (!std::isfinite(v)) {
      return ::testing::AssertionFailure() << Describe(t) << ": element " << i << " is " << v;
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult Agrees(const check::Comparison& comparison) {
  return (comparison ? ::testing::AssertionSuccess() : ::testing::AssertionFailure())
         << comparison.message;
}

}  // namespace cistron::testing
