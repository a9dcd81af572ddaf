// grouped_mlp on the CPU: chunks of rows go through all the ops while they are in a core's cache.
//
// Forward: a thread takes a piece of a group's rows, and a copy of the group's weights in the order
// that oneDNN multiplies fastest, and runs chunk after chunk. Backward: waves of whole groups; the
// chunks of a wave leave dP and A of its rows, from which its weight gradients are made as
// grouped_gemm makes them, so that their sums do not depend on chunks.
#include <algorithm>

#include "cistron/base/threads.h"
#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/transpose.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/grouped_mlp/grouped_mlp_impls.h"
#include "cistron/ops/grouped_mlp/row_pieces.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops::internal {
namespace {

// Rows of a chunk: few enough for the second-level cache, enough that packing a weight for each is
// little beside the product, which takes half the time in bf16.
std::int64_t ChunkRows(DType dtype) {
  return dtype == DType::kF32 ? 192 : 448;
}
constexpr std::int64_t kPieceRows = 1024;
constexpr std::int64_t kRowsWorthTransposing = 96;  // as in gemm_cpu.cc
constexpr std::int64_t kPadding = 16;  // elements between rows that would lie a power of two apart

Tensor Rows(const Tensor& t, const RowPiece& piece) {
  return t ? t.Slice(0, piece.begin, piece.rows()) : t;
}
Output Rows(const Output& o, const RowPiece& piece) {
  return {Rows(o.tensor, piece), o.mode};
}

// The same rows in a buffer that begins at row `first`.
RowPiece From(const RowPiece& piece, std::int64_t first) {
  return {piece.group, piece.begin - first, piece.end - first};
}

std::vector<RowPiece> Chunks(const RowPiece& piece, DType dtype) {
  std::vector<RowPiece> chunks;
  CutRows(piece.group, piece.begin, piece.end, ChunkRows(dtype), chunks);
  return chunks;
}

// c = a · op(w) on this thread.
void Product(const Context& ctx, const Tensor& a, const Tensor& w, Transpose transpose,
             const Output& c) {
  GemmCpu(
      ctx,
      {a.dtype(), c.tensor.dtype(), Transpose::kNo, transpose, a.dim(0), c.tensor.dim(1), a.dim(1)},
      a, w, c);
}

// A group's weight for forward products with `rows` rows in all: transposed where that is faster.
struct ForwardWeight {
  Tensor w;
  Transpose transpose = Transpose::kYes;
};
ForwardWeight Prepare(const Context& ctx, const Tensor& w, std::int64_t rows) {
  if (w.dtype() != DType::kF32 || rows < kRowsWorthTransposing) return {w, Transpose::kYes};
  const std::int64_t n = w.dim(0), k = w.dim(1);
  const Tensor copy = ctx.Empty({k, n + kPadding}, DType::kF32).Slice(1, 0, n);
  TransposeF32(w.data<float>(), w.stride(0), n, k, copy.data<float>(), copy.stride(0));
  return {copy, Transpose::kNo};
}

Support Supports(const GroupedMlpProblem& p) {
  return GemmCpuSupports({p.dtype, p.dtype, Transpose::kNo, Transpose::kYes, 1, 1, 1});
}

void Forward(const Context& ctx, const GroupedMlpProblem& p, const GroupedMlpForwardArgs& args) {
  const std::vector<std::int64_t> offsets = RowOffsets("grouped_mlp", args.split_sizes, p.max_rows);
  const std::vector<RowPiece> pieces = PlanRowPieces(offsets, NumThreads(), kPieceRows);
  ParallelDynamic(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t i) {
    const RowPiece& piece = pieces[static_cast<std::size_t>(i)];
    ForwardWeight w1;
    if (args.w1) w1 = Prepare(ctx, args.w1.Select(piece.group), piece.rows());
    const ForwardWeight w2 = Prepare(ctx, args.w2.Select(piece.group), piece.rows());
    const std::vector<RowPiece> chunks = Chunks(piece, p.dtype);
    std::int64_t most = 0;
    for (const RowPiece& c : chunks) most = std::max(most, c.rows());
    const Tensor pre_buffer = args.pre ? Tensor() : ctx.Empty({most, 2 * p.ffn}, p.dtype);
    const Tensor act_buffer = args.act ? Tensor() : ctx.Empty({most, p.ffn}, p.dtype);
    for (const RowPiece& c : chunks) {
      const Tensor pre = args.pre ? Rows(args.pre, c) : pre_buffer.Slice(0, 0, c.rows());
      const Tensor act = args.act ? Rows(args.act, c) : act_buffer.Slice(0, 0, c.rows());
      if (args.w1) Product(ctx, Rows(args.x, c), w1.w, w1.transpose, Write(pre));
      SwiGluForwardCpu(ctx, pre, Rows(args.row_scale, c), {}, Write(act));
      Product(ctx, act, w2.w, w2.transpose, Rows(args.y, c));
    }
  });
}

