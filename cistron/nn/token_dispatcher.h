// Token rows to the experts and back. One rank: a permutation. Many ranks: parallel/ adds the
// exchange.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "cistron/ops/context.h"
#include "cistron/ops/permute/permute.h"
#include "cistron/tensor/grouped_tensor.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::nn {

class TokenDispatcher {
 public:
  // State of one dispatch, kept for combine and backward.
  struct State {
    virtual ~State() = default;
  };
  struct Dispatched {
    GroupedTensor rows;  // this rank's experts, [rows, H]
    Tensor probs;        // [rows], the router probability of each row, compute type
    std::shared_ptr<const State> state;
  };
  virtual ~TokenDispatcher() = default;

  // x [T, H], experts i32 [T, K], probs [T, K]. `row_codes`: that nothing is read of the rows but
  // their codes in this layout, row-wise, with scales that are powers of two, and that decoding
  // them is exact: the rows may be the decoded values.
  virtual Dispatched Dispatch(const ops::Context& ctx, const Tensor& x, const Tensor& experts,
                              const Tensor& probs,
                              const std::optional<QuantizedLayout>& row_codes) = 0;
  // y[t] = sum of the token's rows in slot order (they carry their probability already).
  virtual Tensor Combine(const ops::Context& ctx, const State& state, const Tensor& rows) = 0;
  // Gradient of Combine: each row receives its token's dy.
  virtual Tensor CombineBackward(const ops::Context& ctx, const State& state, const Tensor& dy) = 0;
  // Gradient of Dispatch: dx [T, H] and dprobs [T, K].
  virtual void DispatchBackward(const ops::Context& ctx, const State& state, const Tensor& drows,
                                const Tensor& drow_probs, const ops::Output& dx,
                                const ops::Output& dprobs) = 0;

  // The same in two parts, between which other work may be queued, but no other call of the
  // dispatcher: BeginDispatchBackward may send rows on their way beside that work, the function
  // that it returns is the rest. It keeps its tensors.
  using Rest = std::function<void(const ops::Output& dx, const ops::Output& dprobs)>;
  virtual Rest BeginDispatchBackward(const ops::Context& ctx,
                                     const std::shared_ptr<const State>& state, const Tensor& drows,
                                     const Tensor& drow_probs) {
    return [=, this](const ops::Output& dx, const ops::Output& dprobs) {
      DispatchBackward(ctx, *state, drows, drow_probs, dx, dprobs);
    };
  }
  // Whether the first part sends anything, so that it pays to call it early.
  virtual bool SendsBeside(const State&) const { return false; }
};

class LocalTokenDispatcher final : public TokenDispatcher {
 public:
  explicit LocalTokenDispatcher(std::int64_t num_experts) : num_experts_(num_experts) {}
  Dispatched Dispatch(const ops::Context& ctx, const Tensor& x, const Tensor& experts,
                      const Tensor& probs,
                      const std::optional<QuantizedLayout>& row_codes) override;
  Tensor Combine(const ops::Context& ctx, const State& state, const Tensor& rows) override;
  Tensor CombineBackward(const ops::Context& ctx, const State& state, const Tensor& dy) override;
  void DispatchBackward(const ops::Context& ctx, const State& state, const Tensor& drows,
                        const Tensor& drow_probs, const ops::Output& dx,
                        const ops::Output& dprobs) override;

 private:
  std::int64_t num_experts_;
};

}  // namespace cistron::nn
