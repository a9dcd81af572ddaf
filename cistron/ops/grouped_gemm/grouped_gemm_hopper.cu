// Launches the sm_90a grouped product: operands, choice of the instantiation.
#include <cstdint>

#include "cistron/ops/grouped_gemm/grouped_gemm_hopper.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_launch.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_supports_hopper.h"

namespace cistron::ops::internal {
namespace {

using sm90::Matrices;

Matrices OperandA(const HopperGroupedGemm& g) {
  const std::int64_t cols = g.kind == GroupedGemmKind::kForward ? g.k : g.n;
  return {g.a, 1, g.max_rows, cols, g.lda != 0 ? g.lda : cols, DType::kBF16};
}
Matrices OperandB(const HopperGroupedGemm& g) {
  const std::int64_t ld = g.ldb != 0 ? g.ldb : g.k;
  if (g.kind == GroupedGemmKind::kWgrad) return {g.b, 1, g.max_rows, g.k, ld, DType::kBF16};
  return {g.b, g.groups, g.n, g.k, ld, DType::kBF16};
}
Matrices Result(const HopperGroupedGemm& g) {
  const std::int64_t cols = g.kind == GroupedGemmKind::kForward ? g.n : g.k;
  const std::int64_t ld = g.ldc != 0 ? g.ldc : cols;
  if (g.kind == GroupedGemmKind::kWgrad) return {g.c, g.groups, g.n, cols, ld, g.out_dtype};
  return {g.c, 1, g.max_rows, cols, ld, g.out_dtype};
}

template <class T>
void Launch(const HopperGroupedGemm& g, const HopperTiles& tiles) {
  const Matrices result = Result(g);
  const sm90::KernelArgs args = {
      .groups = static_cast<int>(g.groups),
      .max_rows = static_cast<int>(g.max_rows),
      .rows = static_cast<int>(g.n),
      .cols = static_cast<int>(result.cols),
      .depth = static_cast<int>(g.kind == GroupedGemmKind::kForward ? g.k : g.n),
      .accumulate = g.accumulate,
      .split_sizes = g.split_sizes,
      .c = g.c,
      .ldc = result.ld,
      .group_stride = T::kWgrad ? result.rows * result.ld : 0,
      .square_sums = g.square_sums,
  };
  sm90::LaunchKernel<T>(tiles, g.workspace, static_cast<cudaStream_t>(g.stream),
                        sm90::EncodeOperand<T::kTransposeA, sm90::kBlockM>(OperandA(g)),
                        sm90::EncodeOperand<T::kTransposeB, T::kBlockN>(OperandB(g)),
                        sm90::Encode(result, T::kStoreCols, sm90::kWarpM), args);
}

// A kernel, and no memset: CUDA_LAUNCH_BLOCKING, under which tests read results, waits for kernels
// alone.
template <class V>
__global__ void ZeroRowsKernel(V* c, std::int64_t cols, std::int64_t ld) {
  V* row = c + blockIdx.x * ld;
  for (std::int64_t j = threadIdx.x; j < cols; j += blockDim.x) row[j] = V(0.0f);
}
template <class V>
void LaunchZero(const Matrices& c, const HopperGroupedGemm& g) {
  constexpr int kThreadsOfRow = 256;
  ZeroRowsKernel<<<static_cast<unsigned>(c.count * c.rows), kThreadsOfRow, 0,
                   static_cast<cudaStream_t>(g.stream)>>>(static_cast<V*>(g.c), c.cols, c.ld);
  sm90::CheckCuda(cudaGetLastError(), "launch");
}

template <GroupedGemmKind kKind, class Out>
void LaunchTiles(const HopperGroupedGemm& g, const HopperTiles& tiles) {
  switch (tiles.block_n) {
    case 256: return Launch<sm90::Traits<kKind, 256, Out>>(g, tiles);
    case 192: return Launch<sm90::Traits<kKind, 192, Out>>(g, tiles);
    case 128: return Launch<sm90::Traits<kKind, 128, Out>>(g, tiles);
    default: break;
  }
  CISTRON_THROW(kInternal, "grouped_gemm: no kernel has tiles of {} columns", tiles.block_n);
}

template <GroupedGemmKind kKind>
void LaunchKind(const HopperGroupedGemm& g, const HopperTiles& tiles) {
  if (g.out_dtype == DType::kF32) {
    LaunchTiles<kKind, float>(g, tiles);
  } else {
    LaunchTiles<kKind, __nv_bfloat16>(g, tiles);
  }
}

HopperTiles Tiles(const HopperGroupedGemm& g) {
  return ChooseHopperTiles(g.kind, g.groups, g.max_rows, g.n, g.k, sm90::Multiprocessors());
}

}  // namespace

Support HopperGroupedGemmSupports(const HopperGroupedGemm& gemm) {
  if (gemm.out_dtype != DType::kBF16 && gemm.out_dtype != DType::kF32) {
    return Support::No(fmt::format("results are bf16 or f32, not {}", Name(gemm.out_dtype)));
  }
  if (Support shape = HopperShapeSupports(gemm.kind, gemm.groups, gemm.max_rows, gemm.n, gemm.k);
      !shape) {
    return shape;
  }
  for (const auto& [name, matrices] :
       {std::pair("a", OperandA(gemm)), std::pair("b", OperandB(gemm)),
        std::pair("c", Result(gemm))}) {
    if (std::string why = sm90::WhyNot(name, matrices); !why.empty())
      return Support::No(std::move(why));
  }
  return Support::Yes();
}

std::int64_t HopperGroupedGemmWorkspace(const HopperGroupedGemm&) {
  return sizeof(int);
}

// One of each warp of each tile.
std::int64_t HopperSquareSums(const HopperGroupedGemm& gemm) {
  const int block_n = Tiles(gemm).block_n;
  return gemm.groups * ((gemm.n + sm90::kWarpM - 1) / sm90::kWarpM) *
         ((gemm.k + block_n - 1) / block_n);
}

void LaunchHopperGroupedGemm(const HopperGroupedGemm& gemm) {
  if (const Support support = HopperGroupedGemmSupports(gemm); !support) {
    CISTRON_THROW(kUnsupported, "grouped_gemm: {}", support.reason);
  }
  const bool wgrad = gemm.kind == GroupedGemmKind::kWgrad;
  if (gemm.groups == 0 || gemm.n == 0 || gemm.k == 0) return;
  if (gemm.max_rows == 0) {
    // No operand to describe; weight gradients are zeros.
    if (wgrad && !gemm.accumulate) {
      const Matrices c = Result(gemm);
      if (gemm.square_sums != nullptr) {
        ZeroRowsKernel<<<1, 256, 0, static_cast<cudaStream_t>(gemm.stream)>>>(
            gemm.square_sums, HopperSquareSums(gemm), 0);
      }
      if (c.dtype == DType::kF32) {
        LaunchZero<float>(c, gemm);
      } else {
        LaunchZero<__nv_bfloat16>(c, gemm);
      }
    }
    return;
  }
  const HopperTiles tiles = Tiles(gemm);
  switch (gemm.kind) {
    case GroupedGemmKind::kForward: return LaunchKind<GroupedGemmKind::kForward>(gemm, tiles);
    case GroupedGemmKind::kDgrad: return LaunchKind<GroupedGemmKind::kDgrad>(gemm, tiles);
    case GroupedGemmKind::kWgrad: return LaunchKind<GroupedGemmKind::kWgrad>(gemm, tiles);
  }
}

}  // namespace cistron::ops::internal

