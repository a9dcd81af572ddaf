// SwiGLU in the epilogues of the Hopper grouped product. Formulas and roundings are those of
// grouped_mlp.h and activation.h: P and dA are rounded to bf16 before the activation reads them, so
// that the results have the bits of one op after another (ds, a sum in another order, has not).
//
//   Forward   A tile's first half are gate columns, its second half the ups that belong to them.
//             Stores P where it is wanted, and A.
//   Backward  The sums are dA. P is read ahead of its use into shared memory; dP may take its place
//             in memory, since the lane that reads 16 bytes of P is the one that replaces them.
//             Sums of a row over the tile's columns are left in memory for a kernel that adds up a
//             row's tiles in order: no atomics.
//
// But for SwiGluStore, whose sums are in its own registers, they run in the finisher, on the halves
// of a tile that the consumers have handed over. Neighbouring lanes take neighbouring 16 bytes of a
// row, so that whatever is read or written is whole lines.
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
  __device__ SwiGluStore(const SharedLayout<T>& shared, const CUtensorMap*, const KernelArgs& args,
                         int)
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

// ---- in the finisher ----

inline constexpr int kLaneCols = 8;  // 16 bytes

// Neighbours 2·i and 2·i + 1 of a vector.
__device__ inline std::uint32_t& PairOf(uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// What both directions share: which rows and columns a lane has, and when their sums are there.
// kLanes neighbours take a strip of kLanes · kLaneCols columns of a row at a time; the finisher
// takes kSweepRows rows of a tile at a time.
template <class T, int kLanes>
class FinishBase {
 protected:
  static constexpr int kStripCols = kLanes * kLaneCols;
  static constexpr int kStrips = T::kTileCols / kStripCols;
  static constexpr int kSweepRows = 32 / kLanes * kFinisherWarps;
  static constexpr int kSweeps = kConsumerM / kSweepRows;  // of a half
  static_assert(kStrips * kStripCols == T::kTileCols);

  __device__ FinishBase(const SharedLayout<T>& shared, const KernelArgs& args)
      : shared_(shared), args_(args) {
    // Eight lanes that read shared memory together have vectors of different banks: those of one
    // row, or halves of rows four apart.
    const int warp = static_cast<int>(threadIdx.x) % kFinisherThreads / 32;
    row_ = warp * (32 / kLanes) + (kLanes == 8 ? lane_ / 8 : lane_ / 8 + lane_ / 4 % 2 * 4);
    vector_ = lane_ % kLanes;
  }

  // The lane's columns of the strip that begins at `col` of the tile, in a sweep.
  __device__ uint4 Sums(int sweep, int col) const {
    const int row = sweep % kSweeps * kSweepRows + row_;
    const int vector = col / kLaneCols + vector_;
    return hopper::LoadShared(shared_.Handed(sweep / kSweeps) + vector / 8 * kChunkBytes +
                              row * hopper::kSwizzleLine + ((vector % 8 ^ row % 8) << 4));
  }
  // Where the lane's first columns of its row of a sweep are in a matrix of the rows of x.
  template <class V>
  __device__ V* At(V* matrix, std::int64_t ld, const Tile& tile, int sweep) const {
    return matrix + (tile.row_begin + tile.m + sweep * kSweepRows + row_) * ld + tile.n +
           vector_ * kLaneCols;
  }
  // Whether it has such a row, and how many of its strips are columns of the result.
  __device__ bool HasRow(const Tile& tile, int sweep) const {
    return tile.m + sweep * kSweepRows + row_ < tile.group_rows;
  }
  __device__ int Strips(const Tile& tile) const {
    return (args_.cols - tile.n - vector_ * kLaneCols + kStripCols - 1) / kStripCols;
  }
  static __device__ int Sweeps(const Tile& tile) {
    return tile.m + kConsumerM < tile.group_rows ? 2 * kSweeps : kSweeps;
  }

  // Not through the first-level cache, and first to leave the second.
  static __device__ void Store(__nv_bfloat16* to, const uint4& v) {
    __stcs(reinterpret_cast<uint4*>(to), v);
  }

  // Calls sweep(i) for each of a tile, when its sums are there, and gives back the halves.
  template <class Sweep>
  __device__ void ForEachSweep(const Tile& tile, Sweep&& sweep) {
    const int sweeps = Sweeps(tile);
#pragma unroll 1
    for (int i = 0; i < sweeps; ++i) {
      const int half = i / kSweeps;
      if (i % kSweeps == 0) hopper::BarrierWait(shared_.HandedFull(half), phases_ >> half & 1);
      sweep(i);
      if (i % kSweeps != kSweeps - 1) continue;
      __syncwarp();
      if (lane_ == 0) hopper::BarrierArrive(shared_.HandedEmpty(half));
      phases_ ^= 1u << half;
    }
  }

  const SharedLayout<T>& shared_;
  const KernelArgs& args_;
  int lane_ = threadIdx.x % 32, row_, vector_;
  std::uint32_t phases_ = 0;
};

template <class T>
class SwiGluFinish : FinishBase<T, T::kTileCols % kChunk == 0 ? 8 : 4> {
  using Base = FinishBase<T, T::kTileCols % kChunk == 0 ? 8 : 4>;

 public:
  __device__ SwiGluFinish(const SharedLayout<T>& shared, const KernelArgs& args)
      : Base(shared, args) {}

  __device__ void Run(const Tile& tile, const Tile&, bool) {
    const SwiGluArgs& to = this->args_.swiglu;
    const int strips = this->Strips(tile);
    float next_scale = Scale(tile, 0);
    this->ForEachSweep(tile, [&](int sweep) {
      const float scale = next_scale;
      next_scale = Scale(tile, sweep + 1);
      uint4 gates[Base::kStrips], ups[Base::kStrips], acts[Base::kStrips];
#pragma unroll
      for (int strip = 0; strip < Base::kStrips; ++strip) {
        gates[strip] = this->Sums(sweep, strip * Base::kStripCols);
        ups[strip] = this->Sums(sweep, strip * Base::kStripCols + T::kTileCols);
      }
#pragma unroll
      for (int strip = 0; strip < Base::kStrips; ++strip) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 gate = UnpackBf16(PairOf(gates[strip], i));
          const float2 up = UnpackBf16(PairOf(ups[strip], i));
          PairOf(acts[strip], i) =
              PackBf16(Gated<bf16>(gate.x, gate.x, gate.x, up.x).gate * up.x * scale,
                       Gated<bf16>(gate.y, gate.y, gate.y, up.y).gate * up.y * scale);
        }
      }
      if (!this->HasRow(tile, sweep)) return;
      __nv_bfloat16* const pre = this->At(to.pre, to.ld_pre, tile, sweep);
      __nv_bfloat16* const act = this->At(to.act, to.ld_act, tile, sweep);
#pragma unroll
      for (int strip = 0; strip < Base::kStrips; ++strip) {
        if (strip >= strips) break;
        if (to.pre != nullptr) {
          this->Store(pre + strip * Base::kStripCols, gates[strip]);
          this->Store(pre + this->args_.cols + strip * Base::kStripCols, ups[strip]);
        }
        this->Store(act + strip * Base::kStripCols, acts[strip]);
      }
    });
  }

 private:
  __device__ float Scale(const Tile& tile, int sweep) const {
    const float* const scale = this->args_.swiglu.row_scale;
    if (scale == nullptr || !this->HasRow(tile, sweep)) return 1;
    return scale[tile.row_begin + tile.m + sweep * Base::kSweepRows + this->row_];
  }
};

