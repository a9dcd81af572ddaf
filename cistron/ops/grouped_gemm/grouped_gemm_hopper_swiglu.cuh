// SwiGLU in the epilogues of the Hopper grouped product. Formulas and roundings are those of
// grouped_mlp.h and activation.h: P and dA are rounded to bf16 before the activation reads them, so
// that the results have the bits of one op after another (ds, a sum in another order, has not).
//
//   Forward   A tile's first half are gate columns, its second half the ups that belong to them: a
//             thread holds both of an element. Stores P where it is wanted, and A.
//   Backward  The sums are dA. P comes through the ring of stages after the operands, 64 columns a
//             stage, so that it is on its way while the last products run. Sums of a row over the
//             tile's columns are left in memory for a kernel that adds up a row's tiles in order:
//             no atomics.
#pragma once

#include "cistron/ops/activation/gated.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_store.cuh"

namespace cistron::ops::internal::sm90 {

// The scales of a thread's two rows of a warp's sixteen; those of another group's are not used.
struct RowScales {
  float low, high;

  __device__ void Load(const float* row_scale, const Tile& tile, int m) {
    low = high = 1;
    if (row_scale == nullptr) return;
    const int row = m + static_cast<int>(threadIdx.x) % 32 / 4;
    if (row < tile.group_rows) low = row_scale[tile.row_begin + row];
    if (row + 8 < tile.group_rows) high = row_scale[tile.row_begin + row + 8];
  }
  // Of register i of a fragment.
  __device__ float Of(int i) const { return i % 4 < 2 ? low : high; }
};

// Where lane's row of a swizzled buffer of 16 lines begins, and its columns 16·j … of it, as
// ldmatrix and stmatrix take them.
__device__ inline std::uint32_t FragmentAddress(std::uint32_t buffer, int lane, int j) {
  const int row = lane % 16;
  return buffer + row * hopper::kSwizzleLine + (((2 * j + lane / 16) ^ (row % 8)) << 4);
}

template <class T>
class SwiGluStore {
 public:
  __device__ SwiGluStore(const SharedLayout<T>& shared, const CUtensorMap*, const KernelArgs& args)
      : args_(args), buffers_(shared.Store(threadIdx.x / 32)) {}

  __device__ void Begin(const Tile& tile, int m) { scales_.Load(args_.swiglu.row_scale, tile, m); }

  __device__ void Run(float (&sums)[T::kSums], const Tile& tile, int m) {
    const int rows = tile.group_rows - m;
    if (rows <= 0) return;
    const SwiGluArgs& to = args_.swiglu;
    const std::int64_t row = tile.row_begin + m;
#pragma unroll
    for (int part = 0; part < T::kTileCols / kChunk; ++part) {
      const int n = tile.n + part * kChunk;
      if (n >= args_.cols) break;
      const float* const gate_sums = sums + part * (kChunk / 2);
      const float* const up_sums = gate_sums + T::kSums / 2;
      // Two neighbouring elements a register.
      std::uint32_t gates[kChunk / 4], ups[kChunk / 4], act[kChunk / 4];
#pragma unroll
      for (int i = 0; i < kChunk / 4; ++i) {
        gates[i] = PackBf16(gate_sums[2 * i], gate_sums[2 * i + 1]);
        ups[i] = PackBf16(up_sums[2 * i], up_sums[2 * i + 1]);
      }
      if (to.pre != nullptr) {
        __nv_bfloat16* const pre = to.pre + row * to.ld_pre;
        StoreColumns(gates, pre, to.ld_pre, n, rows);
        StoreColumns(ups, pre + args_.cols, to.ld_pre, n, rows);
      }
#pragma unroll
      for (int i = 0; i < kChunk / 4; ++i) {
        const float2 gate = UnpackBf16(gates[i]), up = UnpackBf16(ups[i]);
        const float scale = scales_.Of(2 * i);
        act[i] = PackBf16(Gated<bf16>(gate.x, gate.x, gate.x, up.x).gate * up.x * scale,
                          Gated<bf16>(gate.y, gate.y, gate.y, up.y).gate * up.y * scale);
      }
      StoreColumns(act, to.act + row * to.ld_act, to.ld_act, n, rows);
    }
  }

  __device__ void Finish() {}

 private:
  // kChunk columns from column n on.
  __device__ void StoreColumns(const std::uint32_t (&pairs)[kChunk / 4], __nv_bfloat16* to,
                               std::int64_t ld, int n, int rows) {
    const std::uint32_t buffer = buffers_ + (odd_ ? kStoreBytes : 0);
    odd_ = !odd_;
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      hopper::StoreMatrix(FragmentAddress(buffer, lane_, j), pairs[4 * j], pairs[4 * j + 1],
                          pairs[4 * j + 2], pairs[4 * j + 3]);
    }
    __syncwarp();
    StoreLines(buffer, to, ld, n, args_.cols, rows, lane_, false, [](const uint4&) {});
  }

  const KernelArgs& args_;
  std::uint32_t buffers_;
  RowScales scales_;
  int lane_ = threadIdx.x % 32;
  bool odd_ = false;
};

