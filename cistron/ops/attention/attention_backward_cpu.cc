// Backward of blockwise attention. Read attention_tiles-inl.h first.
//
// A tile recomputes its scores from lse (Sᵀ = K·Qᵀ, P = exp(S − lse)), then
//   dPᵀ = V·dOᵀ,  dS = P∘(dP − Δ)/√D with Δ = Σ_d dO∘O,
//   dVᵀ… : dV += Pᵀ·dO,  dK += dSᵀ·Q,  dQᵀ += Kᵀ·dSᵀ.
// Whole sequences run all five products of a tile once. Where there are too few of them for the
// threads, one pass makes dK and dV by blocks of keys and another dQ by blocks of queries; both sum
// in the order of the whole-sequence pass, so the choice changes no bit.
#include <cmath>

#include "cistron/ops/attention/attention_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/attention/attention_backward_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/attention/attention_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

inline std::int64_t RoundUpToLanes(std::int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// A block of queries of one head, as the tiles want it, and its dQ.
struct QueryBlock {
  std::int64_t first = 0;  // in the sequence
  std::int64_t queries = 0;
  float* q_panels;   // [panels][D][kPanel], scaled, in log2 units
  float* do_panels;  // [panels][D][kPanel]
  float* dq_panels;  // [panels][D][kPanel]
  float* q_rows;     // [queries][padded D]
  float* do_rows;    // [queries][padded D]
  float* lse;        // [queries] in log2 units; +Inf beyond the last, so that P is 0 there
  float* delta;      // [queries]
};

// Δ of the queries of one panel: Σ_d dO·O in the order in which a tile sums dO·V. Where a query
// sees one key, O is that key's V, so dP − Δ is zero exactly, as the gradient of its score is.
HWY_INLINE void PanelDelta(const float* do_panel, const float* o_panel, std::int64_t dim,
                           float* delta) {
  const FloatTag d;
  for (std::int64_t lane = 0; lane < kPanel; lane += kLanes) {
    FloatVec sum = hn::Zero(d);
    for (std::int64_t c = 0; c < dim; ++c) {
      sum = hn::MulAdd(hn::LoadU(d, o_panel + c * kPanel + lane),
                       hn::LoadU(d, do_panel + c * kPanel + lane), sum);
    }
    hn::StoreU(sum, d, delta + lane);
  }
}

// A block of keys of one key/value head; dk and dv are null where they are not wanted.
struct KeyTile {
  std::int64_t first;
  std::int64_t keys;
  const float *k, *v;  // [keys][D]
  float *dk, *dv;      // [keys][padded D]
};

// Cuts scratch memory into pieces.
struct Scratch {
  float* next;
  float* Take(std::int64_t floats) {
    float* piece = next;
    next += (floats + 15) / 16 * 16;  // each piece starts on a cache line
    return piece;
  }
};

QueryBlock TakeQueryBlock(Scratch& scratch, std::int64_t dim) {
  QueryBlock b{};
  b.q_panels = scratch.Take(kQueryBlock * dim);
  b.do_panels = scratch.Take(kQueryBlock * dim);
  b.dq_panels = scratch.Take(kQueryBlock * dim);
  b.q_rows = scratch.Take(kQueryBlock * RoundUpToLanes(dim));
  b.do_rows = scratch.Take(kQueryBlock * RoundUpToLanes(dim));
  b.lse = scratch.Take(kQueryBlock);
  b.delta = scratch.Take(kQueryBlock);
  return b;
}

// Reads block `index` of a head into `b`, whose dq_panels hold anything afterwards. `o_rows` is
// scratch [kQueryBlock][D].
template <class T>
void LoadQueryBlock(const AttentionBackwardArgs<T>& args, const AttentionTask& task,
                    std::int64_t head, std::int64_t index, float* o_rows, QueryBlock& b) {
  const std::int64_t dim = args.config.head_dim;
  const std::int64_t padded = RoundUpToLanes(dim);
  b.first = index * kQueryBlock;
  b.queries = std::min(kQueryBlock, task.length - b.first);
  const std::int64_t token = task.begin + b.first;
  const std::int64_t panels = (b.queries + kPanel - 1) / kPanel;
  LoadRows(args.q + token * args.q_stride + head * dim, args.q_stride, b.queries, dim, b.q_rows,
           padded);
  LoadRows(args.d_o + token * args.do_stride + head * dim, args.do_stride, b.queries, dim,
           b.do_rows, padded);
  LoadRows(args.o + token * args.o_stride + head * dim, args.o_stride, b.queries, dim, o_rows,
           padded);
  const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t n = std::min(kPanel, b.queries - p * kPanel);
    float* q_panel = b.q_panels + p * kPanel * dim;
    float* do_panel = b.do_panels + p * kPanel * dim;
    float* o_panel = b.dq_panels;
    if (n < kPanel) {
      for (float* panel : {q_panel, do_panel, o_panel}) std::fill_n(panel, kPanel * dim, 0.0f);
    }
    Transpose(b.q_rows + p * kPanel * padded, padded, n, dim, scale, q_panel, kPanel);
    Transpose(b.do_rows + p * kPanel * padded, padded, n, dim, 1.0f, do_panel, kPanel);
    Transpose(o_rows + p * kPanel * padded, padded, n, dim, 1.0f, o_panel, kPanel);
    PanelDelta(do_panel, o_panel, dim, b.delta + p * kPanel);
  }
  const float* lse = args.lse + head * args.tokens + token;
  for (std::int64_t i = 0; i < b.queries; ++i) b.lse[i] = lse[i] * kLog2E;
  for (std::int64_t i = b.queries; i < panels * kPanel; ++i) {
    b.lse[i] = std::numeric_limits<float>::infinity();
    b.delta[i] = 0.0f;
  }
}

