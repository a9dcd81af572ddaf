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

  // The part of the rows of grouped operands that is expected to be in use: where the device alone
  // knows how many come, buffers have room for more (parallel.ep_buffer_factor).
  double rows_in_use() const { return rows_in_use_; }
  void set_rows_in_use(double part) { rows_in_use_ = part; }

 private:
  double rows_in_use_ = 1;
};

// The context's recorder, where it asks for work; else null.
inline WorkRecorder* WorkRecorderOf(const Context& ctx) {
  return ctx.recorder() == nullptr ? nullptr : dynamic_cast<WorkRecorder*>(ctx.recorder());
}

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
  WorkRecorder* const recorder = WorkRecorderOf(ctx);
  if (recorder != nullptr) recorder->Announce({flops, (0.0 + ... + BytesOf(operands))});
}

// The same of the op that runs already: an implementation that does by itself what others leave to
// ops of their own.
template <class... Operands>
void AddWork(const Context& ctx, double flops, const Operands&... operands) {
  WorkRecorder* const recorder = WorkRecorderOf(ctx);
  if (recorder != nullptr) recorder->Add({flops, (0.0 + ... + BytesOf(operands))});
}

// Of a product of these sizes.
inline double ProductFlops(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

// Of grouped products, whose operands have room for `max_rows` rows of all groups together.
inline double GroupedProductFlops(const Context& ctx, std::int64_t max_rows, std::int64_t n,
                                  std::int64_t k) {
  const WorkRecorder* const recorder = WorkRecorderOf(ctx);
  return (recorder == nullptr ? 1 : recorder->rows_in_use()) * ProductFlops(max_rows, n, k);
}

}  // namespace cistron::ops
