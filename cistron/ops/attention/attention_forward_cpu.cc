// Forward of blockwise attention: one block of queries of one head against the keys it sees.
// Read attention_tiles-inl.h first.
#include <cmath>

#include "cistron/ops/attention/attention_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/attention/attention_forward_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/attention/attention_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

// Online softmax of one panel of scores [rows, kPanel] (in units of log2), in place: scores become
// exp2(score − maximum); `correction` is the factor of what was summed before.
HWY_INLINE void OnlineSoftmax(float* scores, std::int64_t rows, bool masked, std::int64_t query,
                              std::int64_t key, std::int64_t window, float* maximum, float* sum,
                              float* correction) {
  const FloatTag d;
  const FloatVec old0 = hn::LoadU(d, maximum), old1 = hn::LoadU(d, maximum + kLanes);
  FloatVec max0 = old0, max1 = old1;
  if (masked) {
    const FloatVec hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
    for (std::int64_t r = 0; r < rows; ++r) {
      float* s = scores + r * kPanel;
      const FloatVec s0 = hn::IfThenElse(SeesKey(query, key + r, window), hn::LoadU(d, s), hidden);
      const FloatVec s1 = hn::IfThenElse(SeesKey(query + kLanes, key + r, window),
                                         hn::LoadU(d, s + kLanes), hidden);
      hn::StoreU(s0, d, s);
      hn::StoreU(s1, d, s + kLanes);
      max0 = hn::Max(max0, s0);
      max1 = hn::Max(max1, s1);
    }
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      max0 = hn::Max(max0, hn::LoadU(d, scores + r * kPanel));
      max1 = hn::Max(max1, hn::LoadU(d, scores + r * kPanel + kLanes));
    }
  }
  FloatVec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * kPanel;
    FloatVec p[2] = {hn::Sub(hn::LoadU(d, s), max0), hn::Sub(hn::LoadU(d, s + kLanes), max1)};
    Exp2(p);
    hn::StoreU(p[0], d, s);
    hn::StoreU(p[1], d, s + kLanes);
    sum0 = hn::Add(sum0, p[0]);
    sum1 = hn::Add(sum1, p[1]);
  }
  FloatVec factor[2] = {hn::Sub(old0, max0), hn::Sub(old1, max1)};
  Exp2(factor);
  hn::StoreU(factor[0], d, correction);
  hn::StoreU(factor[1], d, correction + kLanes);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, sum), factor[0], sum0), d, sum);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, sum + kLanes), factor[1], sum1), d, sum + kLanes);
  hn::StoreU(max0, d, maximum);
  hn::StoreU(max1, d, maximum + kLanes);
}

