// quantize on the CPU: the tensor is cut into tiles, each a band of rows that blocks do not cross
// and a range of columns; every copy of a tile is made while its values are in a cache.
// A tile's codes and scales depend on nothing but its values, so any number of threads gives the
// same bits.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/quantize/copy_decoder.h"
#include "cistron/ops/quantize/mxfp8_bands.h"
#include "cistron/ops/quantize/quantize_impls.h"
#include "cistron/ops/quantize/quantize_rows.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kMaxCols = 1024;          // of a tile: its scales lie on the stack
constexpr std::int64_t kTileElements = 1 << 17;  // 512 KiB of f32
constexpr std::int64_t kGrain = 1 << 14;         // elements a thread takes at least
constexpr std::int64_t kBandsOfThread = 4;       // without which tiles are narrow
constexpr std::int64_t kTensorBand = 32;         // rows of a tile where blocks set no bounds

// Rows [row_begin, row_end) of a segment and columns [col_begin, col_end) of a part.
struct Tile {
  std::size_t segment;
  std::int64_t row_begin, row_end, col_begin, col_end;
};

// Tiles in memory order by bands.
class Tiles {
 public:
  // With `narrow`, a tile stays in the second-level cache and has at most kMaxCols columns;
  // otherwise it is as wide as the tensor, which memory likes best, if there are bands enough for
  // all threads.
  Tiles(const BlockGrid& grid, std::int64_t band, bool narrow) {
    for (std::size_t s = 0; s < grid.segments.size(); ++s) {
      const BlockSegment& segment = grid.segments[s];
      for (std::int64_t r = segment.begin; r < segment.end; r += band) {
        bands_.push_back({s, r, std::min(r + band, segment.end)});
      }
    }
    std::int64_t widest = std::max(grid.part_cols, std::int64_t{1});
    if (narrow || static_cast<std::int64_t>(bands_.size()) < kBandsOfThread * NumThreads()) {
      widest = std::clamp(kTileElements / band, std::int64_t{256}, kMaxCols);
    }
    for (std::int64_t part = 0; part < grid.cols; part += grid.part_cols) {
      for (std::int64_t c = 0; c < grid.part_cols; c += widest) {
        columns_.push_back({part + c, part + std::min(c + widest, grid.part_cols)});
      }
    }
    grain_ = 1 + kGrain / (band * std::min(widest, grid.cols) + 1);
  }

  // Calls f(tile) for every tile, in parallel.
  template <class F>
  void ForEach(F&& f) const {
    const auto columns = static_cast<std::int64_t>(columns_.size());
    ParallelFor(static_cast<std::int64_t>(bands_.size()) * columns, grain_, [&](std::int64_t i) {
      const Band& band = bands_[static_cast<std::size_t>(i / columns)];
      const Columns& cols = columns_[static_cast<std::size_t>(i % columns)];
      f(Tile{band.segment, band.begin, band.end, cols.begin, cols.end});
    });
  }

 private:
  struct Band {
    std::size_t segment;
    std::int64_t begin, end;
  };
  struct Columns {
    std::int64_t begin, end;
  };
  std::vector<Columns> columns_;
  std::vector<Band> bands_;
  std::int64_t grain_ = 1;
};

template <class T>
const T* At(const Tensor& t, std::int64_t row, std::int64_t col) {
  return t.data<T>() + row * t.stride(0) + col;
}
std::uint8_t* CodesAt(const QuantizeTarget& to, std::int64_t row, std::int64_t col) {
  return static_cast<std::uint8_t*>(to.copy.codes.raw()) + row * to.grid.cols + col;
}

std::uint8_t* ScaleBytes(const QuantizeTarget& to) {
  return static_cast<std::uint8_t*>(to.copy.scales.raw());
}

struct Job {
  const QuantizeProblem& problem;
  bool power_of_two;
  const Tensor& x;
  const Tensor& factor;
};

bool IsMx(const Job& job) {
  return job.problem.scaling == Scaling::kMxfp8 || job.problem.scaling == Scaling::kMxfp8Block32x32;
}

