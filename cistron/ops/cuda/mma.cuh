// Instructions of compute capability 8.0 and later that CUDA C++ has no names for: the warp's
// matrix product of bf16 and its fragments from shared memory.
//
// One function an instruction; the PTX ISA has the rules ("mma.m16n8k16", "ldmatrix"). Lane l of a
// warp has, with g = l / 4 and t = l % 4:
//   of a result 16 × 8:    rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t + 1;
//   of operand a 16 × 16:  rows g, g + 8, g, g + 8; columns 2t, 2t + 1 (0, 1) and those + 8 (2, 3);
//   of operand b 16 × 8:   column g; rows 2t, 2t + 1 (0) and those + 8 (1).
#pragma once

#include <cstdint>

#include "cistron/ops/cuda/shared_memory.cuh"

namespace cistron::mma {

using shared_memory::CopyAsync16;
using shared_memory::CopyAsync4;
using shared_memory::SharedAddress;
using shared_memory::WaitCopies;

// ---- matrices

// Four 8 × 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8,
// 16 bytes. Lane 4·r + c gets elements 2c and 2c + 1 of row r of each.
__device__ __forceinline__ void LoadMatrices(std::uint32_t (&to)[4], std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address)
               : "memory");
}
// As LoadMatrices; each matrix is transposed on the way.
__device__ __forceinline__ void LoadTransposed(std::uint32_t (&to)[4], std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address)
               : "memory");
}

// sums += a · b, sums in f32.
__device__ __forceinline__ void Multiply(float (&sums)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values rounded to bf16 (to nearest even), the first in the low half.
__device__ __forceinline__ std::uint32_t PackBf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// ---- numbers

// 2^x to 2 ulp, subnormal results are 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cistron::mma
