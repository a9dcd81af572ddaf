// A training step of many ranks as messages: every row exchange and every step of a ring sent by
// itself over ports that take one message at a time, with routing drawn at random. What step_plan.h
// has in closed form for even routing is counted and timed here; both share the rates of the
// cluster, the times of products and the latency of an operation, so agreement says nothing about
// those.
#pragma once

#include <cstdint>
#include <vector>

#include "cistron/train/step_plan.h"

namespace cistron::train {

struct SimulationOptions {
  std::uint64_t seed = 1;
  // Of the logarithm of experts' popularities, normal, drawn anew in each layer.
  double skew = 0.1;
};

struct SimulatedRank {
  LinkBytes sent, received;
  double seconds = 0;           // until its step is done
  double most_rows = 1;         // in a layer, as a multiple of what it sends
  std::int64_t peak_bytes = 0;  // with buffers for exactly those
};

struct Simulation {
  StepProblem problem;  // the simulated one: with one micro-batch
  std::vector<SimulatedRank> ranks;
  double seconds = 0;          // of the slowest rank; nothing overlaps
  std::int64_t overflows = 0;  // (rank, layer) pairs whose rows exceed row_capacity
};
// Of one micro-batch of `problem`, which PredictStep must have times for: throws kUnsupported.
Simulation SimulateStep(const StepProblem& problem, const Cluster& cluster,
                        const SimulationOptions& options = {});

}  // namespace cistron::train