template <class T>
void ForwardBlock(const AttentionForwardArgs<T>& args, const AttentionTask& task, float* scratch) {
  const FloatTag d;
  const AttentionConfig& config = args.config;
  const std::int64_t dim = config.head_dim;
  const std::int64_t first = task.block * kQueryBlock;
  const std::int64_t queries = std::min(kQueryBlock, task.length - first);
  const std::int64_t panels = (queries + kPanel - 1) / kPanel;
  const std::int64_t kv_column = task.head / (config.num_heads / config.num_kv_heads) * dim;
  const T* k = args.k + task.begin * args.k_stride + kv_column;
  const T* v = args.v + task.begin * args.v_stride + kv_column;

  float* q_panels = scratch;                       // [panels][D][kPanel], scaled, in log2 units
  float* o_panels = q_panels + kQueryBlock * dim;  // [panels][D][kPanel]
  float* k_tile = o_panels + kQueryBlock * dim;    // [keys][D]
  float* v_tile = k_tile + kKeyBlock * dim;        // [keys][D]
  float* scores = v_tile + kKeyBlock * dim;        // [keys][kPanel]
  float* maximum = scores + kKeyBlock * kPanel;    // [queries]
  float* sum = maximum + kQueryBlock;              // [queries]
  float* correction = sum + kQueryBlock;           // [kPanel]

  const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
  float* rows = k_tile;  // free before the first tile and after the last
  LoadRows(args.q + (task.begin + first) * args.q_stride + task.head * dim, args.q_stride, queries,
           dim, rows, dim);
  // Lanes beyond the last query hold zeros; their results are not stored.
  std::fill_n(q_panels, panels * kPanel * dim, 0.0f);
  std::fill_n(o_panels, panels * kPanel * dim, 0.0f);
  for (std::int64_t p = 0; p < panels; ++p) {
    Transpose(rows + p * kPanel * dim, dim, std::min(kPanel, queries - p * kPanel), dim, scale,
              q_panels + p * kPanel * dim, kPanel);
  }
  // The lowest finite value and not −Inf: a query whose keys are all masked so far keeps it, and
  // −Inf − (−Inf) would be NaN.
  std::fill_n(maximum, panels * kPanel, std::numeric_limits<float>::lowest());
  std::fill_n(sum, panels * kPanel, 0.0f);

  const std::int64_t first_key =
      config.window == 0 ? 0 : std::max<std::int64_t>(0, first - config.window + 1);
  for (std::int64_t key = first_key / kKeyBlock * kKeyBlock; key < first + queries;
       key += kKeyBlock) {
    const std::int64_t keys = std::min(kKeyBlock, first + queries - key);
    LoadRows(k + key * args.k_stride, args.k_stride, keys, dim, k_tile, dim);
    LoadRows(v + key * args.v_stride, args.v_stride, keys, dim, v_tile, dim);
    for (std::int64_t p = 0; p < panels; ++p) {
      const std::int64_t query = first + p * kPanel;
      const std::int64_t last = std::min(query + kPanel, first + queries) - 1;
      const Visible seen = VisibleKeys(key, keys, query, last, config.window);
      if (seen.high <= seen.low) continue;
      const std::int64_t n = seen.high - seen.low;
      Multiply<2, false>(n, dim, k_tile + seen.low * dim, {dim, 1}, q_panels + p * kPanel * dim,
                         kPanel, scores, kPanel, {});
      OnlineSoftmax(scores, n, seen.masked, query, key + seen.low, config.window,
                    maximum + p * kPanel, sum + p * kPanel, correction);
      Multiply<2, true>(dim, n, v_tile + seen.low * dim, {1, dim}, scores, kPanel,
                        o_panels + p * kPanel * dim, kPanel, {true, correction});
    }
  }

  for (std::int64_t p = 0; p < panels; ++p) {
    const FloatVec inverse0 = hn::Div(hn::Set(d, 1.0f), hn::LoadU(d, sum + p * kPanel));
    const FloatVec inverse1 = hn::Div(hn::Set(d, 1.0f), hn::LoadU(d, sum + p * kPanel + kLanes));
    for (std::int64_t c = 0; c < dim; ++c) {
      float* o = o_panels + (p * dim + c) * kPanel;
      hn::StoreU(hn::Mul(hn::LoadU(d, o), inverse0), d, o);
      hn::StoreU(hn::Mul(hn::LoadU(d, o + kLanes), inverse1), d, o + kLanes);
    }
    Transpose(o_panels + p * kPanel * dim, kPanel, dim, std::min(kPanel, queries - p * kPanel),
              1.0f, rows + p * kPanel * dim, dim);
  }
  StoreRows(rows, dim, queries, dim,
            args.o + (task.begin + first) * args.o_stride + task.head * dim, args.o_stride,
            args.accumulate);
  if (args.lse != nullptr) {
    float* lse = args.lse + task.head * args.tokens + task.begin + first;
    for (std::int64_t i = 0; i < queries; ++i) lse[i] = maximum[i] * kLn2 + std::log(sum[i]);
  }
}

void ForwardF32(const AttentionForwardArgs<float>& args, const AttentionTask& task,
                float* scratch) {
  ForwardBlock(args, task, scratch);
}
void ForwardBF16(const AttentionForwardArgs<bf16>& args, const AttentionTask& task,
                 float* scratch) {
  ForwardBlock(args, task, scratch);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {

HWY_EXPORT(ForwardF32);
HWY_EXPORT(ForwardBF16);

std::int64_t AttentionForwardScratch(const AttentionConfig& config) {
  constexpr std::int64_t kWidestPanel = 32;  // of AVX-512
  return 2 * (kQueryBlock + kKeyBlock) * config.head_dim + kKeyBlock * kWidestPanel +
         2 * kQueryBlock + kWidestPanel;
}

void AttentionForwardTask(const AttentionForwardArgs<float>& args, const AttentionTask& task,
                          float* scratch) {
  HWY_DYNAMIC_DISPATCH(ForwardF32)(args, task, scratch);
}
void AttentionForwardTask(const AttentionForwardArgs<bf16>& args, const AttentionTask& task,
                          float* scratch) {
  HWY_DYNAMIC_DISPATCH(ForwardBF16)(args, task, scratch);
}

}  // namespace cistron::ops
#endif  // HWY_ONCE
