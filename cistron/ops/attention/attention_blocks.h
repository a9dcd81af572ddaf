// How the tuned implementation cuts attention into blocks and tasks; nothing of an instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "cistron/ops/attention/attention.h"

namespace cistron::ops {

// Queries and keys of a tile. Multiples of the widest pair of vectors; a tile of scores (24 KB)
// and its rows of K and V stay in the first two levels of cache.
inline constexpr std::int64_t kQueryBlock = 64;
inline constexpr std::int64_t kKeyBlock = 96;

// One piece of work: a block of queries or keys of one head of one sequence.
struct AttentionTask {
  std::int64_t begin, length;  // the sequence: first token, tokens
  std::int64_t head;
  std::int64_t block;  // index of the block in the sequence
  std::int64_t cost;   // pairs of query and key
};

enum class TaskKind {
  kQueryBlocks,  // of every query head
  kKeyBlocks,    // of every key/value head
  kSequences,    // every key/value head whole
};
// All tasks of a call, the largest first, so that the threads end together.
std::vector<AttentionTask> MakeAttentionTasks(const AttentionConfig& config,
                                              const PackedSequences& sequences, TaskKind kind);

// Whether whole sequences keep `threads` threads busy in backward: they need 5 products where
// separate passes for dq and for dk, dv need 7.
bool SequencesKeepBusy(const std::vector<AttentionTask>& sequences, int threads);

// What the kernels of one instruction set are given; pointers are to token 0, head 0.
template <class T>
struct AttentionForwardArgs {
  const T *q, *k, *v;
  std::int64_t q_stride, k_stride, v_stride, o_stride;
  T* o;
  bool accumulate;
  float* lse;  // [Hq, tokens]; null: not wanted
  std::int64_t tokens;
  AttentionConfig config;
};
template <class T>
struct AttentionBackwardArgs {
  const T *d_o, *q, *k, *v, *o;
  std::int64_t do_stride, q_stride, k_stride, v_stride, o_stride;
  const float* lse;
  T *dq, *dk, *dv;
  std::int64_t dq_stride, dk_stride, dv_stride;
  bool accumulate_dq, accumulate_dk, accumulate_dv;
  std::int64_t tokens;
  AttentionConfig config;
};

// Floats of scratch that one task needs.
std::int64_t AttentionForwardScratch(const AttentionConfig& config);
std::int64_t AttentionBackwardScratch(const AttentionConfig& config, TaskKind kind,
                                      std::int64_t length);

// Run one task with the best instruction set of this machine.
void AttentionForwardTask(const AttentionForwardArgs<float>& args, const AttentionTask& task,
                          float* scratch);
void AttentionForwardTask(const AttentionForwardArgs<bf16>& args, const AttentionTask& task,
                          float* scratch);
void AttentionBackwardTask(const AttentionBackwardArgs<float>& args, TaskKind kind,
                           const AttentionTask& task, float* scratch);
void AttentionBackwardTask(const AttentionBackwardArgs<bf16>& args, TaskKind kind,
                           const AttentionTask& task, float* scratch);

}  // namespace cistron::ops
