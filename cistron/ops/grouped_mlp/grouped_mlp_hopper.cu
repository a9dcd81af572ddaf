// grouped_mlp on Hopper in bf16: SwiGLU in the epilogue of x · w1ᵀ, its backward in that of dy ·
// w2. grouped_gemm_hopper_swiglu.cuh has the epilogues. What is left, y, dx and the weight
// gradients, are grouped products.
#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_launch.cuh"
#include "cistron/ops/grouped_mlp/grouped_mlp_impls.h"
#include "cistron/ops/grouped_mlp/grouped_mlp_supports_hopper.h"
#include "cistron/ops/op_work.h"

namespace cistron::ops {
namespace internal {
namespace {

using sm90::Epilogue;
using sm90::Matrices;

Matrices Rows(const Tensor& t) {
  return {t.raw(), 1, t.dim(0), t.dim(1), t.stride(0), t.dtype()};
}
Matrices Weights(const Tensor& w) {
  return {w.raw(), w.dim(0), w.dim(1), w.dim(2), w.stride(1), w.dtype()};
}
__nv_bfloat16* Elements(const Tensor& t) {
  return t ? static_cast<__nv_bfloat16*>(t.raw()) : nullptr;
}

template <GroupedGemmKind kKind, int kBlockN, Epilogue kEpilogue>
void Launch(const Context& ctx, const HopperTiles& tiles, const Tensor& a, const Tensor& w,
            const sm90::KernelArgs& args) {
  using T = sm90::Traits<kKind, kBlockN, __nv_bfloat16, kEpilogue>;
  const Tensor counter = tiles.drawn ? ctx.Empty({1}, DType::kI32) : Tensor();
  sm90::LaunchKernel<T>(tiles, counter ? counter.raw() : nullptr, StreamOf(ctx),
                        sm90::EncodeOperand<T::kTransposeA, sm90::kBlockM>(Rows(a)),
                        sm90::EncodeOperand<T::kTransposeB, kBlockN>(Weights(w)), CUtensorMap{},
                        args);
}

template <GroupedGemmKind kKind, Epilogue kEpilogue>
void LaunchTiles(const Context& ctx, const HopperTiles& tiles, const Tensor& a, const Tensor& w,
                 const sm90::KernelArgs& args) {
  switch (tiles.block_n) {
    case 256:
      if constexpr (kEpilogue == Epilogue::kSwiGlu) {
        return Launch<kKind, 256, kEpilogue>(ctx, tiles, a, w, args);
      }
      break;
    case 192: return Launch<kKind, 192, kEpilogue>(ctx, tiles, a, w, args);
    case 128: return Launch<kKind, 128, kEpilogue>(ctx, tiles, a, w, args);
    default: break;
  }
  CISTRON_THROW(kInternal, "grouped_mlp: no kernel has tiles of {} columns", tiles.block_n);
}

// P where it is wanted, and A.
void ForwardProduct(const Context& ctx, const GroupedMlpProblem& p, const GroupedMlpForwardArgs& in,
                    const Tensor& act) {
  if (p.max_rows == 0) return;
  AddWork(ctx, GroupedProductFlops(ctx, p.max_rows, 2 * p.ffn, p.hidden), in.x, in.w1, in.pre, act);
  const HopperTiles tiles = ChooseHopperSwiGluTiles(false, p.groups, p.max_rows, p.ffn, p.hidden,
                                                    sm90::Multiprocessors());
  const sm90::KernelArgs args = {
      .groups = static_cast<int>(p.groups),
      .max_rows = static_cast<int>(p.max_rows),
      .cols = static_cast<int>(p.ffn),
      .depth = static_cast<int>(p.hidden),
      .split_sizes = in.split_sizes.data<std::int64_t>(),
      .swiglu = {.row_scale = DataOrNull<float>(in.row_scale),
                 .pre = Elements(in.pre),
                 .ld_pre = in.pre ? in.pre.stride(0) : 0,
                 .act = Elements(act),
                 .ld_act = act.stride(0)},
  };
  LaunchTiles<GroupedGemmKind::kForward, Epilogue::kSwiGlu>(ctx, tiles, in.x, in.w1, args);
}

// dscale (= or +=) the sums of a row's tiles, in order.
__global__ void __launch_bounds__(kThreads)
    sum_scale_parts_kernel(const float* parts, int tiles, std::int64_t rows,
                           const std::int64_t* split_sizes, std::int64_t groups, float* dscale,
                           bool accumulate) {
  const std::int64_t row = GridStart();
  if (row >= RowsUsed(split_sizes, groups, rows)) return;
  float sum = 0;
  for (int tile = 0; tile < tiles; ++tile) sum += parts[tile * rows + row];
  StoreElement(dscale[row], sum, accumulate);
}

// dP, and where they are wanted A and ds.
void BackwardProduct(const Context& ctx, const GroupedMlpProblem& p,
                     const GroupedMlpBackwardArgs& in, const Tensor& dpre, const Tensor& act) {
  if (p.max_rows == 0) return;
  AddWork(ctx, GroupedProductFlops(ctx, p.max_rows, p.ffn, p.out), in.dy, in.w2, in.pre, dpre, act);
  const HopperTiles tiles =
      ChooseHopperSwiGluTiles(true, p.groups, p.max_rows, p.ffn, p.out, sm90::Multiprocessors());
  const Output& dscale = in.out.dscale;
  const std::int64_t across = (p.ffn + tiles.block_n - 1) / tiles.block_n;
  const Tensor parts = dscale ? ctx.Empty({across, p.max_rows}, DType::kF32) : Tensor();
  const std::int64_t* split_sizes = in.split_sizes.data<std::int64_t>();
  const sm90::KernelArgs args = {
      .groups = static_cast<int>(p.groups),
      .max_rows = static_cast<int>(p.max_rows),
      .cols = static_cast<int>(p.ffn),
      .depth = static_cast<int>(p.out),
      .split_sizes = split_sizes,
      .swiglu = {.row_scale = DataOrNull<float>(in.row_scale),
                 .pre = Elements(in.pre),
                 .ld_pre = in.pre.stride(0),
                 .act = Elements(act),
                 .ld_act = act ? act.stride(0) : 0,
                 .dpre = Elements(dpre),
                 .ld_dpre = dpre.stride(0),
                 .scale_parts = DataOrNull<float>(parts)},
  };
  LaunchTiles<GroupedGemmKind::kDgrad, Epilogue::kSwiGluBackward>(ctx, tiles, in.dy, in.w2, args);
  if (!dscale) return;
  sum_scale_parts_kernel<<<static_cast<unsigned>((p.max_rows + kThreads - 1) / kThreads), kThreads,
                           0, StreamOf(ctx)>>>(parts.data<float>(), static_cast<int>(across),
                                               p.max_rows, split_sizes, p.groups,
                                               dscale.tensor.data<float>(), Accumulates(dscale));
  CheckLaunch("grouped_mlp");
}

void Forward(const Context& ctx, const GroupedMlpProblem& p, const GroupedMlpForwardArgs& args) {
  if (!args.w1) return GroupedMlpForwardByOps(ctx, p, args);
  const Tensor act = args.act ? args.act : ctx.Empty({p.max_rows, p.ffn}, p.dtype);
  ForwardProduct(ctx, p, args, act);
  GroupedGemmForward(ctx, {act, args.split_sizes}, args.w2, args.y);
}

void Backward(const Context& ctx, const GroupedMlpProblem& p, GroupedMlpBackwardArgs&& args) {
  // Nothing in a model adds to dP: no kernel for it.
  if (args.dpre && Accumulates(args.dpre)) {
    return GroupedMlpBackwardByOps(ctx, p, std::move(args));
  }
  // Where the caller does not say where dP goes, it takes P's place.
  const Tensor dpre = args.dpre ? args.dpre.tensor : args.pre;
  Tensor act = args.out.dw2 ? ctx.Empty({p.max_rows, p.ffn}, p.dtype) : Tensor();
  BackwardProduct(ctx, p, args, dpre, act);
  GroupedMlpWeightAndInputGradients(ctx, std::move(args), dpre, std::move(act));
}

}  // namespace
}  // namespace internal

extern constinit const GroupedMlpImpl kGroupedMlpHopper = {"hopper",
                                                           internal::GroupedMlpHopperSupports,
                                                           {internal::Forward, internal::Backward},
                                                           DeviceType::kCuda};

}  // namespace cistron::ops
