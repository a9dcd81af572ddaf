// The end of a product: f32 sums scaled and written.
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

// to[j] (= or +=) sums[j] · scale_a · scale_b, rounded to the type of the result once.
void ScaleSums(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
               float* to);
void ScaleSums(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
               bf16* to);

}  // namespace cistron::ops::internal
