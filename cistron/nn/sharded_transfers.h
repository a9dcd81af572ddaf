// Transfers of a store whose parameters live on several ranks: weights gathered ahead of their use,
// gradients reduced behind their making. Internal to the store.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <vector>

#include "cistron/nn/parameter.h"

namespace cistron::nn {

// Whole weights of sharded parameters, each for as long as somebody holds it.
//
// Gathered ahead: steps ask for weights in an order that repeats, so that of the last step tells
// which comes next. The few that were asked for last would not: q, k and v are asked for alike in
// both directions. A guess that was wrong costs its transfer; all ranks make the same one.
class GatheredWeights {
 public:
  using Parameters = std::vector<LocalParameterStore::Parameter>;
  GatheredWeights(const ops::Context& ctx, RankExchange& exchange)
      : ctx_(ctx), exchange_(exchange) {}

  Tensor Acquire(ParameterId id, const Parameters& parameters);
  void Release(ParameterId id);
  // What was asked for since the last step, by evaluations, is no part of the order of steps.
  void BeginStep();
  // After a step's passes, before the weights change: ends what is under way.
  void Drop();

 private:
  struct Entry {
    Tensor whole;
    RankExchange::Wait wait;
    int users = 0;
  };
  Entry& Start(ParameterId id, const LocalParameterStore::Parameter& p);

  ops::Context ctx_;
  RankExchange& exchange_;
  std::map<ParameterId, Entry> entries_;
  std::vector<ParameterId> order_, last_order_;  // of this step so far, of the last one
  std::size_t at_ = 0;                           // where in last_order_ this step is
};

// Gradients of a step become those of the global batch, each as soon as it is complete: when every
// micro-batch has added to it as often as in the step before. In a store's first step, and where
// the number of micro-batches is not known, that is at the end of the step.
class GradientTransfers {
 public:
  explicit GradientTransfers(RankExchange& exchange) : exchange_(exchange) {}

  // The step that begins has so many micro-batches.
  void Expect(std::int64_t micro_batches) { micro_batches_ = micro_batches; }
  // A gradient is about to be written.
  void Begin(ParameterId id, const std::vector<LocalParameterStore::Parameter>& parameters);
  // Every gradient that was begun is written.
  void Written(std::vector<LocalParameterStore::Parameter>& parameters);
  // Waits until every gradient is here.
  void Finish(std::vector<LocalParameterStore::Parameter>& parameters);
  // Forgets a step that will not be finished.
  void Abandon();

 private:
  struct Flight {
    ParameterId id;
    RankExchange::Wait wait;
  };
  void Start(ParameterId id, LocalParameterStore::Parameter& p);
  void WaitForOldest(std::vector<LocalParameterStore::Parameter>& parameters);

  RankExchange& exchange_;
  std::int64_t micro_batches_ = 0;                                   // 0: not known
  std::map<ParameterId, std::int64_t> calls_, calls_a_micro_batch_;  // of GradientOutput
  std::vector<ParameterId> begun_;                                   // since the last Written
  std::set<ParameterId> started_;
  std::deque<Flight> flights_;
};

}  // namespace cistron::nn
