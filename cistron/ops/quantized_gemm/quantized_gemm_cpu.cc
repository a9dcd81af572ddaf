// quantized_gemm on the CPU: decoded panels multiplied by GemmCpu.
//
// The product runs in bf16 where the processor multiplies bf16 and decoding to it is exact, which
// is so for almost all data; otherwise in f32. Weights are decoded once, for as many groups at a
// time as a bounded buffer holds, since the tasks of a group share them; each task decodes its own
// panels of the other operand while they fit the cache.
//
// The processor's bf16 product takes subnormal operands for zero and drops subnormal sums (Intel's
// manual on VDPBF16PS: DAZ and FTZ, whatever MXCSR says). So bf16 is chosen only where no value and
// no product of two values is below 2^-126: every sum is then a multiple of a normal number.
#include <algorithm>
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/transpose.h"
#include "cistron/ops/grouped_gemm/grouped_tasks.h"
#include "cistron/ops/quantize/copy_decoder.h"
#include "cistron/ops/quantized_gemm/quantized_gemm_impls.h"
#include "cistron/ops/quantized_gemm/scale_sums.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kPanelElements = 1 << 18;   // half a MiB of bf16
constexpr std::int64_t kMinPanelRows = 128;        // below, the product packs more than it computes
constexpr std::int64_t kWeightElements = 1 << 24;  // of weights decoded at a time: 64 MiB of f32
constexpr std::int64_t kWeightRows = 64;           // of a weight that a thread decodes at a time
constexpr std::int64_t kPadding = 16;  // elements between rows that would lie a power of two apart

// Exponents of the smallest subnormal and of the top of the largest value of a format.
int SmallestExponent(DType format) {
  return format == DType::kE4M3 ? -9 : -16;
}
int LargestExponent(DType format) {
  return format == DType::kE4M3 ? 8 : 15;
}

constexpr int kMinNormal = -126, kMaxNormal = 127;  // of bf16

// See the head of this file.
bool DecodesToBf16(const QuantizedGemmProblem& p, const CopyDecoder& a, const CopyDecoder& b) {
  if (!HasBf16Product()) return false;
  if (p.a_scaling == Scaling::kTensor) return true;  // codes alone
  int smallest = 0;
  for (const CopyDecoder* operand : {&a, &b}) {
    const int lowest = kMinNormal - SmallestExponent(operand->format());
    const CopyDecoder::Range range = operand->ScaleRange(lowest);
    if (!range.powers_of_two) return false;
    if (range.min_exponent > range.max_exponent) continue;  // zero throughout
    if (range.min_exponent < lowest ||
        range.max_exponent > kMaxNormal - LargestExponent(operand->format())) {
      return false;
    }
    smallest += range.min_exponent + SmallestExponent(operand->format());
  }
  return smallest >= kMinNormal;
}

// One call: T is the type of the decoded operands.
template <class T>
class Product {
 public:
  Product(const Context& ctx, const QuantizedGemmProblem& p, const Tensor& split_sizes,
          const CopyDecoder& a, const CopyDecoder& b, const Output& c)
      : ctx_(ctx), p_(p), a_decoder_(a), b_decoder_(b), c_(c) {
    offsets_.assign(static_cast<std::size_t>(p.groups) + 1, 0);
    if (!split_sizes) {
      offsets_ = {0, p.max_rows};
      return;
    }
    for (const BlockSegment& s : a.grid().segments) {
      offsets_[static_cast<std::size_t>(s.group) + 1] = s.end - s.begin;
    }
    for (std::size_t e = 0; e + 1 < offsets_.size(); ++e) offsets_[e + 1] += offsets_[e];
  }

  void Run() const {
    if (p_.kind == QuantizedGemmKind::kWgrad) {
      std::vector<GroupProduct> products;
      for (std::int64_t e = 0; e < p_.groups; ++e) products.push_back({p_.n, p_.k, Rows(e)});
      ForTasks(products, 0, [&](const GroupTask& t) { WeightGradient(t); });
      return;
    }
    for (std::int64_t begin = 0; begin < p_.groups;) {
      std::int64_t end = begin, elements = 0;
      do {
        elements += Rows(end) > 0 ? p_.n * p_.k : 0;
        ++end;
      } while (end < p_.groups && elements + p_.n * p_.k <= kWeightElements);
      RunGroups(begin, end);
      begin = end;
    }
  }

 private:
  static constexpr DType kType = kDTypeOf<T>;

