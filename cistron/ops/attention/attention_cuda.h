// Attention on a GPU; private to this folder.
#pragma once

#include "cistron/ops/attention/attention.h"

namespace cistron::ops::internal {

void AttentionForwardCuda(const Context& ctx, const AttentionConfig& config,
                          const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Tensor& lse, const Output& o);
void AttentionBackwardCuda(const Context& ctx, const AttentionConfig& config,
                           const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                           const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                           const Output& dq, const Output& dk, const Output& dv);

// On tensor cores (attention_supports_flash.h).
void AttentionForwardFlash(const Context& ctx, const AttentionConfig& config,
                           const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                           const Tensor& v, const Tensor& lse, const Output& o);
void AttentionBackwardFlash(const Context& ctx, const AttentionConfig& config,
                            const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                            const Output& dq, const Output& dk, const Output& dv);

}  // namespace cistron::ops::internal
