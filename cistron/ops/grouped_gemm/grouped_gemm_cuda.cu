// grouped_gemm on a GPU, the plain kernels: one tile of a group's result a block. The host does not
// know the counts, so it launches as many blocks as any counts need; those without work end at
// once.
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/gemm/gemm_supports_cuda.h"
#include "cistron/ops/gemm/gemm_tile.cuh"
#include "cistron/ops/grouped_gemm/group_span.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"

namespace cistron::ops {
namespace {

using internal::GroupSpan;
using internal::kTileSize;
using internal::kTileThreads;
using internal::TileOperand;

struct Groups {
  const std::int64_t* counts;
  std::int64_t number, max_rows;
};

// Forward and dgrad: c [rows of the group, width] = a [.., depth] · b(group). Rows beyond the
// groups belong to no tile.
template <class In, class Out, int kPer>
__global__ void __launch_bounds__(kTileThreads, 2)
    grouped_rows_kernel(Groups groups, TileOperand<In> a, TileOperand<In> b, std::int64_t b_group,
                        std::int64_t width, std::int64_t depth, std::int64_t column_tiles, Out* c,
                        std::int64_t c_stride, bool accumulate) {
  __shared__ GroupSpan span;
  const std::int64_t block = blockIdx.x;
  internal::FindRowTile(groups.counts, groups.number, groups.max_rows, block / column_tiles,
                        kTileSize<kPer>, &span);
  if (span.group < 0) return;
  a.data += span.begin * a.step_i;
  b.data += span.group * b_group;
  internal::MultiplyTile<In, Out, kPer>(a, b, span.rows, width, depth, span.tile * kTileSize<kPer>,
                                        block % column_tiles * kTileSize<kPer>,
                                        c + span.begin * c_stride, c_stride, accumulate);
}

// Wgrad: c [group] [m, n] = Σ over the group's rows r of a(r)ᵀ · b(r).
template <class In, class Out, int kPer>
__global__ void __launch_bounds__(kTileThreads, 2)
    grouped_sum_kernel(Groups groups, TileOperand<In> a, TileOperand<In> b, std::int64_t m,
                       std::int64_t n, std::int64_t row_tiles, std::int64_t column_tiles, Out* c,
                       std::int64_t c_group, std::int64_t c_stride, bool accumulate) {
  __shared__ GroupSpan span;
  const std::int64_t tiles = row_tiles * column_tiles, block = blockIdx.x;
  const std::int64_t group = block / tiles, tile = block % tiles;
  internal::FindGroup(groups.counts, groups.max_rows, group, &span);
  if (span.rows == 0 && accumulate) return;
  a.data += span.begin * a.step_k;
  b.data += span.begin * b.step_k;
  internal::MultiplyTile<In, Out, kPer>(
      a, b, m, n, span.rows, tile / column_tiles * kTileSize<kPer>,
      tile % column_tiles * kTileSize<kPer>, c + group * c_group, c_stride, accumulate);
}

std::int64_t Tiles(std::int64_t n, std::int64_t size) {
  return (n + size - 1) / size;
}

unsigned Grid(std::int64_t blocks) {
  CISTRON_CHECK(blocks < (std::int64_t{1} << 31),
                "grouped_gemm: the result needs {} tiles, too many", blocks);
  return static_cast<unsigned>(blocks);
}

template <class In, class Out, int kPer>
void RunRows(const Context& ctx, const GroupedGemmProblem& p, const Groups& groups, const Tensor& a,
             const Tensor& w, const Output& c) {
  const bool forward = p.kind == GroupedGemmKind::kForward;
  const std::int64_t width = forward ? p.n : p.k, depth = forward ? p.k : p.n;
  const std::int64_t columns = Tiles(width, kTileSize<kPer>);
  // Each group ends with at most one partial tile.
  const std::int64_t rows = Tiles(p.max_rows, kTileSize<kPer>) + std::min(p.groups, p.max_rows);
  if (p.max_rows == 0 || p.groups == 0 || columns == 0) return;
  if (depth == 0 && internal::Accumulates(c)) return;
  const TileOperand<In> b{w.data<In>(), forward ? w.stride(1) : 1, forward ? 1 : w.stride(1)};
  grouped_rows_kernel<In, Out, kPer>
      <<<Grid(rows * columns), kTileThreads, 0, internal::StreamOf(ctx)>>>(
          groups, {a.data<In>(), a.stride(0), 1}, b, w.stride(0), width, depth, columns,
          c.tensor.data<Out>(), c.tensor.stride(0), internal::Accumulates(c));
  internal::CheckLaunch("grouped_gemm");
}

template <class In, class Out, int kPer>
void RunSum(const Context& ctx, const GroupedGemmProblem& p, const Groups& groups, const Tensor& dy,
            const Tensor& x, const Output& dw) {
  const std::int64_t rows = Tiles(p.n, kTileSize<kPer>), columns = Tiles(p.k, kTileSize<kPer>);
  if (p.groups == 0 || rows == 0 || columns == 0) return;
  grouped_sum_kernel<In, Out, kPer>
      <<<Grid(p.groups * rows * columns), kTileThreads, 0, internal::StreamOf(ctx)>>>(
          groups, {dy.data<In>(), 1, dy.stride(0)}, {x.data<In>(), 1, x.stride(0)}, p.n, p.k, rows,
          columns, dw.tensor.data<Out>(), dw.tensor.stride(0), dw.tensor.stride(1),
          internal::Accumulates(dw));
  internal::CheckLaunch("grouped_gemm");
}

// Whether tiles of 128 fill the GPU and are not mostly empty.
bool LargeTiles(const GroupedGemmProblem& p) {
  const bool wgrad = p.kind == GroupedGemmKind::kWgrad;
  const std::int64_t width = p.kind == GroupedGemmKind::kForward ? p.n : p.k;
  if (wgrad) {
    return p.n >= 128 && internal::LargeTiles(p.groups * Tiles(p.n, 128) * Tiles(width, 128));
  }
  return p.max_rows >= 256 * p.groups && internal::LargeTiles(p.max_rows / 128 * Tiles(width, 128));
}

template <class In, class Out>
void RunTyped(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
              const Tensor& a, const Tensor& b, const Output& c) {
  const Groups groups{split_sizes.data<std::int64_t>(), p.groups, p.max_rows};
  const bool wgrad = p.kind == GroupedGemmKind::kWgrad;
  if constexpr (!std::is_same_v<In, double>) {
    if (LargeTiles(p)) {
      return wgrad ? RunSum<In, Out, 8>(ctx, p, groups, a, b, c)
                   : RunRows<In, Out, 8>(ctx, p, groups, a, b, c);
    }
  }
  return wgrad ? RunSum<In, Out, 4>(ctx, p, groups, a, b, c)
               : RunRows<In, Out, 4>(ctx, p, groups, a, b, c);
}

void RunCuda(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
             const Tensor& a, const Tensor& b, const Output& c) {
  DispatchFloat("grouped_gemm", p.in_dtype, [&](auto tag) {
    using In = typename decltype(tag)::type;
    if (p.out_dtype == p.in_dtype) return RunTyped<In, In>(ctx, p, split_sizes, a, b, c);
    RunTyped<In, Compute<In>>(ctx, p, split_sizes, a, b, c);
  });
}

}  // namespace

extern constinit const GroupedGemmImpl kGroupedGemmCuda = {
    "cuda", internal::GemmCudaSupports<GroupedGemmProblem>, {RunCuda}, DeviceType::kCuda};

}  // namespace cistron::ops