  std::int64_t First(std::int64_t group) const { return offsets_[static_cast<std::size_t>(group)]; }
  std::int64_t Rows(std::int64_t group) const { return First(group + 1) - First(group); }
  bool OneScale() const { return p_.a_scaling == Scaling::kTensor; }
  DecodeScale Scales() const { return OneScale() ? DecodeScale::kOmit : DecodeScale::kApply; }
  float ScaleA(std::int64_t group) const { return ScaleOf(a_decoder_, group); }
  float ScaleB(std::int64_t group) const { return ScaleOf(b_decoder_, group); }
  float ScaleOf(const CopyDecoder& operand, std::int64_t group) const {
    return OneScale() ? operand.scales().template data<float>()[group] : 1.0f;
  }

  template <class F>
  void ForTasks(const std::vector<GroupProduct>& products, std::int64_t first_group, F&& f) const {
    std::vector<GroupTask> tasks = PlanGroupTasks(products, NumThreads());
    ParallelDynamic(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
      GroupTask task = tasks[static_cast<std::size_t>(i)];
      task.group += first_group;
      f(task);
    });
  }

  // Forward and dgrad of some groups.
  void RunGroups(std::int64_t begin, std::int64_t end) const {
    const bool forward = p_.kind == QuantizedGemmKind::kForward;
    const std::int64_t sum = forward ? p_.k : p_.n, out = forward ? p_.n : p_.k;
    std::vector<GroupProduct> products;
    std::vector<Tensor> weights;
    std::vector<std::int64_t> used;
    for (std::int64_t e = begin; e < end; ++e) {
      products.push_back({Rows(e), out, sum});
      weights.push_back({});
      if (Rows(e) == 0) continue;
      used.push_back(e);
      weights.back() = Transposes() ? ctx_.Empty({p_.k, p_.n + kPadding}, kType).Slice(1, 0, p_.n)
                                    : ctx_.Empty({p_.n, p_.k}, kType);
    }
    const std::int64_t pieces = (p_.n + kWeightRows - 1) / kWeightRows;
    ParallelDynamic(static_cast<std::int64_t>(used.size()) * pieces, [&](std::int64_t i) {
      const std::int64_t e = used[static_cast<std::size_t>(i / pieces)];
      const std::int64_t row = i % pieces * kWeightRows;
      DecodeWeight(e, row, std::min(row + kWeightRows, p_.n),
                   weights[static_cast<std::size_t>(e - begin)]);
    });
    ForTasks(products, begin, [&](const GroupTask& t) {
      Rectangle(t, sum, weights[static_cast<std::size_t>(t.group - begin)]);
    });
  }

  // oneDNN's f32 product is slower with a transposed weight: see gemm_cpu.cc.
  bool Transposes() const { return kType == DType::kF32 && p_.kind == QuantizedGemmKind::kForward; }

  void DecodeWeight(std::int64_t group, std::int64_t row_begin, std::int64_t row_end,
                    const Tensor& to) const {
    const std::int64_t first = group * p_.n;
    if constexpr (kType == DType::kF32) {
      if (Transposes()) {
        const Tensor rows = ctx_.Empty({row_end - row_begin, p_.k}, kType);
        b_decoder_.DecodeExact(Scales(), first + row_begin, first + row_end, 0, p_.k,
                               rows.data<T>(), p_.k);
        TransposeF32(rows.data<T>(), p_.k, row_end - row_begin, p_.k, to.data<T>() + row_begin,
                     to.stride(0));
        return;
      }
    }
    b_decoder_.DecodeExact(Scales(), first + row_begin, first + row_end, 0, p_.k,
                           to.data<T>() + row_begin * to.stride(0), to.stride(0));
  }

  // A rectangle of forward or dgrad, panel by panel of rows.
  void Rectangle(const GroupTask& t, std::int64_t sum, const Tensor& weight) const {
    const bool transposed = p_.kind == QuantizedGemmKind::kForward && !Transposes();
    const std::int64_t cols = t.col_end - t.col_begin;
    const Tensor w = weight.Slice(transposed ? 0 : 1, t.col_begin, cols);
    const std::int64_t most = std::max(kMinPanelRows, kPanelElements / (sum + 1) / 8 * 8);
    const Tensor panel = ctx_.Empty({std::min(most, t.row_end - t.row_begin), sum}, kType);
    for (std::int64_t r = t.row_begin; r < t.row_end; r += most) {
      const std::int64_t rows = std::min(most, t.row_end - r), row = First(t.group) + r;
      const Tensor a = panel.Slice(0, 0, rows);
      a_decoder_.DecodeExact(Scales(), row, row + rows, 0, sum, a.data<T>(), sum);
      const GemmProblem gemm{
          kType, DType::kF32, Transpose::kNo, transposed ? Transpose::kYes : Transpose::kNo, rows,
          cols,  sum};
      Finish(t.group, {c_.tensor.Slice(0, row, rows).Slice(1, t.col_begin, cols), c_.mode},
             [&](const Output& to) { GemmCpu(ctx_, gemm, a, w, to); });
    }
  }

  // A rectangle of a group's dw, summed over panels of rows.
  void WeightGradient(const GroupTask& t) const {
    const std::int64_t m = t.row_end - t.row_begin, n = t.col_end - t.col_begin;
    const std::int64_t begin = First(t.group), end = First(t.group + 1);
    const Tensor group = c_.tensor.rank() == 3 ? c_.tensor.Select(t.group) : c_.tensor;
    const Output c{group.Slice(0, t.row_begin, m).Slice(1, t.col_begin, n), c_.mode};
    if (begin == end) {
      GemmCpu(ctx_, {kType, DType::kF32, Transpose::kYes, Transpose::kNo, m, n, 0}, {}, {}, c);
      return;
    }
    const std::int64_t most =
        std::min(end - begin, std::max(2 * kMinPanelRows, 2 * kPanelElements / (m + n) / 8 * 8));
    const Tensor dy = ctx_.Empty({most, m}, kType), x = ctx_.Empty({most, n}, kType);
    Finish(t.group, c, [&](Output to) {
      for (std::int64_t r = begin; r < end; r += most) {
        const std::int64_t rows = std::min(most, end - r);
        a_decoder_.DecodeExact(Scales(), r, r + rows, t.row_begin, t.row_end, dy.data<T>(), m);
        b_decoder_.DecodeExact(Scales(), r, r + rows, t.col_begin, t.col_end, x.data<T>(), n);
        GemmCpu(ctx_, {kType, DType::kF32, Transpose::kYes, Transpose::kNo, m, n, rows},
                dy.Slice(0, 0, rows), x.Slice(0, 0, rows), to);
        to.mode = WriteMode::kAccumulate;
      }
    });
  }

  // Calls product(output) with c itself, or with f32 sums that are then scaled and rounded into it.
  template <class F>
  void Finish(std::int64_t group, const Output& c, F&& product) const {
    if (c.tensor.dtype() == DType::kF32 && !OneScale()) return product(c);
    const Tensor sums = ctx_.Empty(c.tensor.shape(), DType::kF32);
    product(Write(sums));
    const std::int64_t n = sums.dim(1);
    const bool add = c.mode == WriteMode::kAccumulate;
    for (std::int64_t i = 0; i < sums.dim(0); ++i) {
      const float* from = sums.data<float>() + i * n;
      const std::int64_t at = i * c.tensor.stride(0);
      if (c.tensor.dtype() == DType::kF32) {
        ScaleSums(from, n, ScaleA(group), ScaleB(group), add, c.tensor.data<float>() + at);
      } else {
        ScaleSums(from, n, ScaleA(group), ScaleB(group), add, c.tensor.data<bf16>() + at);
      }
    }
  }

  const Context& ctx_;
  const QuantizedGemmProblem& p_;
  const CopyDecoder &a_decoder_, &b_decoder_;
  const Output& c_;
  std::vector<std::int64_t> offsets_;  // of each group's rows
};

Support Supports(const QuantizedGemmProblem&) {
  return Support::Yes();
}

void Run(const Context& ctx, const QuantizedGemmProblem& p, const QuantizedTensor& a,
         const QuantizedTensor& b, const Output& c) {
  const CopyDecoder a_decoder(
      "quantized_gemm", a,
      p.kind == QuantizedGemmKind::kWgrad ? Direction::kColumnwise : Direction::kRowwise);
  const CopyDecoder b_decoder(
      "quantized_gemm", b,
      p.kind == QuantizedGemmKind::kForward ? Direction::kRowwise : Direction::kColumnwise);
  NumThreads();  // settles the number of threads that oneDNN sees
  if (DecodesToBf16(p, a_decoder, b_decoder)) {
    Product<bf16>(ctx, p, a.split_sizes, a_decoder, b_decoder, c).Run();
  } else {
    Product<float>(ctx, p, a.split_sizes, a_decoder, b_decoder, c).Run();
  }
}

}  // namespace

QuantizedGemmImpl CpuQuantizedGemm() {
  return {"cpu", Supports, {Run}};
}

}  // namespace cistron::ops::internal
