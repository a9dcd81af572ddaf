// BasicOp: a layer that Sequential can hold and the fuser can replace.
//
// Basic ops own parameters and state; what belongs to one pass is in Saved. A fused op (nn/fuse)
// borrows the basic ops that it replaces.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "cistron/nn/saved.h"
#include "cistron/ops/context.h"

namespace cistron::nn {

// Inputs besides x, by the names under which ops take them; undefined: not given.
struct ExtraInputs {
  Tensor split_sizes{};  // i64 [G], rows of each group (GroupedLinear, ScaledSwiGLU), on the device
  Tensor scale{};        // [M] compute type: one factor a row (ScaledSwiGLU)
  Tensor bias_scale{};   // [M] compute type: one factor a row of the bias (GroupedLinear with bias)
};

// What backward computes besides the weight gradients, which go to the parameter store.
struct BackwardOutputs {
  bool input = true;         // the gradient of x, returned
  bool weights = true;       // weight gradients; false: parameters are frozen
  ops::Output scale{};       // d(scale) [M]; undefined: not wanted
  ops::Output bias_scale{};  // d(bias_scale) [M]; undefined: not wanted
  // Where it is given, ops that can queue the gradients of x and scale before those of weights, and
  // tell it the first then, so that they may be on their way elsewhere meanwhile; ops that cannot
  // do not call it.
  std::function<void(const Tensor& dx)> input_ready{};
};

class BasicOp {
 public:
  virtual ~BasicOp() = default;

  // "GroupedLinear".
  virtual std::string_view kind() const = 0;
  // Names of the extra inputs that it takes, which are also those of the gradients it gives.
  virtual std::span<const std::string_view> extra_inputs() const = 0;
  bool Takes(std::string_view input) const {
    const auto inputs = extra_inputs();
    return std::find(inputs.begin(), inputs.end(), input) != inputs.end();
  }
  // This op among others of its kind, for messages: the name of its parameter where it has one.
  virtual const std::string& name() const = 0;

  // Told by Sequential where it appends the op: an op without a name of its own takes one of its
  // position, "2.weight".
  virtual void SetPosition(std::size_t /*position*/) {}

  // Equal parts of x's columns that mean different things, 2 where it is [gate | up]. Sequential
  // tells the op before, which quantises them apart.
  virtual std::int64_t input_parts() const { return 1; }
  virtual void SetOutputParts(std::int64_t /*parts*/) {}
  // Where the parts alternate in blocks of x's columns: the columns of a block; 0: they do not.
  // Sequential tells the op before, which must not quantise over the borders.
  virtual std::int64_t input_interleave() const { return 0; }
  virtual void SetOutputInterleave(std::int64_t /*block*/) {}

  // x [M, …] → y [M, …]. `saved` null: nothing is kept, there will be no backward.
  virtual Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                         Saved* saved) const = 0;
  // Consumes what forward saved. Returns dx, undefined when it is not wanted. dy may be let go of
  // after its last use: whoever moves it in need not hold it meanwhile.
  virtual Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                          Saved& saved) const = 0;
};

}  // namespace cistron::nn
