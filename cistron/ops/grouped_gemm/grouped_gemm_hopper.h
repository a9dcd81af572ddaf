// grouped_gemm on Hopper (sm_90a): bf16 operands, f32 sums, bf16 or f32 results.
//
// grouped_gemm.h has the formulas. Counts stay on the device: nothing here waits, allocates or
// reads them on the host, so a launch can be captured in a graph. Results do not depend on
// scheduling: two runs are bitwise equal. Counts are clamped to what the rows hold; the caller
// checks them where it can.
#pragma once

#include <cstdint>

#include "cistron/ops/grouped_gemm/grouped_gemm.h"

namespace cistron::ops::internal {

// All pointers are device memory. Operands in the order of the formulas:
//   kForward  a = x  [max_rows, k]  b = w [groups, n, k]  c = y  [max_rows, n]
//   kDgrad    a = dy [max_rows, n]  b = w [groups, n, k]  c = dx [max_rows, k]
//   kWgrad    a = dy [max_rows, n]  b = x [max_rows, k]   c = dw [groups, n, k]
// c overlaps neither a nor b.
struct HopperGroupedGemm {
  GroupedGemmKind kind = GroupedGemmKind::kForward;
  DType out_dtype = DType::kBF16;  // kBF16 or kF32
  bool accumulate = false;         // c += instead of c =; a bf16 sum is rounded once
  std::int64_t groups = 0, max_rows = 0, n = 0, k = 0;
  // Distance of rows in elements; 0 means packed. Groups of weights follow each other without gaps.
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  // Of kWgrad that does not accumulate: HopperSquareSums partial sums of the squares of what c then
  // holds. Null: not wanted.
  double* square_sums = nullptr;
  const std::int64_t* split_sizes = nullptr;  // [groups]; neither a, b nor c covers it
  // HopperGroupedGemmWorkspace bytes aligned to 16, with anything in them, not shared with a launch
  // that may run at the same time. Null: same results, more memory traffic.
  void* workspace = nullptr;
  void* stream = nullptr;  // cudaStream_t
};

// Whether the kernel runs a problem, or why not: the copy engine wants rows and pointers aligned to
// 16 bytes. Null pointers are not looked at, so a problem can be asked about before it has any.
Support HopperGroupedGemmSupports(const HopperGroupedGemm& gemm);

// Bytes of device memory that a launch needs until it has finished.
std::int64_t HopperGroupedGemmWorkspace(const HopperGroupedGemm& gemm);

// How many partial sums of squares a weight gradient has.
std::int64_t HopperSquareSums(const HopperGroupedGemm& gemm);

// Enqueues the product on the stream. Throws kUnsupported with Supports' reason, kInternal when the
// driver refuses.
void LaunchHopperGroupedGemm(const HopperGroupedGemm& gemm);

}  // namespace cistron::ops::internal