// Blocks along the rows of the tile.
template <class T>
void QuantizeRows(const Job& job, const Tile& tile, const QuantizeTarget& to) {
  const BlockGrid& grid = to.grid;
  const BlockSegment& segment = grid.segments[tile.segment];
  std::int64_t n = tile.col_end - tile.col_begin, step = 1;
  // Rows of whole blocks without gaps are one long row.
  const bool joined = IsMx(job) && n == grid.cols && n % BlockSize(Scaling::kMxfp8) == 0 &&
                      (job.x.stride(0) == n || tile.row_end - tile.row_begin == 1);
  if (joined) {
    step = tile.row_end - tile.row_begin;
    n *= step;
  }
  for (std::int64_t r = tile.row_begin; r < tile.row_end; r += step) {
    const T* x = At<T>(job.x, r, tile.col_begin);
    const std::int64_t scale_at =
        grid.ScaleRow(segment, r) * grid.scale_cols + grid.ScaleCol(tile.col_begin);
    std::uint8_t* codes = CodesAt(to, r, tile.col_begin);
    if (IsMx(job)) {
      QuantizeRowMxfp8(x, n, job.problem.format, codes, ScaleBytes(to) + scale_at);
    } else {
      QuantizeRowF32(x, n, BlockSize(job.problem.scaling), job.problem.format, job.power_of_two,
                     codes, to.copy.scales.data<float>() + scale_at);
    }
  }
}

// A value of the largest magnitude of each column of a tile.
template <class T>
using ColumnValues = std::array<T, kMaxCols>;

// Blocks with scales in f32 that span the rows of the tile, one or block_cols columns wide.
// `ahead`: from this tile's values to the next one's.
template <class T>
void QuantizeColumns(const Job& job, const Tile& tile, std::int64_t ahead,
                     const QuantizeTarget& to) {
  const BlockGrid& grid = to.grid;
  const BlockSegment& segment = grid.segments[tile.segment];
  const DType format = job.problem.format;
  const std::int64_t n = tile.col_end - tile.col_begin;
  float* scales = to.copy.scales.data<float>() +
                  grid.ScaleRow(segment, tile.row_begin) * grid.scale_cols +
                  grid.ScaleCol(tile.col_begin);
  ColumnValues<T> largest;
  std::fill_n(largest.begin(), n, T(0.0f));
  for (std::int64_t r = tile.row_begin; r < tile.row_end; ++r) {
    MaxMagnitudes(At<T>(job.x, r, tile.col_begin), n, largest.data());
  }
  const bool finite = MaxMagnitude(largest.data(), n) < kInfMagnitude;
  std::array<float, kMaxCols> multipliers;
  if (grid.block_cols == 1) {
    F32Scales(largest.data(), n, format, job.power_of_two, scales, multipliers.data());
  } else {
    for (std::int64_t begin = 0, block = 0; begin < n; begin += grid.block_cols, ++block) {
      const std::int64_t end = std::min(begin + grid.block_cols, n);
      const float most = AmaxOf(MaxMagnitude(largest.data() + begin, end - begin));
      const float multiplier = ScaleFromAmax(most, format, job.power_of_two);
      scales[block] = 1.0f / multiplier;
      const std::int64_t padded = (end + kMultiplierPad - 1) / kMultiplierPad * kMultiplierPad;
      std::fill(multipliers.begin() + begin, multipliers.begin() + padded, multiplier);
    }
  }
  for (std::int64_t r = tile.row_begin; r < tile.row_end; ++r) {
    EncodeRow(At<T>(job.x, r, tile.col_begin), n, format, multipliers.data(), finite, ahead,
              CodesAt(to, r, tile.col_begin));
  }
}

// Both copies of MXFP8, or those whose blocks span rows alone.
template <class T>
void QuantizeMxfp8(const Job& job, const Tile& tile, const QuantizeTarget* rows,
                   const QuantizeTarget& columns) {
  const auto copy = [&](const QuantizeTarget& to) {
    const BlockGrid& grid = to.grid;
    const std::int64_t scale = grid.ScaleRow(grid.segments[tile.segment], tile.row_begin);
    return BandCopy{CodesAt(to, tile.row_begin, tile.col_begin), grid.cols,
                    ScaleBytes(to) + scale * grid.scale_cols + grid.ScaleCol(tile.col_begin),
                    grid.scale_cols};
  };
  QuantizeBandMxfp8(Band<T>{At<T>(job.x, tile.row_begin, tile.col_begin), job.x.stride(0),
                            tile.row_end - tile.row_begin, tile.col_end - tile.col_begin},
                    job.problem.format, columns.grid.block_cols != 1,
                    rows == nullptr ? BandCopy{} : copy(*rows), copy(columns));
}

