// Scalar reference of quantize.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cistron/ops/quantize/quantize_impls.h"

namespace cistron::ops::internal {
namespace {

// Columns and rows of one block.
struct Block {
  std::int64_t row_begin, row_end, col_begin, col_end;
  std::int64_t scale;  // its index in the scales
};

// Calls f(block) for every block; kTensor's are the rows of a segment.
template <class F>
void ForEachBlock(const BlockGrid& grid, F&& f) {
  for (const BlockSegment& s : grid.segments) {
    if (grid.block_rows == 0) {
      f(Block{s.begin, s.end, 0, grid.cols, s.group});
      continue;
    }
    for (std::int64_t r = s.begin; r < s.end; r += grid.block_rows) {
      for (std::int64_t part = 0; part < grid.cols; part += grid.part_cols) {
        const std::int64_t part_end = part + grid.part_cols;
        for (std::int64_t c = part; c < part_end; c += grid.block_cols) {
          f(Block{r, std::min(r + grid.block_rows, s.end), c,
                  std::min(c + grid.block_cols, part_end),
                  grid.ScaleRow(s, r) * grid.scale_cols + grid.ScaleCol(c)});
        }
      }
    }
  }
}

template <class T, class F>
void ForEachElement(const Tensor& t, const Block& b, F&& f) {
  for (std::int64_t r = b.row_begin; r < b.row_end; ++r) {
    for (std::int64_t c = b.col_begin; c < b.col_end; ++c)
      f(t.data<T>()[r * t.stride(0) + c], r, c);
  }
}

// Largest magnitude of a block: NaN elements are skipped or, with `propagate`, make it NaN.
template <class T>
float Amax(const Tensor& x, const Block& b, bool propagate) {
  float amax = 0;
  bool nan = false;
  ForEachElement<T>(x, b, [&](T value, std::int64_t, std::int64_t) {
    const float v = std::abs(static_cast<float>(value));
    nan = nan || std::isnan(v);
    if (v > amax) amax = v;
  });
  return nan && propagate ? std::numeric_limits<float>::quiet_NaN() : amax;
}

// 2^(127 − code); 2^-127 for 254; NaN for 255.
float Multiplier(e8m0 code) {
  if (code.bits == 0xff) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0f, 127 - static_cast<int>(code.bits));
}

template <class T, class Q>
void Encode(const QuantizeProblem& p, const BlockGrid& grid, bool power_of_two, const Tensor& x,
            const Tensor& factor, const QuantizedCopy& out) {
  ForEachBlock(grid, [&](const Block& b) {
    float multiplier = 0;
    if (out.scales.dtype() == DType::kE8M0) {
      // fl32(1 / 448) and fl32(1 / 57344).
      const e8m0 code = e8m0::RoundUp(Amax<T>(x, b, false) * (1.0f / Q::kMax));
      out.scales.data<e8m0>()[b.scale] = code;
      multiplier = Multiplier(code);
    } else {
      multiplier = factor ? factor.data<float>()[b.scale]
                          : ScaleFromAmax(Amax<T>(x, b, true), p.format, power_of_two);
      out.scales.data<float>()[b.scale] = 1.0f / multiplier;
    }
    ForEachElement<T>(x, b, [&](T value, std::int64_t r, std::int64_t c) {
      out.codes.data<Q>()[r * grid.cols + c] = Q(static_cast<float>(value) * multiplier);
    });
  });
}

template <class T, class Q>
void Decode(const BlockGrid& grid, const QuantizedCopy& q, const Output& y) {
  const bool e8 = q.scales.dtype() == DType::kE8M0;
  ForEachBlock(grid, [&](const Block& b) {
    const float scale =
        e8 ? static_cast<float>(q.scales.data<e8m0>()[b.scale]) : q.scales.data<float>()[b.scale];
    ForEachElement<Q>(q.codes, b, [&](Q code, std::int64_t r, std::int64_t c) {
      T& to = y.tensor.data<T>()[r * y.tensor.stride(0) + c];
      const float value = static_cast<float>(code) * scale;
      to = T(y.mode == WriteMode::kAccumulate ? static_cast<float>(to) + value : value);
    });
  });
}

// Calls f with tags of the high-precision type and of the code type.
template <class F>
void Typed(DType dtype, DType format, F&& f) {
  const auto with = [&](auto tag) {
    if (format == DType::kE4M3) {
      f(tag, TypeTag<e4m3>{});
    } else {
      f(tag, TypeTag<e5m2>{});
    }
  };
  if (dtype == DType::kF32) {
    with(TypeTag<float>{});
  } else {
    with(TypeTag<bf16>{});
  }
}

Support Supports(const QuantizeProblem&) {
  return Support::Yes();
}

void RunAmax(const Context&, const BlockGrid& grid, const Tensor& x, const Tensor& amax) {
  std::fill_n(amax.data<float>(), amax.numel(), 0.0f);
  Typed(x.dtype(), DType::kE4M3, [&](auto tag, auto) {
    using T = typename decltype(tag)::type;
    ForEachBlock(grid, [&](const Block& b) {
      // Parts of one group follow each other; NaN stays.
      const float value = Amax<T>(x, b, true);
      float& to = amax.data<float>()[b.scale];
      if (!std::isnan(to) && !(value <= to)) to = value;
    });
  });
}

void RunQuantize(const Context&, const QuantizeProblem& p, std::span<const QuantizeTarget> copies,
                 bool power_of_two, const Tensor& x, const Tensor& factor) {
  for (const QuantizeTarget& target : copies) {
    if (p.scaling == Scaling::kTensor) {  // groups without rows have a scale too
      for (std::int64_t g = 0; g < target.grid.groups; ++g) {
        target.copy.scales.data<float>()[g] = 1.0f / factor.data<float>()[g];
      }
    }
    Typed(p.dtype, p.format, [&](auto t, auto q) {
      Encode<typename decltype(t)::type, typename decltype(q)::type>(p, target.grid, power_of_two,
                                                                     x, factor, target.copy);
    });
  }
}

void RunDequantize(const Context&, const QuantizeProblem& p, const BlockGrid& grid,
                   const QuantizedCopy& q, const Output& y) {
  Typed(p.dtype, p.format, [&](auto t, auto code) {
    Decode<typename decltype(t)::type, typename decltype(code)::type>(grid, q, y);
  });
}

}  // namespace

QuantizeImpl RefQuantize() {
  return {"ref", Supports, {RunAmax, RunQuantize, RunDequantize}};
}

}  // namespace cistron::ops::internal
