// attention: causal softmax attention of packed sequences, grouped-query, optional sliding window.
//
//   o_i = Σ_j softmax_j(q_i·k_j / √D) v_j  over j in the same sequence, j ≤ i, and j > i − window
// (window as Hugging Face means it: a query sees the last `window` keys, itself included; 0: none).
// Query head h reads key/value head h // (Hq / Hkv). Blockwise: no S×S matrix is ever in memory.
//
// Shapes: q, o, do, dq [T, Hq·D]; k, v, dk, dv [T, Hkv·D]; rows may be strided (views of one
//         projection).
//         lse [Hq, T] in the compute type: log-sum-exp of the scaled scores, kept for backward.
// Dtypes: f64, f32, bf16; scores, softmax and sums in f32 (f64 for f64). Implementation `flash`
//         (bf16, tensor cores) rounds probabilities and gradients of scores to bf16, once each,
//         before it multiplies them by v, do, k and q: o, dq, dk, dv err by up to 2⁻⁸ of the sum of
//         magnitudes more (testing/attention_problem.h derives it). lse and what divides o do not.
// Padding: rows of o, dq, dk, dv beyond the last sequence are written as zeros; q, k, v there are
//         not read.
// Aliasing: outputs overlap no input and no other output.
// Implementations: cudnn and flash (bf16; deterministic; AttentionImplsFor says which is first),
//         cuda, and cudnn_atomics, whose backward adds to dq in any order: its bits differ from run
//         to run, and it runs where it is asked for by name.
// Order: sums run over fixed blocks in a fixed order: results depend on the implementation and the
//         instruction set, not on the number of threads. dk and dv of a key/value head sum the
//         query heads of its group in order.
// One key: a query that sees one key adds exact zeros to dq and dk (o being what forward stored).
//         cuDNN subtracts the two equal sums in different orders: what is left is their rounding.
// NaN:    a NaN or Inf reaches every result that depends on it, and may reach others of the same
//         sequence whose pair with it is masked (a tile multiplies masked pairs by 0).
// Errors: kInvalidArgument for shapes and dtypes that do not fit, heads that do not divide, a
//         negative window, cu_seqlens that does not start at 0, falls, or ends beyond T. Offsets on
//         a device are not read by the host: kernels cut them to the T tokens that there are.
// Source: Dao, Fu, Ermon, Rudra and Ré, "FlashAttention", 2022; Dao, "FlashAttention-2", 2023
//         (recomputation from lse, row sums of do·o).
#pragma once

#include <string>

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/ops/packed_sequences.h"

namespace cistron::ops {

struct AttentionConfig {
  std::int64_t num_heads = 1;     // Hq
  std::int64_t num_kv_heads = 1;  // Hkv, divides Hq
  std::int64_t head_dim = 1;      // D
  std::int64_t window = 0;        // 0: none
};

// `lse` may be undefined when no backward follows.
void AttentionForward(const Context& ctx, const AttentionConfig& config,
                      const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& lse, const Output& o);

void AttentionBackward(const Context& ctx, const AttentionConfig& config,
                       const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                       const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                       const Output& dq, const Output& dk, const Output& dv);

// The cuDNN that implementation `cudnn` runs, "cuDNN 9.19.0", or why there is none.
std::string DescribeCudnn();

struct AttentionProblem {
  DType dtype;
  AttentionConfig config;
  std::int64_t tokens;
  // Of the sequences (packed_sequences.h); max_length 0: as long as there are tokens.
  std::int64_t num_sequences = 1, max_length = 0;
  bool uniform = false;
  bool aligned = true;  // every matrix begins on 16 bytes, and so does each of its rows
};
struct AttentionRun {
  void (*forward)(const Context&, const AttentionConfig&, const PackedSequences&, const Tensor& q,
                  const Tensor& k, const Tensor& v, const Tensor& lse, const Output& o);
  void (*backward)(const Context&, const AttentionConfig&, const PackedSequences&,
                   const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& o, const Tensor& lse, const Output& dq, const Output& dk,
                   const Output& dv);
};
using AttentionImpl = Implementation<AttentionProblem, AttentionRun>;
std::span<const AttentionImpl> AttentionImpls();
// The same in the order in which a problem asks them: where heads are narrow, or sequences packed
// and short, `flash` is faster than `cudnn` and comes before it. Sizes alone decide.
std::span<const AttentionImpl> AttentionImplsFor(const AttentionProblem& problem);

// Whether packed sequences may have bounds that stay the same over a run, of `bounded`, where most
// micro-batches have the sizes of `typical`, without being slower or refused on a GPU, by the
// implementation that the context asks for, or the library chooses: our own kernels hardly see
// bounds, but cuDNN's lay out as many sequences as there may be, each as long as it may be.
bool BoundsAreCheap(const Context& ctx, const AttentionProblem& bounded,
                    const AttentionProblem& typical);

}  // namespace cistron::ops
