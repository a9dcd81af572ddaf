// permute: token rows into expert order and back.
//
// Assignments are flattened as token·K + slot and sorted stably by expert; row r of the permuted
// tensor is the r-th of them. Slots with expert −1 (masked tokens) have no row.
//   Permute    rows[r] = x[slot_of_row[r] / K]
//   Unpermute  y[t] = Σ_k p[t,k] · rows[row_of_slot[t·K + k]], in slot order, in the compute type
//              (p = 1 where probs is undefined)
// Backward of Permute is Unpermute without probs; backward of Unpermute is PermuteScaled:
//   drows[r] = p[t,k]·dy[t];  dprobs[t,k] = ⟨dy[t], rows[r]⟩
//
// Shapes: experts i32 [T, K]; x, y [T, H]; rows [M, H] with M ≥ number of routed slots (T·K at
// most);
//         probs, dprobs [T, K] compute type. Rows beyond the routed ones are neither read nor
//         written. Where the map lies on a device the host does not know their number: assignments
//         whose row is beyond M are left out there.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

struct RowMap {
  Tensor split_sizes;  // i64 [E]: rows of each expert
  Tensor row_of_slot;  // i32 [T·K]: permuted row of an assignment, −1 for none
  Tensor slot_of_row;  // i32 [T·K]: token·K + slot of a permuted row; −1 beyond the routed rows
  std::int64_t top_k = 1;
};

// Stable counting sort of the assignments. Throws when an expert is outside [−1, E); where experts
// lie on a device the host does not read them, and such a slot has no row.
RowMap BuildRowMap(const Context& ctx, const Tensor& experts, std::int64_t num_experts);

void Permute(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows);
void Unpermute(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
               const Output& y);
void UnpermuteBackward(const Context& ctx, const RowMap& map, const Tensor& dy, const Tensor& rows,
                       const Tensor& probs, const Output& drows, const Output& dprobs);

// Values of one column a slot: [T, K] into permuted order [M], and back (−1 slots give 0).
void PermuteSlots(const Context& ctx, const RowMap& map, const Tensor& slots, const Output& rows);
void UnpermuteSlots(const Context& ctx, const RowMap& map, const Tensor& rows, const Output& slots);

struct PermuteProblem {
  DType dtype;
  std::int64_t tokens, top_k, width;
};
struct PermuteRun {
  RowMap (*build_row_map)(const Context&, const Tensor& experts, std::int64_t num_experts);
  void (*permute)(const Context&, const RowMap&, const Tensor& x, const Output& rows);
  void (*unpermute)(const Context&, const RowMap&, const Tensor& rows, const Tensor& probs,
                    const Output& y);
  void (*unpermute_backward)(const Context&, const RowMap&, const Tensor& dy, const Tensor& rows,
                             const Tensor& probs, const Output& drows, const Output& dprobs);
  void (*permute_slots)(const Context&, const RowMap&, const Tensor& slots, const Output& rows);
  void (*unpermute_slots)(const Context&, const RowMap&, const Tensor& rows, const Output& slots);
};
using PermuteImpl = Implementation<PermuteProblem, PermuteRun>;
std::span<const PermuteImpl> PermuteImpls();

}  // namespace cistron::ops