// Scores become P and `dp` becomes dS, rows [rows][kQueryBlock], for one panel.
HWY_INLINE void ProbabilitiesAndGradients(float* scores, float* dp, std::int64_t rows, bool masked,
                                          std::int64_t query, std::int64_t key, std::int64_t window,
                                          float scale, const float* lse, const float* delta) {
  const FloatTag d;
  const FloatVec factor = hn::Set(d, scale);
  static_assert(kPanel == 2 * kLanes);
  const FloatVec row_lse[2] = {hn::LoadU(d, lse), hn::LoadU(d, lse + kLanes)};
  const FloatVec row_delta[2] = {hn::LoadU(d, delta), hn::LoadU(d, delta + kLanes)};
  for (std::int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * kQueryBlock;
    float* g = dp + r * kQueryBlock;
    FloatVec p[2];
    ForEach<2>([&](int i) { p[i] = hn::Sub(hn::LoadU(d, s + i * kLanes), row_lse[i]); });
    Exp2(p);
    ForEach<2>([&](int i) {
      FloatVec ds =
          hn::Mul(hn::Mul(factor, p[i]), hn::Sub(hn::LoadU(d, g + i * kLanes), row_delta[i]));
      if (masked) {
        const auto sees = SeesKey(query + i * kLanes, key + r, window);
        p[i] = hn::IfThenElseZero(sees, p[i]);
        ds = hn::IfThenElseZero(sees, ds);
      }
      hn::StoreU(p[i], d, s + i * kLanes);
      hn::StoreU(ds, d, g + i * kLanes);
    });
  }
}