// Groups [begin, end), whose rows begin at `first`.
struct Wave {
  std::int64_t begin, end, first, rows;
};
std::vector<Wave> Waves(const std::vector<std::int64_t>& offsets, std::int64_t max_rows) {
  const auto groups = static_cast<std::int64_t>(offsets.size()) - 1;
  const auto at = [&](std::int64_t e) { return offsets[static_cast<std::size_t>(e)]; };
  std::vector<Wave> waves;
  for (std::int64_t begin = 0, end = 0; begin < groups; begin = end) {
    while (end < groups && (end == begin || at(end + 1) - at(begin) <= max_rows)) ++end;
    waves.push_back({begin, end, at(begin), at(end) - at(begin)});
  }
  return waves;
}

void WeightGradient(const Context& ctx, const GroupedMlpProblem& p, const Wave& wave,
                    const Tensor& split_sizes, const Tensor& dy, const Tensor& x,
                    const Output& dw) {
  const std::int64_t groups = wave.end - wave.begin;
  GroupedGemmCpu(
      ctx,
      {GroupedGemmKind::kWgrad, p.dtype, dw.tensor.dtype(), groups, wave.rows, dy.dim(1), x.dim(1)},
      split_sizes.Slice(0, wave.begin, groups), dy, x,
      {dw.tensor.Slice(0, wave.begin, groups), dw.mode});
}

void Backward(const Context& ctx, const GroupedMlpProblem& p, GroupedMlpBackwardArgs&& args) {
  const std::vector<std::int64_t> offsets = RowOffsets("grouped_mlp", args.split_sizes, p.max_rows);
  const bool weights = static_cast<bool>(args.out.dw1);
  Output dx, dw1, dw2;
  if (args.out.dx) dx = args.out.dx.Get();
  if (weights) {
    dw2 = args.out.dw2.Get();
    dw1 = args.out.dw1.Get();
  }
  // Where dP is wanted whole there is no reason for several waves.
  // A wave holds dP and A.
  const std::int64_t row_bytes = 3 * p.ffn * static_cast<std::int64_t>(SizeOf(p.dtype));
  const std::vector<Wave> waves = args.dpre ? std::vector<Wave>{{0, p.groups, 0, offsets.back()}}
                                            : Waves(offsets, WaveRows(row_bytes));
  std::int64_t most = 0;
  for (const Wave& w : waves) most = std::max(most, w.rows);
  const Output all_dpre = args.dpre ? args.dpre : Write(ctx.Empty({most, 2 * p.ffn}, p.dtype));
  const Tensor all_act = weights ? ctx.Empty({most, p.ffn}, p.dtype) : Tensor();
  for (const Wave& wave : waves) {
    // No larger than lets every thread have its share of the wave.
    const std::int64_t rows_at_once =
        std::clamp(wave.rows / NumThreads(), std::int64_t{64}, ChunkRows(p.dtype));
    std::vector<RowPiece> chunks;
    for (std::int64_t e = wave.begin; e < wave.end; ++e) {
      CutRows(e, offsets[static_cast<std::size_t>(e)], offsets[static_cast<std::size_t>(e) + 1],
              rows_at_once, chunks);
    }
    ParallelDynamic(static_cast<std::int64_t>(chunks.size()), [&](std::int64_t i) {
      const RowPiece& c = chunks[static_cast<std::size_t>(i)];
      const RowPiece here = From(c, wave.first);
      const Tensor dact = ctx.Empty({c.rows(), p.ffn}, p.dtype), dpre = Rows(all_dpre.tensor, here);
      Product(ctx, Rows(args.dy, c), args.w2.Select(c.group), Transpose::kNo, Write(dact));
      SwiGluBackwardCpu(ctx, dact, Rows(args.pre, c), Rows(args.row_scale, c), {},
                        {dpre, all_dpre.mode}, Rows(args.out.dscale, c),
                        Write(Rows(all_act, here)));
      if (dx) Product(ctx, dpre, args.w1.Select(c.group), Transpose::kNo, Rows(dx, c));
    });
    if (!weights) continue;
    const RowPiece rows{0, wave.first, wave.first + wave.rows}, here = From(rows, wave.first);
    WeightGradient(ctx, p, wave, args.split_sizes, Rows(args.dy, rows), Rows(all_act, here), dw2);
    WeightGradient(ctx, p, wave, args.split_sizes, Rows(all_dpre.tensor, here), Rows(args.x, rows),
                   dw1);
  }
}

}  // namespace

GroupedMlpImpl CpuGroupedMlp() {
  return {"cpu", Supports, {Forward, Backward}};
}

}  // namespace cistron::ops::internal