template <class T>
class SwiGluBackwardFinish : FinishBase<T, 8> {
  using Base = FinishBase<T, 8>;

 public:
  __device__ SwiGluBackwardFinish(const SharedLayout<T>& shared, const KernelArgs& args)
      : Base(shared, args) {}

  // `ahead`: the tile that will be run next, where there is one.
  __device__ void Run(const Tile& tile, const Tile& ahead, bool has_ahead) {
    const SwiGluArgs& to = this->args_.swiglu;
    const int strips = this->Strips(tile);
    const bool narrow = tile.n + T::kTileCols > this->args_.cols;
    const int sweeps = this->Sweeps(tile);
    if (!reads_ahead_) ReadAhead(tile, 0);
    reads_ahead_ = has_ahead;
    this->ForEachSweep(tile, [&](int sweep) {
      uint4 gates[Base::kStrips], ups[Base::kStrips], dacts[Base::kStrips], acts[Base::kStrips];
      hopper::WaitCopies();
      const float scale = to.row_scale == nullptr
                              ? 1
                              : __int_as_float(hopper::LoadSharedInt(this->shared_.ScaleAhead()));
#pragma unroll
      for (int strip = 0; strip < Base::kStrips; ++strip) {
        gates[strip] = hopper::LoadShared(this->shared_.ReadAhead(2 * strip));
        ups[strip] = hopper::LoadShared(this->shared_.ReadAhead(2 * strip + 1));
        dacts[strip] = this->Sums(sweep, strip * Base::kStripCols);
      }
      // What has been read here is replaced while the rest is computed.
      const bool last = sweep + 1 == sweeps;
      if (!last || has_ahead) ReadAhead(last ? ahead : tile, last ? 0 : sweep + 1);
      if (narrow) {
        // What is no element of the result would enter the sum.
#pragma unroll
        for (int strip = 0; strip < Base::kStrips; ++strip) {
          if (strip >= strips) dacts[strip] = make_uint4(0, 0, 0, 0);
        }
      }
      float scale_sum = 0;
#pragma unroll
      for (int strip = 0; strip < Base::kStrips; ++strip) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 dact = UnpackBf16(PairOf(dacts[strip], i));
          const float2 gate = UnpackBf16(PairOf(gates[strip], i));
          const float2 up = UnpackBf16(PairOf(ups[strip], i));
          const Element x = Differentiate(dact.x, gate.x, up.x, scale, scale_sum);
          const Element y = Differentiate(dact.y, gate.y, up.y, scale, scale_sum);
          // dP in P's place, here as in memory.
          PairOf(gates[strip], i) = PackBf16(x.dgate, y.dgate);
          PairOf(ups[strip], i) = PackBf16(x.dup, y.dup);
          PairOf(acts[strip], i) = PackBf16(x.act, y.act);
        }
      }
      const bool has_row = this->HasRow(tile, sweep);
      __nv_bfloat16* const dgate = this->At(to.dpre, to.ld_dpre, tile, sweep);
      __nv_bfloat16* const dup = dgate + this->args_.cols;
      __nv_bfloat16* const act = this->At(to.act, to.ld_act, tile, sweep);
#pragma unroll
      for (int strip = 0; strip < Base::kStrips; ++strip) {
        if (!has_row || strip >= strips) break;
        this->Store(dgate + strip * Base::kStripCols, gates[strip]);
        this->Store(dup + strip * Base::kStripCols, ups[strip]);
        if (to.act != nullptr) this->Store(act + strip * Base::kStripCols, acts[strip]);
      }
      if (to.scale_parts == nullptr) return;
      for (int lanes = 1; lanes < 8; lanes *= 2) {
        scale_sum += __shfl_xor_sync(~0u, scale_sum, lanes);
      }
      if (this->vector_ != 0 || !has_row) return;
      to.scale_parts[static_cast<std::int64_t>(tile.n / T::kTileCols) * this->args_.max_rows +
                     tile.row_begin + tile.m + sweep * Base::kSweepRows + this->row_] = scale_sum;
    });
  }

 private:
  struct Element {
    float dgate, dup, act;
  };

  // Each lane what it will read itself, so that nobody waits for another; zeros where there is no
  // such element.
  __device__ void ReadAhead(const Tile tile, int sweep) const {
    const SwiGluArgs& from = this->args_.swiglu;
    const bool has_row = this->HasRow(tile, sweep);
    const int strips = has_row ? this->Strips(tile) : 0;
    const __nv_bfloat16* const gates =
        has_row ? this->At(from.pre, from.ld_pre, tile, sweep) : from.pre;
#pragma unroll
    for (int strip = 0; strip < Base::kStrips; ++strip) {
      const bool there = strip < strips;
      const __nv_bfloat16* const at = there ? gates + strip * Base::kStripCols : from.pre;
      hopper::CopyAsync16(this->shared_.ReadAhead(2 * strip), at, there);
      hopper::CopyAsync16(this->shared_.ReadAhead(2 * strip + 1), at + this->args_.cols, there);
    }
    if (from.row_scale == nullptr) return;
    const int row = tile.row_begin + tile.m + sweep * Base::kSweepRows + this->row_;
    hopper::CopyAsync4(this->shared_.ScaleAhead(), from.row_scale + (has_row ? row : 0), has_row);
  }

  static __device__ Element Differentiate(float dact, float gate, float up, float scale,
                                          float& scale_sum) {
    const GatedValues<float> v = Gated<bf16>(gate, gate, gate, up);
    const float act = v.gate * up, d = dact * scale;
    scale_sum = __fmaf_rn(dact, act, scale_sum);
    return {d * up * v.gate_slope, d * v.gate, act * scale};
  }

  bool reads_ahead_ = false;
};

}  // namespace cistron::ops::internal::sm90