// One tile. `scores` and `dp` are scratch [kKeyBlock][kQueryBlock].
void BackwardTile(const AttentionConfig& config, const QueryBlock& b, const KeyTile& t,
                  bool want_dq, float* scores, float* dp) {
  const std::int64_t dim = config.head_dim;
  const std::int64_t padded = RoundUpToLanes(dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const std::int64_t panels = (b.queries + kPanel - 1) / kPanel;
  bool whole = true;  // every panel sees every key of the tile, at least in part
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t query = b.first + p * kPanel;
    const std::int64_t last = std::min(query + kPanel, b.first + b.queries) - 1;
    const Visible seen = VisibleKeys(t.first, t.keys, query, last, config.window);
    if (seen.low > 0 || seen.high < t.keys) whole = false;
    if (seen.high <= seen.low) continue;
    const std::int64_t n = seen.high - seen.low;
    float* s = scores + seen.low * kQueryBlock + p * kPanel;
    float* g = dp + seen.low * kQueryBlock + p * kPanel;
    Multiply<2, false>(n, dim, t.k + seen.low * dim, {dim, 1}, b.q_panels + p * kPanel * dim,
                       kPanel, s, kQueryBlock, {});
    Multiply<2, false>(n, dim, t.v + seen.low * dim, {dim, 1}, b.do_panels + p * kPanel * dim,
                       kPanel, g, kQueryBlock, {});
    ProbabilitiesAndGradients(s, g, n, seen.masked, query, t.first + seen.low, config.window, scale,
                              b.lse + p * kPanel, b.delta + p * kPanel);
    if (want_dq) {
      Multiply<2, true>(dim, n, t.k + seen.low * dim, {1, dim}, g, kQueryBlock,
                        b.dq_panels + p * kPanel * dim, kPanel, {true, nullptr});
    }
  }
  if (t.dk == nullptr) return;
  if (whole) {
    MultiplyWide(t.keys, padded, b.queries, scores, {kQueryBlock, 1}, b.do_rows, padded, t.dv,
                 padded, {true, nullptr});
    MultiplyWide(t.keys, padded, b.queries, dp, {kQueryBlock, 1}, b.q_rows, padded, t.dk, padded,
                 {true, nullptr});
    return;
  }
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t query = b.first + p * kPanel;
    const std::int64_t last = std::min(query + kPanel, b.first + b.queries) - 1;
    const Visible seen = VisibleKeys(t.first, t.keys, query, last, config.window);
    if (seen.high <= seen.low) continue;
    const std::int64_t from = seen.low * kQueryBlock + p * kPanel;
    MultiplyWide(seen.high - seen.low, padded, last + 1 - query, scores + from, {kQueryBlock, 1},
                 b.do_rows + p * kPanel * padded, padded, t.dv + seen.low * padded, padded,
                 {true, nullptr});
    MultiplyWide(seen.high - seen.low, padded, last + 1 - query, dp + from, {kQueryBlock, 1},
                 b.q_rows + p * kPanel * padded, padded, t.dk + seen.low * padded, padded,
                 {true, nullptr});
  }
}

// First key that a block of queries sees, rounded down to a block of keys; one past the last key.
inline std::int64_t FirstKeyBlock(const AttentionConfig& config, std::int64_t first_query) {
  if (config.window == 0) return 0;
  return std::max<std::int64_t>(0, first_query - config.window + 1) / kKeyBlock * kKeyBlock;
}

template <class T>
void StoreDq(const AttentionBackwardArgs<T>& args, const AttentionTask& task, std::int64_t head,
             const QueryBlock& b, float* rows) {
  const std::int64_t dim = args.config.head_dim;
  for (std::int64_t p = 0; p * kPanel < b.queries; ++p) {
    Transpose(b.dq_panels + p * kPanel * dim, kPanel, dim, std::min(kPanel, b.queries - p * kPanel),
              1.0f, rows + p * kPanel * dim, dim);
  }
  StoreRows(rows, dim, b.queries, dim,
            args.dq + (task.begin + b.first) * args.dq_stride + head * dim, args.dq_stride,
            args.accumulate_dq);
}

