#include "cistron/nn/sharded_transfers.h"

#include <algorithm>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::nn {
namespace {

// Whole gradients of sharded parameters that wait for their transfer take memory: no more than so
// many do. Others have their memory anyway.
constexpr std::size_t kMostFlights = 4;

RankExchange::Group GroupOf(const LocalParameterStore::Parameter& p) {
  return p.spec.is_expert ? RankExchange::Group::kReplicas : RankExchange::Group::kAll;
}

}  // namespace

GatheredWeights::Entry& GatheredWeights::Start(ParameterId id,
                                               const LocalParameterStore::Parameter& p) {
  const auto [it, is_new] = entries_.try_emplace(id);
  Entry& entry = it->second;
  if (is_new) {
    entry.whole = ctx_.Empty(p.local_shape, p.value.dtype());
    entry.wait = exchange_.Gather(GroupOf(p), p.value, p.shard_counts, entry.whole);
  }
  return entry;
}

Tensor GatheredWeights::Acquire(ParameterId id, const Parameters& parameters) {
  Entry& entry = Start(id, parameters[static_cast<std::size_t>(id)]);
  ++entry.users;
  if (entry.wait) std::exchange(entry.wait, nullptr)();
  const Tensor whole = entry.whole;
  order_.push_back(id);
  if (at_ >= last_order_.size() || last_order_[at_] != id) {
    at_ = static_cast<std::size_t>(std::find(last_order_.begin(), last_order_.end(), id) -
                                   last_order_.begin());
  }
  if (++at_ < last_order_.size()) {
    const ParameterId next = last_order_[at_];
    Start(next, parameters[static_cast<std::size_t>(next)]);
  }
  return whole;
}

void GatheredWeights::BeginStep() {
  order_.clear();
  at_ = 0;
}

void GatheredWeights::Release(ParameterId id) {
  const auto it = entries_.find(id);
  CISTRON_INVARIANT(it != entries_.end() && it->second.users > 0,
                    "parameters: a weight was released more often than acquired");
  if (--it->second.users == 0) entries_.erase(it);
}

void GatheredWeights::Drop() {
  for (auto& [id, entry] : entries_) {
    CISTRON_INVARIANT(entry.users == 0, "parameters: weights change while they are in use");
    if (entry.wait) entry.wait();
  }
  entries_.clear();
  if (!order_.empty()) last_order_ = std::move(order_);
  BeginStep();
}

void GradientTransfers::Start(ParameterId id, LocalParameterStore::Parameter& p) {
  if (!started_.insert(id).second) return;
  // This rank's is the sum already, and so are its partial sums of squares.
  if (!p.IsSharded() && exchange_.Ranks(GroupOf(p)) == 1) return;
  p.square_sums = {};  // of one rank's part of the sum
  if (p.IsSharded()) {
    flights_.push_back(
        {id, exchange_.ReduceScatter(GroupOf(p), p.whole_grad, p.shard_counts, p.grad)});
  } else {
    flights_.push_back({id, exchange_.Sum(GroupOf(p), p.grad)});
  }
}

void GradientTransfers::WaitForOldest(std::vector<LocalParameterStore::Parameter>& parameters) {
  flights_.front().wait();
  parameters[static_cast<std::size_t>(flights_.front().id)].whole_grad = {};
  flights_.pop_front();
}

void GradientTransfers::Begin(ParameterId id,
                              const std::vector<LocalParameterStore::Parameter>& parameters) {
  CISTRON_CHECK(!started_.contains(id),
                "parameters: the gradient of '{}' is written to after {} micro-batches, the number "
                "that was announced",
                parameters[static_cast<std::size_t>(id)].spec.name, micro_batches_);
  ++calls_[id];
  begun_.push_back(id);
}

void GradientTransfers::Written(std::vector<LocalParameterStore::Parameter>& parameters) {
  for (const ParameterId id : begun_) {
    const auto each = calls_a_micro_batch_.find(id);
    if (each != calls_a_micro_batch_.end() && each->second * micro_batches_ == calls_[id]) {
      Start(id, parameters[static_cast<std::size_t>(id)]);
    }
  }
  begun_.clear();
  const auto holds_memory = [&](const Flight& flight) {
    return parameters[static_cast<std::size_t>(flight.id)].IsSharded();
  };
  while (static_cast<std::size_t>(std::count_if(flights_.begin(), flights_.end(), holds_memory)) >
         kMostFlights) {
    WaitForOldest(parameters);
  }
}

void GradientTransfers::Finish(std::vector<LocalParameterStore::Parameter>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].has_grad) Start(static_cast<ParameterId>(i), parameters[i]);
  }
  while (!flights_.empty()) WaitForOldest(parameters);
  if (micro_batches_ > 0) {
    for (const auto& [id, calls] : calls_) calls_a_micro_batch_[id] = calls / micro_batches_;
  }
  Abandon();
}

void GradientTransfers::Abandon() {
  for (Flight& flight : flights_) flight.wait();
  flights_.clear();
  calls_.clear();
  started_.clear();
  micro_batches_ = 0;
  begun_.clear();
}

}  // namespace cistron::nn
