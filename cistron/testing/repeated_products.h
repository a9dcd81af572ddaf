// Grouped products of a GPU, made over and over while something else uses it: the bits must stay.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cistron/ops/context.h"
#include "cistron/tensor/tensor.h"

namespace cistron::testing {

class RepeatedProducts {
 public:
  // Makes operands in bf16, with groups that are large, ragged and empty, and the first results,
  // which should find the device quiet. `ctx` is of a GPU and has its memory.
  explicit RepeatedProducts(const ops::Context& ctx);

  // Forward, dgrad and wgrad once, into poisoned results. `begin` is called between the poison and
  // the products, `end`, with y, dx and dw, after them and before they are read. Returns how many
  // of the three have other bits than the first ones.
  using End = std::function<void(std::span<const Tensor>)>;
  int CountWrong(const std::function<void()>& begin = {}, const End& end = {}) const;

 private:
  std::vector<Tensor> Make(const std::function<void()>& begin, const End& end) const;

  ops::Context ctx_;
  Tensor x_, w_, dy_, splits_;
  std::vector<Tensor> first_;
};

}  // namespace cistron::testing
