// A matrix whose rows are further apart than they are long, poison all around: views must work, and
// an op must stay inside them.
#pragma once

#include <gtest/gtest.h>

#include "cistron/tensor/tensor.h"

namespace cistron::testing {

// Columns around the view: an odd number of elements, or whole vectors of 16 bytes.
enum class Margins { kOdd, kAligned };

struct Strided {
  Tensor whole;
  Tensor view;

  // `shape` is that of the view, rank 2; its elements are poisoned too.
  Strided(const Shape& shape, DType dtype, Margins margins = Margins::kOdd);
  explicit Strided(const Tensor& values);

  void Assign(const Tensor& values) const;
  // A contiguous copy of the view.
  Tensor Values() const;
  // Every element outside the first `rows` rows of the view still holds its poison.
  ::testing::AssertionResult UntouchedBeyond(std::int64_t rows) const;
  ::testing::AssertionResult SurroundingsUntouched() const { return UntouchedBeyond(view.dim(0)); }

  Margins margins;
};

}  // namespace cistron::testing
