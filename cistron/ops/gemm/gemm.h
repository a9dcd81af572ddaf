// gemm: dense matrix product.
//
//   c[M, N] (= or +=) op(a)[M, K] · op(b)[K, N],   op(x) = x or xᵀ
//
// Shapes:  a [M, K] or, transposed, [K, M];  b [K, N] or, transposed, [N, K];  c [M, N].
// Dtypes:  a and b alike, f64, f32 or bf16; c f64 for f64, f32 for f32, bf16 or f32 for bf16. Sums
// are in
//          f32 (f64 for f64); a bf16 result is rounded once, after adding to c in Accumulate.
// Layout:  rows contiguous (last stride 1), any row stride; c must not alias a or b.
// Empty:   M or N = 0 does nothing; K = 0 writes zeros in Write and leaves c in Accumulate.
// Bits:    the same for the same shapes, threads, instruction set and oneDNN. Where the CPU itself
//          multiplies bf16 (AVX-512 BF16), subnormal operands count as zero.
// Signals: no signal handler may run on a thread that computes unless it has a stack of its own
//          (SA_ONSTACK): oneDNN's kernels use the stack pointer as a register, and the handler's
//          frame would land in the heap. Block signals there and wait for them in another thread.
// Errors:  kInvalidArgument with the shapes when they do not fit.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

enum class Transpose { kNo, kYes };

void Gemm(const Context& ctx, const Tensor& a, Transpose trans_a, const Tensor& b,
          Transpose trans_b, const Output& c);

struct GemmProblem {
  DType in_dtype;
  DType out_dtype;
  Transpose trans_a;
  Transpose trans_b;
  std::int64_t m, n, k;
};
struct GemmRun {
  void (*run)(const Context&, const GemmProblem&, const Tensor& a, const Tensor& b,
              const Output& c);
};
using GemmImpl = Implementation<GemmProblem, GemmRun>;
std::span<const GemmImpl> GemmImpls();

}  // namespace cistron::ops
