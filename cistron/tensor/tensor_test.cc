#include "cistron/tensor/tensor.h"

#include <gtest/gtest.h>

namespace cistron {
namespace {

TEST(Tensor, SliceSharesStorage) {
  const Tensor t = Tensor::Zeros({4, 8}, DType::kF32);
  const Tensor s = t.Slice(1, 2, 3);
  EXPECT_FALSE(s.IsContiguous());
  s.data<float>()[s.stride(0)] = 1.0f;
  EXPECT_EQ(ElementAsDouble(t, 10), 1.0);
}

}  // namespace
}  // namespace cistron
