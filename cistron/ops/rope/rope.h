// rope: rotary position embedding, rotate-half form, in place.
//
// For a head of width D at position p, i < D/2, angle θ_i = p · theta^(−2i/D) (f32; f64 for f64):
//   x'[i]       = x[i]·cos θ_i − x[i + D/2]·sin θ_i
//   x'[i + D/2] = x[i + D/2]·cos θ_i + x[i]·sin θ_i
// Backward is the rotation by −θ.
//
// Shapes: x [T, heads·D] (rows may be strided), positions i64 [T] that restart at each sequence.
// Errors: D odd or not dividing the row; a position on the host outside the table. On a device
//         positions are not checked: the row of one outside becomes NaN.
// Source: Su et al., "RoFormer", 2021; order of pairs as in Hugging Face Llama and Mixtral.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

// cos and sin of every angle: table [positions, D/2, 2] in the compute type, built once a model.
Tensor RopeTable(std::int64_t positions, std::int64_t head_dim, double theta, DType compute_type);

void RopeForward(const Context& ctx, const Tensor& table, const Tensor& positions,
                 std::int64_t head_dim, const Tensor& x);
void RopeBackward(const Context& ctx, const Tensor& table, const Tensor& positions,
                  std::int64_t head_dim, const Tensor& dx);

struct RopeProblem {
  DType dtype;
  std::int64_t tokens, heads, head_dim;
};
struct RopeRun {
  void (*rotate)(const Context&, const Tensor& table, const Tensor& positions,
                 std::int64_t head_dim, bool inverse, const Tensor& x);
};
using RopeImpl = Implementation<RopeProblem, RopeRun>;
std::span<const RopeImpl> RopeImpls();

}  // namespace cistron::ops
