// Scalar reference of quantized_gemm.
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/quantize/block_grid.h"
#include "cistron/ops/quantized_gemm/quantized_gemm_impls.h"

namespace cistron::ops::internal {
namespace {

// One operand of the product of one group: its values and scales as a matrix [outer, summed].
struct Operand {
  std::int64_t outer, summed;
  std::vector<float> values, scales;  // of each element
  // Changes whenever another block of the summed dimension begins, alike in both operands.
  std::vector<std::int64_t> block;

  std::size_t At(std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(i * summed + j);
  }
};

float ValueOf(const Tensor& codes, std::int64_t i) {
  return codes.dtype() == DType::kE4M3 ? static_cast<float>(codes.data<e4m3>()[i])
                                       : static_cast<float>(codes.data<e5m2>()[i]);
}
float ScaleOf(const Tensor& scales, std::int64_t i) {
  return scales.dtype() == DType::kE8M0 ? static_cast<float>(scales.data<e8m0>()[i])
                                        : scales.data<float>()[i];
}

// The rows of group `group`. `sum_rows`: the rows are the summed dimension.
Operand Gather(const QuantizedTensor& q, Direction direction, std::int64_t group, bool sum_rows) {
  const BlockGrid grid = MakeBlockGrid("quantized_gemm", q, direction);
  const QuantizedCopy& copy = q.copy(direction);
  std::vector<const BlockSegment*> segments;
  std::int64_t rows = 0;
  for (const BlockSegment& s : grid.segments) {
    if (s.group != group) continue;
    segments.push_back(&s);
    rows += s.end - s.begin;
  }
  Operand out{sum_rows ? grid.cols : rows, sum_rows ? rows : grid.cols, {}, {}, {}};
  out.values.resize(static_cast<std::size_t>(rows * grid.cols));
  out.scales.resize(out.values.size());
  out.block.resize(static_cast<std::size_t>(out.summed));
  std::int64_t first = 0;  // row of the group at which a segment begins
  for (const BlockSegment* s : segments) {
    for (std::int64_t r = s->begin; r < s->end; ++r) {
      for (std::int64_t c = 0; c < grid.cols; ++c) {
        const std::int64_t row = first + r - s->begin;
        const std::size_t at = sum_rows ? out.At(c, row) : out.At(row, c);
        out.values[at] = ValueOf(copy.codes, r * grid.cols + c);
        out.scales[at] =
            ScaleOf(copy.scales, grid.ScaleRow(*s, r) * grid.scale_cols + grid.ScaleCol(c));
        out.block[static_cast<std::size_t>(sum_rows ? row : c)] =
            sum_rows ? grid.ScaleRow(*s, r) : grid.ScaleCol(c);
      }
    }
    first += s->end - s->begin;
  }
  return out;
}

// Σ over j of a[i, j]·b[n, j], as quantized_gemm.h says for the scaling.
float Dot(Scaling scaling, const Operand& a, std::int64_t i, const Operand& b, std::int64_t n) {
  float sum = 0, partial = 0;
  const bool mx = scaling == Scaling::kMxfp8 || scaling == Scaling::kMxfp8Block32x32;
  for (std::int64_t j = 0; j < a.summed; ++j) {
    const std::size_t ia = a.At(i, j), ib = b.At(n, j);
    if (mx) {
      sum += (a.values[ia] * a.scales[ia]) * (b.values[ib] * b.scales[ib]);
      continue;
    }
    partial += a.values[ia] * b.values[ib];
    const auto next = static_cast<std::size_t>(j + 1);
    if (j + 1 == a.summed ||
        (scaling != Scaling::kTensor && a.block[next] != a.block[static_cast<std::size_t>(j)])) {
      sum += partial * a.scales[ia] * b.scales[ib];
      partial = 0;
    }
  }
  return sum;
}

template <class T>
void Product(Scaling scaling, const Operand& a, const Operand& b, const Tensor& c, WriteMode mode) {
  ParallelFor(a.outer, 1, [&](std::int64_t i) {
    for (std::int64_t n = 0; n < b.outer; ++n) {
      T& to = c.data<T>()[i * c.stride(0) + n];
      const float sum = Dot(scaling, a, i, b, n);
      to = T(mode == WriteMode::kAccumulate ? static_cast<float>(to) + sum : sum);
    }
  });
}

void Run(const Context&, const QuantizedGemmProblem& p, const QuantizedTensor& a,
         const QuantizedTensor& b, const Output& c) {
  const bool wgrad = p.kind == QuantizedGemmKind::kWgrad;
  const Direction da = wgrad ? Direction::kColumnwise : Direction::kRowwise;
  const Direction db =
      p.kind == QuantizedGemmKind::kForward ? Direction::kRowwise : Direction::kColumnwise;
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < p.groups; ++e) {
    const Operand left = Gather(a, da, e, wgrad);
    const Operand right = Gather(b, db, e, p.kind != QuantizedGemmKind::kForward);
    Tensor part = c.tensor;
    if (wgrad) {
      if (c.tensor.rank() == 3) part = c.tensor.Select(e);
    } else {
      part = c.tensor.Slice(0, row, left.outer);
      row += left.outer;
    }
    if (part.dtype() == DType::kF32) {
      Product<float>(p.a_scaling, left, right, part, c.mode);
    } else {
      Product<bf16>(p.a_scaling, left, right, part, c.mode);
    }
  }
}

Support Supports(const QuantizedGemmProblem&) {
  return Support::Yes();
}

}  // namespace

QuantizedGemmImpl RefQuantizedGemm() {
  return {"ref", Supports, {Run}};
}

}  // namespace cistron::ops::internal