// Every product of one key/value head of one sequence.
template <class T>
void BackwardSequence(const AttentionBackwardArgs<T>& args, const AttentionTask& task,
                      Scratch scratch) {
  const AttentionConfig& config = args.config;
  const std::int64_t dim = config.head_dim;
  const std::int64_t padded = RoundUpToLanes(dim);
  const std::int64_t group = config.num_heads / config.num_kv_heads;
  QueryBlock b = TakeQueryBlock(scratch, dim);
  float* rows = scratch.Take(kQueryBlock * padded);
  float* scores = scratch.Take(kKeyBlock * kQueryBlock);
  float* dp = scratch.Take(kKeyBlock * kQueryBlock);
  float* k = scratch.Take(task.length * dim);
  float* v = scratch.Take(task.length * dim);
  float* dk = scratch.Take(task.length * padded);
  float* dv = scratch.Take(task.length * padded);

  const std::int64_t column = task.head * dim;
  LoadRows(args.k + task.begin * args.k_stride + column, args.k_stride, task.length, dim, k, dim);
  LoadRows(args.v + task.begin * args.v_stride + column, args.v_stride, task.length, dim, v, dim);
  std::fill_n(dk, task.length * padded, 0.0f);
  std::fill_n(dv, task.length * padded, 0.0f);
  for (std::int64_t head = task.head * group; head < (task.head + 1) * group; ++head) {
    for (std::int64_t i = 0; i * kQueryBlock < task.length; ++i) {
      LoadQueryBlock(args, task, head, i, rows, b);
      std::fill_n(b.dq_panels, kQueryBlock * dim, 0.0f);
      for (std::int64_t key = FirstKeyBlock(config, b.first); key < b.first + b.queries;
           key += kKeyBlock) {
        const KeyTile tile{key,
                           std::min(kKeyBlock, task.length - key),
                           k + key * dim,
                           v + key * dim,
                           dk + key * padded,
                           dv + key * padded};
        BackwardTile(config, b, tile, /*want_dq=*/true, scores, dp);
      }
      StoreDq(args, task, head, b, rows);
    }
  }
  StoreRows(dk, padded, task.length, dim, args.dk + task.begin * args.dk_stride + column,
            args.dk_stride, args.accumulate_dk);
  StoreRows(dv, padded, task.length, dim, args.dv + task.begin * args.dv_stride + column,
            args.dv_stride, args.accumulate_dv);
}

// dk and dv of one block of keys.
template <class T>
void BackwardKeys(const AttentionBackwardArgs<T>& args, const AttentionTask& task,
                  Scratch scratch) {
  const AttentionConfig& config = args.config;
  const std::int64_t dim = config.head_dim;
  const std::int64_t padded = RoundUpToLanes(dim);
  const std::int64_t group = config.num_heads / config.num_kv_heads;
  QueryBlock b = TakeQueryBlock(scratch, dim);
  float* rows = scratch.Take(kQueryBlock * padded);
  float* scores = scratch.Take(kKeyBlock * kQueryBlock);
  float* dp = scratch.Take(kKeyBlock * kQueryBlock);
  float* k = scratch.Take(kKeyBlock * dim);
  float* v = scratch.Take(kKeyBlock * dim);
  float* dk = scratch.Take(kKeyBlock * padded);
  float* dv = scratch.Take(kKeyBlock * padded);

  const std::int64_t first = task.block * kKeyBlock;
  const std::int64_t keys = std::min(kKeyBlock, task.length - first);
  const std::int64_t token = task.begin + first;
  const std::int64_t column = task.head * dim;
  LoadRows(args.k + token * args.k_stride + column, args.k_stride, keys, dim, k, dim);
  LoadRows(args.v + token * args.v_stride + column, args.v_stride, keys, dim, v, dim);
  std::fill_n(dk, keys * padded, 0.0f);
  std::fill_n(dv, keys * padded, 0.0f);
  const std::int64_t last_query = config.window == 0
                                      ? task.length - 1
                                      : std::min(task.length, first + keys - 1 + config.window) - 1;
  for (std::int64_t head = task.head * group; head < (task.head + 1) * group; ++head) {
    for (std::int64_t i = first / kQueryBlock; i * kQueryBlock <= last_query; ++i) {
      LoadQueryBlock(args, task, head, i, rows, b);
      BackwardTile(config, b, {first, keys, k, v, dk, dv}, /*want_dq=*/false, scores, dp);
    }
  }
  StoreRows(dk, padded, keys, dim, args.dk + token * args.dk_stride + column, args.dk_stride,
            args.accumulate_dk);
  StoreRows(dv, padded, keys, dim, args.dv + token * args.dv_stride + column, args.dv_stride,
            args.accumulate_dv);
}

