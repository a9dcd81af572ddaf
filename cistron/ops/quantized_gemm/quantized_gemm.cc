// Argument checks and choice of the implementation of quantized_gemm.
#include "cistron/ops/quantized_gemm/quantized_gemm.h"

#include <array>

#include "cistron/ops/op_work.h"
#include "cistron/ops/quantized_gemm/quantized_gemm_impls.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops {
namespace {

// Scalings that may meet in one product.
int Family(Scaling s) {
  switch (s) {
    case Scaling::kTensor: return 0;
    case Scaling::kBlock1x128:
    case Scaling::kBlock128x128: return 1;
    case Scaling::kMxfp8:
    case Scaling::kMxfp8Block32x32: return 2;
  }
  return -1;
}

void CheckPair(std::string_view op, const QuantizedTensor& a, Direction da,
               const QuantizedTensor& b, Direction db) {
  CISTRON_CHECK(a.copy(da), "{}: the first operand ({}) has no {} copy", op, Describe(a),
                da == Direction::kRowwise ? "row-wise" : "column-wise");
  CISTRON_CHECK(b.copy(db), "{}: the second operand ({}) has no {} copy", op, Describe(b),
                db == Direction::kRowwise ? "row-wise" : "column-wise");
  CISTRON_CHECK(Family(a.layout.scaling) == Family(b.layout.scaling),
                "{}: scalings do not fit: {} and {}", op, Describe(a), Describe(b));
  const auto parts = [](const QuantizedTensor& q, Direction d) {
    return d == Direction::kRowwise ? q.layout.col_parts : q.layout.row_parts;
  };
  CISTRON_CHECK(a.layout.scaling == Scaling::kTensor || parts(a, da) == parts(b, db),
                "{}: blocks restart in {} parts of the summed dimension of {} and in {} of {}", op,
                parts(a, da), Describe(a), parts(b, db), Describe(b));
}

void CheckResult(std::string_view op, const Output& c, const Shape& shape) {
  CISTRON_CHECK(c.tensor && c.tensor.shape() == shape &&
                    (c.tensor.dtype() == DType::kF32 || c.tensor.dtype() == DType::kBF16) &&
                    (c.tensor.dim(-1) <= 1 || c.tensor.stride(-1) == 1),
                "{}: the result is {}, expected f32 or bf16 {} with contiguous rows", op,
                Describe(c.tensor), ToString(shape));
}

// Forward and dgrad.
void RunRows(const Context& ctx, std::string_view op, QuantizedGemmKind kind,
             const QuantizedTensor& a, const QuantizedTensor& w, const Output& c) {
  const bool forward = kind == QuantizedGemmKind::kForward;
  const bool grouped = static_cast<bool>(a.split_sizes);
  CISTRON_CHECK(a.shape.rank() == 2 && w.shape.rank() == (grouped ? 3 : 2) &&
                    (!grouped || w.shape[0] == a.num_groups()),
                "{}: shapes do not fit: {}{}, w {}", op, Describe(a),
                grouped ? fmt::format(" in {} groups", a.num_groups()) : "", Describe(w));
  CheckPair(op, a, Direction::kRowwise, w, forward ? Direction::kRowwise : Direction::kColumnwise);
  const int last = w.shape.rank() - 1;
  const std::int64_t n = w.shape[last - 1], k = w.shape[last];
  CISTRON_CHECK(a.shape[1] == (forward ? k : n), "{}: shapes do not fit: {}, w {}", op, Describe(a),
                Describe(w));
  CheckResult(op, c, {a.shape[0], forward ? n : k});
  const QuantizedGemmProblem problem{kind,
                                     a.layout.scaling,
                                     w.layout.scaling,
                                     a.layout.format,
                                     w.layout.format,
                                     c.tensor.dtype(),
                                     a.num_groups(),
                                     a.shape[0],
                                     n,
                                     k};
  AnnounceWork(ctx, ProductFlops(problem.max_rows, problem.n, problem.k));
  Select(ctx, "quantized_gemm", QuantizedGemmImpls(), problem).run(ctx, problem, a, w, c);
}

}  // namespace

std::span<const QuantizedGemmImpl> QuantizedGemmImpls() {
  static const std::array impls = {internal::CpuQuantizedGemm(), internal::RefQuantizedGemm()};
  return impls;
}

void QuantizedGemmForward(const Context& ctx, const QuantizedTensor& x, const QuantizedTensor& w,
                          const Output& y) {
  RunRows(ctx, "quantized_gemm forward", QuantizedGemmKind::kForward, x, w, y);
}

void QuantizedGemmDgrad(const Context& ctx, const QuantizedTensor& dy, const QuantizedTensor& w,
                        const Output& dx) {
  RunRows(ctx, "quantized_gemm dgrad", QuantizedGemmKind::kDgrad, dy, w, dx);
}

void QuantizedGemmWgrad(const Context& ctx, const QuantizedTensor& dy, const QuantizedTensor& x,
                        const Output& dw) {
  constexpr std::string_view kOp = "quantized_gemm wgrad";
  CISTRON_CHECK(dy.shape.rank() == 2 && x.shape.rank() == 2 && dy.shape[0] == x.shape[0] &&
                    static_cast<bool>(dy.split_sizes) == static_cast<bool>(x.split_sizes),
                "{}: shapes do not fit: dy {}, x {}", kOp, Describe(dy), Describe(x));
  CheckPair(kOp, dy, Direction::kColumnwise, x, Direction::kColumnwise);
  const std::int64_t n = dy.shape[1], k = x.shape[1];
  if (dy.split_sizes) {
    CISTRON_CHECK(
        RowOffsets(kOp, dy.split_sizes, dy.shape[0]) == RowOffsets(kOp, x.split_sizes, x.shape[0]),
        "{}: dy and x have different split_sizes", kOp);
    CheckResult(kOp, dw, {dy.num_groups(), n, k});
  } else {
    CheckResult(kOp, dw, {n, k});
  }
  const QuantizedGemmProblem problem{QuantizedGemmKind::kWgrad,
                                     dy.layout.scaling,
                                     x.layout.scaling,
                                     dy.layout.format,
                                     x.layout.format,
                                     dw.tensor.dtype(),
                                     dy.num_groups(),
                                     dy.shape[0],
                                     n,
                                     k};
  AnnounceWork(ctx, ProductFlops(problem.max_rows, problem.n, problem.k));
  Select(ctx, "quantized_gemm", QuantizedGemmImpls(), problem).run(ctx, problem, dy, x, dw);
}

}  // namespace cistron::ops
