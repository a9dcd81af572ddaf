// Poisoned buffers: memory around a result that an op must neither read into it nor write.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "cistron/check/compare.h"
#include "cistron/tensor/tensor.h"

namespace cistron::testing {

// A buffer of more rows than are used, every element poisoned (FillPoison); `used` views the first
// rows.
struct PaddedTensor {
  Tensor whole;
  Tensor used;
  Tensor tail;
};
// `shape` is that of `used`; the tail adds `extra_rows` ≥ 1 to the first dimension.
PaddedTensor MakePadded(const Shape& shape, DType dtype, std::int64_t extra_rows,
                        Allocator& allocator = CpuAllocator());

// As MakePadded, with `values` copied into the used rows.
PaddedTensor Pad(const Tensor& values, std::int64_t extra_rows,
                 Allocator& allocator = CpuAllocator());

// Every element still holds FillPoison's bits.
::testing::AssertionResult IsPoisoned(const Tensor& t);

// No element is NaN or Inf. Integers always pass.
::testing::AssertionResult IsFinite(const Tensor& t);

// A comparison as gtest wants it: EXPECT_TRUE(Agrees(Compare(…))).
::testing::AssertionResult Agrees(const check::Comparison& comparison);

}  // namespace cistron::testing