// dq of one block of queries.
template <class T>
void BackwardQueries(const AttentionBackwardArgs<T>& args, const AttentionTask& task,
                     Scratch scratch) {
  const AttentionConfig& config = args.config;
  const std::int64_t dim = config.head_dim;
  QueryBlock b = TakeQueryBlock(scratch, dim);
  float* rows = scratch.Take(kQueryBlock * RoundUpToLanes(dim));
  float* scores = scratch.Take(kKeyBlock * kQueryBlock);
  float* dp = scratch.Take(kKeyBlock * kQueryBlock);
  float* k = scratch.Take(kKeyBlock * dim);
  float* v = scratch.Take(kKeyBlock * dim);

  const std::int64_t column = task.head / (config.num_heads / config.num_kv_heads) * dim;
  LoadQueryBlock(args, task, task.head, task.block, rows, b);
  std::fill_n(b.dq_panels, kQueryBlock * dim, 0.0f);
  for (std::int64_t key = FirstKeyBlock(config, b.first); key < b.first + b.queries;
       key += kKeyBlock) {
    const std::int64_t keys = std::min(kKeyBlock, b.first + b.queries - key);
    const std::int64_t token = task.begin + key;
    LoadRows(args.k + token * args.k_stride + column, args.k_stride, keys, dim, k, dim);
    LoadRows(args.v + token * args.v_stride + column, args.v_stride, keys, dim, v, dim);
    BackwardTile(config, b, {key, keys, k, v, nullptr, nullptr}, /*want_dq=*/true, scores, dp);
  }
  StoreDq(args, task, task.head, b, rows);
}

template <class T>
void Backward(const AttentionBackwardArgs<T>& args, TaskKind kind, const AttentionTask& task,
              float* scratch) {
  switch (kind) {
    case TaskKind::kSequences: return BackwardSequence(args, task, {scratch});
    case TaskKind::kKeyBlocks: return BackwardKeys(args, task, {scratch});
    case TaskKind::kQueryBlocks: return BackwardQueries(args, task, {scratch});
  }
}

void BackwardF32(const AttentionBackwardArgs<float>& args, TaskKind kind, const AttentionTask& task,
                 float* scratch) {
  Backward(args, kind, task, scratch);
}
void BackwardBF16(const AttentionBackwardArgs<bf16>& args, TaskKind kind, const AttentionTask& task,
                  float* scratch) {
  Backward(args, kind, task, scratch);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {

HWY_EXPORT(BackwardF32);
HWY_EXPORT(BackwardBF16);

std::int64_t AttentionBackwardScratch(const AttentionConfig& config, TaskKind kind,
                                      std::int64_t length) {
  constexpr std::int64_t kWidestVector = 16;  // of AVX-512
  const std::int64_t padded = (config.head_dim + kWidestVector - 1) / kWidestVector * kWidestVector;
  const std::int64_t keys = kind == TaskKind::kSequences ? length : kKeyBlock;
  return 6 * kQueryBlock * padded + 2 * kQueryBlock + 2 * kKeyBlock * kQueryBlock +
         4 * (keys * padded + kWidestVector);
}

void AttentionBackwardTask(const AttentionBackwardArgs<float>& args, TaskKind kind,
                           const AttentionTask& task, float* scratch) {
  HWY_DYNAMIC_DISPATCH(BackwardF32)(args, kind, task, scratch);
}
void AttentionBackwardTask(const AttentionBackwardArgs<bf16>& args, TaskKind kind,
                           const AttentionTask& task, float* scratch) {
  HWY_DYNAMIC_DISPATCH(BackwardBF16)(args, kind, task, scratch);
}

}  // namespace cistron::ops
#endif  // HWY_ONCE
