// gemm on oneDNN's plain products, which create no primitive: a training step brings new shapes all
// the time (rows of an expert), and a primitive for each would cost more than its product.
//
// f32 runs as it is. bf16 runs natively where the CPU multiplies bf16; elsewhere both operands are
// widened to f32, which is exact. Called inside a parallel loop, a product runs on the calling
// thread alone.
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cstring>

#include "cistron/base/threads.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/transpose.h"
#include "cistron/ops/quantized_gemm/scale_sums.h"

// Exported by oneDNN 2.x beside dnnl_sgemm, though its public header leaves it out. Weak, so that a
// build of oneDNN without it still links and widens instead.
extern "C" [[gnu::weak]] dnnl_status_t dnnl_gemm_bf16bf16f32(char trans_a, char trans_b,
                                                             dnnl_dim_t m, dnnl_dim_t n,
                                                             dnnl_dim_t k, float alpha,
                                                             const std::uint16_t* a, dnnl_dim_t lda,
                                                             const std::uint16_t* b, dnnl_dim_t ldb,
                                                             float beta, float* c, dnnl_dim_t ldc);

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kGrain = 1 << 15;  // elements a thread converts at least

char Letter(Transpose transpose) {
  return transpose == Transpose::kYes ? 'T' : 'N';
}

void CheckStatus(dnnl_status_t status, const GemmProblem& p) {
  CISTRON_INVARIANT(status == dnnl_success,
                    "gemm: oneDNN refused the product {} x {} x {}, status {}", p.m, p.n, p.k,
                    static_cast<int>(status));
}

// Distance of rows for oneDNN, which wants at least a row's length even of a single row.
std::int64_t Leading(const Tensor& t) {
  return std::max({t.stride(0), t.dim(1), std::int64_t{1}});
}

// oneDNN does not read c when beta is 0.
void Sgemm(const GemmProblem& p, const Tensor& a, const Tensor& b, Transpose trans_b,
           const Tensor& c, float beta) {
  CheckStatus(
      dnnl_sgemm(Letter(p.trans_a), Letter(trans_b), p.m, p.n, p.k, 1.0f, a.data<float>(),
                 Leading(a), b.data<float>(), Leading(b), beta, c.data<float>(), Leading(c)),
      p);
}

// oneDNN is slower with a transposed b (a weight [N, K], as every forward pass has it) by up to a
// tenth, on AVX2 and on AVX-512. Where b is used by enough rows and a copy that is not transposed
// stays in the cache, the copy costs less. Its rows are a cache line longer than they need be: at a
// power of two they would compete for the same lines.
constexpr std::int64_t kRowsWorthTransposing = 96;
constexpr std::int64_t kMaxTransposed = 1 << 18;  // elements: 1 MiB
constexpr std::int64_t kPadding = 16;

Tensor Transposed(const Context& ctx, const Tensor& b) {
  const std::int64_t rows = b.dim(0), cols = b.dim(1);
  const Tensor copy = ctx.Empty({cols, rows + kPadding}, DType::kF32).Slice(1, 0, rows);
  const float* from = b.data<float>();
  float* to = copy.data<float>();
  ParallelChunks(cols, 1 + kGrain / (rows + 1), [&](std::int64_t begin, std::int64_t end, int) {
    TransposeF32(from + begin, b.stride(0), rows, end - begin, to + begin * copy.stride(0),
                 copy.stride(0));
  });
  return copy;
}

void ProductF32(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
                const Tensor& c, float beta) {
  if (p.trans_b == Transpose::kYes && p.m >= kRowsWorthTransposing && p.n * p.k <= kMaxTransposed) {
    Sgemm(p, a, Transposed(ctx, b), Transpose::kNo, c, beta);
  } else {
    Sgemm(p, a, b, p.trans_b, c, beta);
  }
}

// A dense f32 copy of a bf16 matrix.
Tensor Widen(const Context& ctx, const Tensor& t) {
  Tensor wide = ctx.Empty(t.shape(), DType::kF32);
  const std::int64_t cols = t.dim(1);
  ParallelFor(t.dim(0), 1 + kGrain / (cols + 1), [&](std::int64_t i) {
    const bf16* from = t.data<bf16>() + i * t.stride(0);
    float* to = wide.data<float>() + i * cols;
    for (std::int64_t j = 0; j < cols; ++j) to[j] = static_cast<float>(from[j]);
  });
  return wide;
}

// bf16 operands, f32 result.
void ProductBf16(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
                 const Tensor& c, float beta) {
  if (!HasBf16Product()) return ProductF32(ctx, p, Widen(ctx, a), Widen(ctx, b), c, beta);
  CheckStatus(dnnl_gemm_bf16bf16f32(Letter(p.trans_a), Letter(p.trans_b), p.m, p.n, p.k, 1.0f,
                                    &a.data<bf16>()->bits, Leading(a), &b.data<bf16>()->bits,
                                    Leading(b), beta, c.data<float>(), Leading(c)),
              p);
}

// Rounds f32 sums to bf16, after adding what is there in Accumulate.
void RoundSums(const Tensor& sums, const Output& c) {
  const std::int64_t cols = sums.dim(1);
  const bool add = c.mode == WriteMode::kAccumulate;
  ParallelFor(sums.dim(0), 1 + kGrain / (cols + 1), [&](std::int64_t i) {
    ScaleSums(sums.data<float>() + i * cols, cols, 1, 1, add,
              c.tensor.data<bf16>() + i * c.tensor.stride(0));
  });
}

// The sum over nothing.
void WriteZeros(const Output& c) {
  if (c.mode == WriteMode::kAccumulate) return;
  const std::int64_t size = static_cast<std::int64_t>(SizeOf(c.tensor.dtype()));
  for (std::int64_t i = 0; i < c.tensor.dim(0); ++i) {
    std::memset(static_cast<char*>(c.tensor.raw()) + i * c.tensor.stride(0) * size, 0,
                static_cast<std::size_t>(c.tensor.dim(1) * size));
  }
}

}  // namespace

bool HasBf16Product() {
  static const bool has = [] {
    if (dnnl_gemm_bf16bf16f32 == nullptr) return false;
    // What oneDNN may use: an environment variable can lower it below the CPU's. The values are
    // sets of features.
    constexpr int kBf16 = dnnl_cpu_isa_avx512_core_bf16;
    return (static_cast<int>(dnnl_get_effective_cpu_isa()) & kBf16) == kBf16;
  }();
  return has;
}

Support GemmCpuSupports(const GemmProblem& p) {
  if (p.in_dtype == DType::kF32 || p.in_dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(p.in_dtype)));
}

void GemmCpu(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
             const Output& c) {
  if (p.k == 0) return WriteZeros(c);
  NumThreads();  // settles the number of threads that oneDNN sees
  const float beta = c.mode == WriteMode::kAccumulate ? 1.0f : 0.0f;
  if (p.in_dtype == DType::kF32) {
    ProductF32(ctx, p, a, b, c.tensor, beta);
  } else if (p.out_dtype == DType::kF32) {
    ProductBf16(ctx, p, a, b, c.tensor, beta);
  } else {
    const Tensor sums = ctx.Empty({p.m, p.n}, DType::kF32);
    ProductBf16(ctx, p, a, b, sums, 0.0f);
    RoundSums(sums, c);
  }
}

}  // namespace cistron::ops::internal