template <class T>
class SwiGluBackwardStore {
 public:
  __device__ SwiGluBackwardStore(const SharedLayout<T>& shared, const CUtensorMap*,
                                 const KernelArgs& args)
      : args_(args), buffers_(shared.Store(threadIdx.x / 32)) {}

  __device__ void Begin(const Tile& tile, int m) {
    scales_.Load(args_.swiglu.row_scale, tile, m);
    low_sum_ = high_sum_ = 0;
  }

  // Columns [64·part, …) of the tile. `pre`: this consumer's lines of gates in the stage, those of
  // ups are half of the epilogue's bytes further on; `release` gives the stage back.
  template <class Release>
  __device__ void RunPart(float (&sums)[T::kSums], int part, std::uint32_t pre, const Tile& tile,
                          int m, Release&& release) {
    const int rows = tile.group_rows - m;
    const int n = tile.n + part * kChunk;
    if (rows <= 0 || n >= args_.cols) return release();
    const std::uint32_t gates =
        pre + threadIdx.x % kConsumerThreads / 32 * (kWarpM * hopper::kSwizzleLine);
    const std::uint32_t dgates = buffers_, dups = buffers_ + kStoreBytes;
    std::uint32_t act[kChunk / 4];
    __syncwarp();  // the last part has left the buffers
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      const float* const d = sums + part * (kChunk / 2) + 8 * j;
      std::uint32_t g[4], u[4];
      hopper::LoadMatrix(FragmentAddress(gates, lane_, j), g);
      hopper::LoadMatrix(FragmentAddress(gates + T::kEpilogueBytes / 2, lane_, j), u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = scales_.Of(2 * i);
        float& sum = i % 2 == 0 ? low_sum_ : high_sum_;
        const float2 dact = UnpackBf16(PackBf16(d[2 * i], d[2 * i + 1]));
        const float2 gate = UnpackBf16(g[i]), up = UnpackBf16(u[i]);
        const Element x = Differentiate(dact.x, gate.x, up.x, scale, sum);
        const Element y = Differentiate(dact.y, gate.y, up.y, scale, sum);
        g[i] = PackBf16(x.dgate, y.dgate);
        u[i] = PackBf16(x.dup, y.dup);
        act[4 * j + i] = PackBf16(x.act, y.act);
      }
      hopper::StoreMatrix(FragmentAddress(dgates, lane_, j), g[0], g[1], g[2], g[3]);
      hopper::StoreMatrix(FragmentAddress(dups, lane_, j), u[0], u[1], u[2], u[3]);
    }
    __syncwarp();
    release();
    const SwiGluArgs& to = args_.swiglu;
    const std::int64_t row = tile.row_begin + m;
    __nv_bfloat16* const dpre = to.dpre + row * to.ld_dpre;
    StoreLines(dgates, dpre, to.ld_dpre, n, args_.cols, rows, lane_, false, [](const uint4&) {});
    StoreLines(dups, dpre + args_.cols, to.ld_dpre, n, args_.cols, rows, lane_, false,
               [](const uint4&) {});
    if (to.act == nullptr) return;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      hopper::StoreMatrix(FragmentAddress(dgates, lane_, j), act[4 * j], act[4 * j + 1],
                          act[4 * j + 2], act[4 * j + 3]);
    }
    __syncwarp();
    StoreLines(dgates, to.act + row * to.ld_act, to.ld_act, n, args_.cols, rows, lane_, false,
               [](const uint4&) {});
  }

  // After all parts.
  __device__ void Run(float (&)[T::kSums], const Tile& tile, int m) {
    float* const parts = args_.swiglu.scale_parts;
    const int rows = tile.group_rows - m;
    if (parts == nullptr || rows <= 0) return;
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      low_sum_ += __shfl_xor_sync(~0u, low_sum_, lanes);
      high_sum_ += __shfl_xor_sync(~0u, high_sum_, lanes);
    }
    const int row = lane_ / 4;
    float* const to = parts + static_cast<std::int64_t>(tile.n / T::kTileCols) * args_.max_rows +
                      tile.row_begin + m;
    if (lane_ % 4 != 0) return;
    if (row < rows) to[row] = low_sum_;
    if (row + 8 < rows) to[row + 8] = high_sum_;
  }

  __device__ void Finish() {}

 private:
  struct Element {
    float dgate, dup, act;
  };
  static __device__ Element Differentiate(float dact, float gate, float up, float scale,
                                          float& scale_sum) {
    const GatedValues<float> v = Gated<bf16>(gate, gate, gate, up);
    const float act = v.gate * up, d = dact * scale;
    scale_sum = __fmaf_rn(dact, act, scale_sum);
    return {d * up * v.gate_slope, d * v.gate, act * scale};
  }

  const KernelArgs& args_;
  std::uint32_t buffers_;
  RowScales scales_;
  float low_sum_ = 0, high_sum_ = 0;
  int lane_ = threadIdx.x % 32;
};

}  // namespace cistron::ops::internal::sm90