template <class T>
void QuantizeTile(const Job& job, const Tile& tile, std::int64_t ahead,
                  std::span<const QuantizeTarget> copies) {
  const QuantizeTarget* columns = nullptr;  // the copy whose blocks span rows
  const QuantizeTarget* rows = nullptr;
  for (const QuantizeTarget& to : copies) (to.grid.block_rows == 1 ? rows : columns) = &to;
  const std::int64_t n = tile.col_end - tile.col_begin;
  const DType format = job.problem.format;
  if (job.problem.scaling == Scaling::kTensor) {
    const std::int64_t group = columns->grid.segments[tile.segment].group;
    const float multiplier = job.factor.data<float>()[group];
    for (std::int64_t r = tile.row_begin; r < tile.row_end; ++r) {
      EncodeRow(At<T>(job.x, r, tile.col_begin), n, format, multiplier,
                CodesAt(*columns, r, tile.col_begin));
    }
    return;
  }
  if (columns != nullptr && IsMx(job)) return QuantizeMxfp8<T>(job, tile, rows, *columns);
  if (rows != nullptr) QuantizeRows<T>(job, tile, *rows);
  if (columns != nullptr) QuantizeColumns<T>(job, tile, ahead, *columns);
}

template <class F>
void WithValues(DType dtype, F&& f) {
  if (dtype == DType::kF32) {
    f(TypeTag<float>{});
  } else {
    f(TypeTag<bf16>{});
  }
}

Support Supports(const QuantizeProblem& p) {
  if (p.dtype == DType::kF32 || p.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(p.dtype)));
}

void RunAmax(const Context&, const BlockGrid& grid, const Tensor& x, const Tensor& amax) {
  // Magnitudes are ordered as integers, NaN above all: one maximum for each segment and thread.
  std::vector<std::uint32_t> largest(static_cast<std::size_t>(grid.groups), 0u);
  WithValues(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Tiles(grid, kTensorBand, false).ForEach([&](const Tile& tile) {
      std::uint32_t most = 0;
      for (std::int64_t r = tile.row_begin; r < tile.row_end; ++r) {
        most = std::max(most,
                        MaxMagnitude(At<T>(x, r, tile.col_begin), tile.col_end - tile.col_begin));
      }
      std::atomic_ref<std::uint32_t> to(
          largest[static_cast<std::size_t>(grid.segments[tile.segment].group)]);
      std::uint32_t before = to.load(std::memory_order_relaxed);
      while (before < most && !to.compare_exchange_weak(before, most)) {
      }
    });
  });
  for (std::int64_t g = 0; g < grid.groups; ++g) {
    amax.data<float>()[g] = AmaxOf(largest[static_cast<std::size_t>(g)]);
  }
}

void RunQuantize(const Context&, const QuantizeProblem& p, std::span<const QuantizeTarget> copies,
                 bool power_of_two, const Tensor& x, const Tensor& factor) {
  if (copies.empty()) return;
  std::int64_t band = kTensorBand;
  for (const QuantizeTarget& to : copies) {
    band = std::max(band, to.grid.block_rows);
    if (p.scaling != Scaling::kTensor) continue;
    for (std::int64_t g = 0; g < to.grid.groups; ++g) {  // groups without rows have a scale too
      to.copy.scales.data<float>()[g] = 1.0f / factor.data<float>()[g];
    }
  }
  const Job job{p, power_of_two, x, factor};
  // The scales of columns lie on the stack, unless they are MXFP8's.
  const bool narrow = !IsMx(job) && p.scaling != Scaling::kTensor &&
                      std::any_of(copies.begin(), copies.end(),
                                  [](const QuantizeTarget& to) { return to.grid.block_rows != 1; });
  const std::int64_t cols = copies.front().grid.cols;
  WithValues(p.dtype, [&](auto tag) {
    Tiles(copies.front().grid, band, narrow).ForEach([&](const Tile& tile) {
      const std::int64_t rows_ahead = (tile.row_end - tile.row_begin) * x.stride(0);
      const std::int64_t cols_ahead = tile.col_end - tile.col_begin;
      const std::int64_t ahead = tile.col_end < cols ? cols_ahead : rows_ahead - tile.col_begin;
      QuantizeTile<typename decltype(tag)::type>(job, tile, ahead, copies);
    });
  });
}

void RunDequantize(const Context&, const QuantizeProblem& p, const BlockGrid& grid,
                   const QuantizedCopy& q, const Output& y) {
  const CopyDecoder decoder(grid, q, p.format);
  WithValues(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Tiles(grid, std::max(kTensorBand, grid.block_rows), false).ForEach([&](const Tile& t) {
      decoder.Decode(
          t.row_begin, t.row_end, t.col_begin, t.col_end, y.mode == WriteMode::kAccumulate,
          y.tensor.data<T>() + t.row_begin * y.tensor.stride(0) + t.col_begin, y.tensor.stride(0));
    });
  });
}

}  // namespace

QuantizeImpl CpuQuantize() {
  return {"cpu", Supports, {RunAmax, RunQuantize, RunDequantize}};
}

}  // namespace cistron::ops::internal
