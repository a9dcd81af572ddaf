#include "cistron/testing/strided.h"

#include "cistron/testing/poison.h"

namespace cistron::testing {
namespace {

constexpr std::int64_t kRowBefore = 1, kMoreRows = 2;

// Columns before the view, and more than its own in all.
struct Columns {
  std::int64_t before, more;
};
Columns ColumnsOf(Margins margins) {
  return margins == Margins::kAligned ? Columns{16, 32} : Columns{2, 5};
}

Tensor Inside(const Tensor& whole, const Shape& shape, Margins margins) {
  return whole.Slice(0, kRowBefore, shape[0]).Slice(1, ColumnsOf(margins).before, shape[1]);
}

}  // namespace

Strided::Strided(const Shape& shape, DType dtype, Margins m) : margins(m) {
  whole = Tensor::Empty({shape[0] + kMoreRows, shape[1] + ColumnsOf(margins).more}, dtype);
  FillPoison(whole);
  view = Inside(whole, shape, margins);
}

Strided::Strided(const Tensor& values) : Strided(values.shape(), values.dtype()) {
  Assign(values);
}

void Strided::Assign(const Tensor& values) const {
  for (std::int64_t i = 0; i < values.dim(0); ++i) Convert(values.Select(i), view.Select(i));
}

Tensor Strided::Values() const {
  Tensor values = Tensor::Empty(view.shape(), view.dtype());
  for (std::int64_t i = 0; i < view.dim(0); ++i) Convert(view.Select(i), values.Select(i));
  return values;
}

::testing::AssertionResult Strided::UntouchedBeyond(std::int64_t rows) const {
  const Tensor copy = whole.Clone();
  const Tensor inside = Inside(copy, view.shape(), margins);
  for (std::int64_t i = 0; i < rows; ++i) FillPoison(inside.Select(i));
  return IsPoisoned(copy);
}

}  // namespace cistron::testing
