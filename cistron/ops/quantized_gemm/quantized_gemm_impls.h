// Implementations of quantized_gemm, for its list in quantized_gemm.cc.
#pragma once

#include "cistron/ops/quantized_gemm/quantized_gemm.h"

namespace cistron::ops::internal {

// Decodes into panels and multiplies those with GemmCpu.
QuantizedGemmImpl CpuQuantizedGemm();

// Scalar reference: f32 sums in the order of the formulas.
QuantizedGemmImpl RefQuantizedGemm();

}  // namespace cistron::ops::internal
