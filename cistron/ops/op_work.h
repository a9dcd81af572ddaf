// What the next op does, for profiles that compare its time with what the machine can do.
#pragma once

#include "cistron/ops/context.h"

namespace cistron::ops {

// Operations of products, and the bytes of operands and results, each counted once.
struct OpWork {
  double flops = 0, bytes = 0;
};

class WorkRecorder : public OpRecorder {
 public:
  // Of the op whose Begin comes next.
  virtual void Announce(const OpWork& work) = 0;
  // More of the op that began last.
  virtual void Add(const OpWork& work) = 0;
};

inline double BytesOf(const Tensor& t) {
  return t ? static_cast<double>(t.bytes()) : 0.0;
}
inline double BytesOf(const Output& o) {
  return BytesOf(o.tensor);
}

// Tells a recorder that asks; to be called before Select. `operands`: tensors and outputs,
// undefined ones count nothing.
template <class... Operands>
void AnnounceWork(const Context& ctx, double flops, const Operands&... operands) {
  if (ctx.recorder() == nullptr) return;
  auto* const recorder = dynamic_cast<WorkRecorder*>(ctx.recorder());
  if (recorder != nullptr) recorder->Announce({flops, (0.0 + ... + BytesOf(operands))});
}

// The same of the op that runs already: an implementation that does by itself what others leave to
// ops of their own.
template <class... Operands>
void AddWork(const Context& ctx, double flops, const Operands&... operands) {
  if (ctx.recorder() == nullptr) return;
  auto* const recorder = dynamic_cast<WorkRecorder*>(ctx.recorder());
  if (recorder != nullptr) recorder->Add({flops, (0.0 + ... + BytesOf(operands))});
}

// Of a product of these sizes.
inline double ProductFlops(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace cistron::ops
