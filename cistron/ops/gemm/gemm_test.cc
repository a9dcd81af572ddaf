#include "cistron/ops/gemm/gemm.h"

#include <gtest/gtest.h>

namespace cistron::ops {
namespace {

TEST(Gemm, SmallExact) {
  const Context ctx;
  const float a[] = {1, 2, 3, 4, 5, 6};
  const float b[] = {1, 0, 2, 0, 1, 3};
  for (const char* impl : {"cpu", "ref"}) {
    const Tensor c = ctx.Zeros({2, 2}, DType::kF32);
    Gemm(ctx.WithImpl(impl), Tensor::FromSpan<float>({2, 3}, a), Transpose::kNo,
         Tensor::FromSpan<float>({2, 3}, b), Transpose::kYes, Write(c));
    EXPECT_EQ(ElementAsDouble(c, 0), 7);
    EXPECT_EQ(ElementAsDouble(c, 1), 11);
    EXPECT_EQ(ElementAsDouble(c, 2), 16);
    EXPECT_EQ(ElementAsDouble(c, 3), 23);
  }
}

}  // namespace
}  // namespace cistron::ops