namespace cistron::ops {
namespace {

// Partial sums of squares where they are wanted.
Tensor Run(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
           const Tensor& a, const Tensor& b, const Output& c, bool squares) {
  internal::HopperGroupedGemm gemm;
  gemm.kind = p.kind;
  gemm.out_dtype = p.out_dtype;
  gemm.accumulate = c.mode == WriteMode::kAccumulate;
  gemm.groups = p.groups;
  gemm.max_rows = p.max_rows;
  gemm.n = p.n;
  gemm.k = p.k;
  gemm.lda = a.stride(-2);
  gemm.ldb = b.stride(-2);
  gemm.ldc = c.tensor.stride(-2);
  gemm.a = a.raw();
  gemm.b = b.raw();
  gemm.c = c.tensor.raw();
  gemm.split_sizes = split_sizes.data<std::int64_t>();
  gemm.stream = ctx.stream().handle;
  const Tensor workspace = ctx.Empty({internal::HopperGroupedGemmWorkspace(gemm)}, DType::kU8);
  gemm.workspace = workspace.raw();
  Tensor square_sums;
  if (squares) {
    square_sums = ctx.Empty({internal::HopperSquareSums(gemm)}, DType::kF64);
    gemm.square_sums = square_sums.data<double>();
  }
  internal::LaunchHopperGroupedGemm(gemm);
  return square_sums;
}

void RunHopper(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
               const Tensor& a, const Tensor& b, const Output& c) {
  Run(ctx, p, split_sizes, a, b, c, /*squares=*/false);
}

Tensor WgradWithSquares(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
                        const Tensor& dy, const Tensor& x, const Tensor& dw) {
  return Run(ctx, p, split_sizes, dy, x, Write(dw), /*squares=*/true);
}

}  // namespace

extern constinit const GroupedGemmImpl kGroupedGemmHopper = {"hopper",
                                                             internal::GroupedGemmHopperSupports,
                                                             {RunHopper, WgradWithSquares},
                                                             DeviceType::kCuda};

}  // namespace cistron::ops
