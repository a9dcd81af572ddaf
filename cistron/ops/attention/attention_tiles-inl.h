// Pieces of blockwise attention, compiled once for each instruction set.
//
// Scores are kept transposed, a row a key and a lane a query. So the running maximum, the sum and
// lse of a query live in one lane and softmax needs no sum across lanes; K and V are read in their
// natural order, one broadcast value at a time; and only Q (and dO) are transposed, once a block.
// All products have one form, C[m][n] += Σ_k A(m, k)·B[k][n], with n along vectors.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "cistron/ops/exp-inl.h"

#if defined(CISTRON_OPS_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_ATTENTION_TILES_INL_H_
#undef CISTRON_OPS_ATTENTION_TILES_INL_H_
#else
#define CISTRON_OPS_ATTENTION_TILES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {

// Queries that one pair of vectors holds: the unit in which masked parts are skipped.
inline constexpr std::int64_t kPanel = 2 * kLanes;
// Rows of C in registers: 12×2 accumulators of 32 registers (AVX-512), 6×2 of 16 (AVX2).
inline constexpr int kMaxRows = HWY_TARGET == HWY_AVX3 ? 12 : 6;

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;

// Strides of A: A(m, k) = a[m·row + k·depth].
struct Strides {
  std::int64_t row;
  std::int64_t depth;
};

// What is in C before: nothing, or values that are multiplied by a factor a column (null: 1).
struct Start {
  bool accumulate = false;
  const float* column_scale = nullptr;
};

// kRows × (kVecs vectors) of C. kUnitRows: strides.row is 1.
template <int kRows, int kVecs, bool kUnitRows>
HWY_NOINLINE void MultiplyTile(std::int64_t depth, const float* HWY_RESTRICT a, Strides strides,
                               const float* HWY_RESTRICT b, std::int64_t ldb, float* HWY_RESTRICT c,
                               std::int64_t ldc, Start start) {
  const FloatTag d;
  FloatVec sum[kRows][kVecs];
  if (start.accumulate) {
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        sum[m][v] = hn::LoadU(d, c + m * ldc + v * kLanes);
        if (start.column_scale != nullptr) {
          sum[m][v] = hn::Mul(sum[m][v], hn::LoadU(d, start.column_scale + v * kLanes));
        }
      }
    }
  } else {
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[m][v] = hn::Zero(d);
    }
  }
  // One pointer for every three rows: the other two are its offsets by one and two strides, which
  // an address holds, so that twelve rows need five registers.
  const std::int64_t row = kUnitRows ? 1 : strides.row;
  const std::int64_t step = kUnitRows ? strides.depth : 1;
  constexpr int kGroups = (kRows + 2) / 3;
  const float* group[kGroups];
  for (int i = 0; i < kGroups; ++i) group[i] = a + 3 * i * row;
  for (std::int64_t k = 0; k < depth; ++k) {
    FloatVec bv[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) bv[v] = hn::LoadU(d, b + v * kLanes);
    b += ldb;
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      const FloatVec av = hn::Set(d, group[m / 3][m % 3 * row]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[m][v] = hn::MulAdd(av, bv[v], sum[m][v]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kGroups; ++i) group[i] += step;
  }
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[m][v], d, c + m * ldc + v * kLanes);
  }
}

using TileFunction = void (*)(std::int64_t, const float*, Strides, const float*, std::int64_t,
                              float*, std::int64_t, Start);
template <int kVecs, bool kUnitRows, int... kRowsMinusOne>
constexpr std::array<TileFunction, sizeof...(kRowsMinusOne)> TileTable(
    std::integer_sequence<int, kRowsMinusOne...>) {
  return {MultiplyTile<kRowsMinusOne + 1, kVecs, kUnitRows>...};
}

// Any number of rows of C, cut evenly into tiles; kVecs vectors of columns. Without kUnitRows
// strides.depth is 1.
template <int kVecs, bool kUnitRows>
void Multiply(std::int64_t rows, std::int64_t depth, const float* a, Strides strides,
              const float* b, std::int64_t ldb, float* c, std::int64_t ldc, Start start) {
  static constexpr auto kTable =
      TileTable<kVecs, kUnitRows>(std::make_integer_sequence<int, kMaxRows>());
  for (std::int64_t tiles = (rows + kMaxRows - 1) / kMaxRows; rows > 0; --tiles) {
    const std::int64_t n = (rows + tiles - 1) / tiles;
    kTable[static_cast<std::size_t>(n - 1)](depth, a, strides, b, ldb, c, ldc, start);
    a += n * strides.row;
    c += n * ldc;
    rows -= n;
  }
}

