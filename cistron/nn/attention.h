// SelfAttention: projections, rotary embedding, causal attention of packed sequences, output
// projection.
#pragma once

#include <string>

#include "cistron/nn/linear.h"
#include "cistron/nn/saved.h"
#include "cistron/ops/attention/attention.h"

namespace cistron::nn {

class SelfAttention {
 public:
  // Parameters: prefix + "{q,k,v,o}_proj.weight". `rope_table` (ops::RopeTable) is shared by all
  // layers.
  SelfAttention(ParameterStore& store, const std::string& prefix, std::int64_t hidden,
                const ops::AttentionConfig& config, Tensor rope_table);

  // x [T, H] → [T, H].
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ops::PackedSequences& sequences,
                 Saved* saved) const;
  Tensor Backward(const ops::Context& ctx, const Tensor& dy, const ops::PackedSequences& sequences,
                  Saved& saved) const;

 private:
  struct Record {
    Tensor x, q, k, v, o, lse;
  };
  ops::AttentionConfig config_;
  Linear q_, k_, v_, o_;
  Tensor rope_table_;
  std::string name_;
};

}  // namespace cistron::nn
