// gemm on a GPU, the plain kernel: any size, alignment and dtype, one tile of the result a block.
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/gemm_supports_cuda.h"
#include "cistron/ops/gemm/gemm_tile.cuh"

namespace cistron::ops {
namespace {

using internal::TileOperand;

template <class In, class Out, int kPer>
__global__ void __launch_bounds__(internal::kTileThreads, 2)
    gemm_kernel(TileOperand<In> a, TileOperand<In> b, std::int64_t m, std::int64_t n,
                std::int64_t k, std::int64_t column_tiles, Out* c, std::int64_t c_stride,
                bool accumulate) {
  constexpr std::int64_t kSize = internal::kTileSize<kPer>;
  const std::int64_t tile = blockIdx.x;
  internal::MultiplyTile<In, Out, kPer>(a, b, m, n, k, tile / column_tiles * kSize,
                                        tile % column_tiles * kSize, c, c_stride, accumulate);
}

std::int64_t Tiles(std::int64_t n, std::int64_t size) {
  return (n + size - 1) / size;
}

template <class In, class Out, int kPer>
void Launch(const Context& ctx, const GemmProblem& p, const TileOperand<In>& a,
            const TileOperand<In>& b, const Output& c) {
  constexpr std::int64_t kSize = internal::kTileSize<kPer>;
  const std::int64_t columns = Tiles(p.n, kSize), blocks = Tiles(p.m, kSize) * columns;
  CISTRON_CHECK(blocks < (std::int64_t{1} << 31), "gemm: a result of [{}, {}] is too large", p.m,
                p.n);
  gemm_kernel<In, Out, kPer>
      <<<static_cast<unsigned>(blocks), internal::kTileThreads, 0, internal::StreamOf(ctx)>>>(
          a, b, p.m, p.n, p.k, columns, c.tensor.data<Out>(), c.tensor.stride(0),
          internal::Accumulates(c));
  internal::CheckLaunch("gemm");
}

template <class In, class Out>
void RunTyped(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
              const Output& c) {
  const bool ta = p.trans_a == Transpose::kYes, tb = p.trans_b == Transpose::kYes;
  const TileOperand<In> a_operand{a.data<In>(), ta ? 1 : a.stride(0), ta ? a.stride(0) : 1};
  const TileOperand<In> b_operand{b.data<In>(), tb ? b.stride(0) : 1, tb ? 1 : b.stride(0)};
  if constexpr (!std::is_same_v<In, double>) {
    if (internal::LargeTiles(Tiles(p.m, 128) * Tiles(p.n, 128))) {
      return Launch<In, Out, 8>(ctx, p, a_operand, b_operand, c);
    }
  }
  Launch<In, Out, 4>(ctx, p, a_operand, b_operand, c);
}

void RunCuda(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
             const Output& c) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0 && internal::Accumulates(c)) return;
  DispatchFloat("gemm", p.in_dtype, [&](auto tag) {
    using In = typename decltype(tag)::type;
    if (p.out_dtype == p.in_dtype) return RunTyped<In, In>(ctx, p, a, b, c);
    RunTyped<In, Compute<In>>(ctx, p, a, b, c);
  });
}

}  // namespace

extern constinit const GemmImpl kGemmCuda = {
    "cuda", internal::GemmCudaSupports, {RunCuda}, DeviceType::kCuda};

}  // namespace cistron::ops