// C of any whole number of vectors of columns; strides.depth is 1.
HWY_INLINE void MultiplyWide(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                             const float* a, Strides strides, const float* b, std::int64_t ldb,
                             float* c, std::int64_t ldc, Start start) {
  std::int64_t n = 0;
  for (; n + 2 * kLanes <= columns; n += 2 * kLanes) {
    Multiply<2, false>(rows, depth, a, strides, b + n, ldb, c + n, ldc, start);
  }
  if (n < columns) Multiply<1, false>(rows, depth, a, strides, b + n, ldb, c + n, ldc, start);
}

// to[r][0, width) = f32 of from[r][…]; columns up to `padded` are set to 0.
template <class T>
void LoadRows(const T* from, std::int64_t from_stride, std::int64_t rows, std::int64_t width,
              float* to, std::int64_t padded) {
  for (std::int64_t r = 0; r < rows; ++r, from += from_stride, to += padded) {
    std::int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) StoreFloat(LoadFloat(from + c), to + c);
    for (; c < width; ++c) to[c] = static_cast<float>(from[c]);
    for (; c < padded; ++c) to[c] = 0.0f;
  }
}

// to[r][0, width) (= or +=) from[r][0, width).
template <class T>
void StoreRows(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t width,
               T* to, std::int64_t to_stride, bool accumulate) {
  for (std::int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
    std::int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
      FloatVec v = LoadFloat(from + c);
      if (accumulate) v = hn::Add(LoadFloat(to + c), v);
      StoreFloat(v, to + c);
    }
    for (; c < width; ++c) {
      to[c] = T(accumulate ? static_cast<float>(to[c]) + from[c] : from[c]);
    }
  }
}

// to[c][r] = factor · from[r][c], in 4×4 blocks where the instruction set has four lanes.
HWY_INLINE void Transpose(const float* from, std::int64_t from_stride, std::int64_t rows,
                          std::int64_t columns, float factor, float* to, std::int64_t to_stride) {
  std::int64_t whole_rows = 0, whole_columns = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d4;
  const hn::Repartition<std::uint64_t, decltype(d4)> d2;
  const auto scale = hn::Set(d4, factor);
  whole_rows = rows / 4 * 4;
  whole_columns = columns / 4 * 4;
  for (std::int64_t r = 0; r < whole_rows; r += 4) {
    for (std::int64_t c = 0; c < whole_columns; c += 4) {
      const float* in = from + r * from_stride + c;
      const auto a = hn::Mul(scale, hn::LoadU(d4, in));
      const auto b = hn::Mul(scale, hn::LoadU(d4, in + from_stride));
      const auto e = hn::Mul(scale, hn::LoadU(d4, in + 2 * from_stride));
      const auto f = hn::Mul(scale, hn::LoadU(d4, in + 3 * from_stride));
      const auto ab_low = hn::BitCast(d2, hn::InterleaveLower(d4, a, b));
      const auto ab_high = hn::BitCast(d2, hn::InterleaveUpper(d4, a, b));
      const auto ef_low = hn::BitCast(d2, hn::InterleaveLower(d4, e, f));
      const auto ef_high = hn::BitCast(d2, hn::InterleaveUpper(d4, e, f));
      float* out = to + c * to_stride + r;
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab_low, ef_low)), d4, out);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab_low, ef_low)), d4, out + to_stride);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab_high, ef_high)), d4,
                 out + 2 * to_stride);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab_high, ef_high)), d4,
                 out + 3 * to_stride);
    }
  }
#endif
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      to[c * to_stride + r] = factor * from[r * from_stride + c];
    }
  }
}

// Which of the keys [key, key + keys) the queries [first, last] see, as rows [low, high) of a tile,
// and whether some of those pairs are masked. `window` 0 means none. All indices in the sequence.
struct Visible {
  std::int64_t low, high;
  bool masked;
};
inline Visible VisibleKeys(std::int64_t key, std::int64_t keys, std::int64_t first,
                           std::int64_t last, std::int64_t window) {
  Visible v{0, std::min(keys, last + 1 - key), false};
  if (window > 0) v.low = std::max<std::int64_t>(0, first - window + 1 - key);
  v.masked = key + v.high - 1 > first || (window > 0 && key + v.low < last - window + 1);
  return v;
}

// Lanes of queries first + 0, 1, … that see a key: first + lane ≥ key and first + lane < key +
// window.
HWY_INLINE hn::Mask<FloatTag> SeesKey(std::int64_t first, std::int64_t key, std::int64_t window) {
  const FloatTag d;
  const FloatVec lane = hn::Iota(d, 0);
  const std::int64_t from = std::clamp<std::int64_t>(key - first, 0, kLanes);
  const std::int64_t to =
      window == 0 ? kLanes : std::clamp<std::int64_t>(key + window - first, 0, kLanes);
  return hn::And(hn::Ge(lane, hn::Set(d, static_cast<float>(from))),
                 hn::Lt(lane, hn::Set(d, static_cast<float>(to))));
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
