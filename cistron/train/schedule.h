// The learning rate of every update: linear warm-up, cosine decay, constant floor.
//
//   t ≤ W:  peak·t/W;   t < D:  peak·(f + (1−f)·½(1 + cos(π(t−W)/(D−W))));   t ≥ D:  peak·f
//
// The first case that applies. W warm-up updates, D end of the decay, f floor as a fraction of the
// peak.
#pragma once

#include <cstdint>

namespace cistron::train {

struct Schedule {
  double peak = 1e-3;
  std::int64_t warmup_steps = 0;  // W ≥ 0
  std::int64_t decay_end = 0;     // D ≥ W
  double floor_ratio = 0.0;       // f in [0, 1]
};

// Rate of update t = 1, 2, …
double LearningRate(const Schedule& schedule, std::int64_t t);

}  // namespace cistron::train
