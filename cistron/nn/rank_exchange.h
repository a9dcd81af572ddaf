// What the store of one of several ranks asks of the others; parallel/ implements it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "cistron/tensor/tensor.h"

namespace cistron::nn {

// Every rank makes the same calls in the same order. Each starts a transfer and returns; the
// tensors belong to the transfer until the function that it returned has been called, once, which
// waits.
class RankExchange {
 public:
  using Wait = std::function<void()>;
  // Which ranks: those that hold the same experts, or all.
  enum class Group { kReplicas, kAll };

  virtual ~RankExchange() = default;

  virtual int Ranks(Group group) const = 0;

  // t = the sum of t over the ranks, in their order, with the same bits on each.
  [[nodiscard]] virtual Wait Sum(Group group, const Tensor& t) = 0;
  // `whole` = the shards of the ranks one after another; counts: elements of each rank's.
  [[nodiscard]] virtual Wait Gather(Group group, const Tensor& shard,
                                    std::span<const std::int64_t> counts, const Tensor& whole) = 0;
  // `shard` = this rank's part of the sum of `whole` over the ranks, in their order.
  [[nodiscard]] virtual Wait ReduceScatter(Group group, const Tensor& whole,
                                           std::span<const std::int64_t> counts,
                                           const Tensor& shard) = 0;
};

}  // namespace cistron::nn
