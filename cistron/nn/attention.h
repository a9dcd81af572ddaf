// SelfAttention: projections, rotary embedding, causal attention of packed sequences, output
// projection.
#pragma once

#include <memory>
#include <string>

#include "cistron/nn/linear.h"
#include "cistron/nn/rotary_table.h"
#include "cistron/nn/saved.h"
#include "cistron/ops/attention/attention.h"

namespace cistron::nn {

class SelfAttention {
 public:
  // Parameters: prefix + "{q,k,v,o}_proj.weight". `rotary` is shared by all layers.
  SelfAttention(ParameterStore& store, const std::string& prefix, std::int64_t hidden,
                const ops::AttentionConfig& config, std::shared_ptr<RotaryTable> rotary);

  // x [T, H] → [T, H].
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ops::PackedSequences& sequences,
                 Saved* saved) const;
  Tensor Backward(const ops::Context& ctx, const Tensor& dy, const ops::PackedSequences& sequences,
                  Saved& saved) const;

 private:
  struct Record {
    SavedOperand xq, xk, xv, xo;  // inputs of the projections
    Tensor q, k, v, o, lse;
  };
  ops::AttentionConfig config_;
  Linear q_, k_, v_, o_;
  std::shared_ptr<RotaryTable> rotary_;
  std::string name_;
};

}  // namespace cistron::nn
