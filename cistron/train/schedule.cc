#include "cistron/train/schedule.h"

#include <cmath>
#include <numbers>

#include "cistron/base/error.h"

namespace cistron::train {

double LearningRate(const Schedule& s, std::int64_t t) {
  CISTRON_CHECK(t >= 1, "schedule: update {} is not at least 1", t);
  CISTRON_CHECK(s.warmup_steps >= 0 && s.decay_end >= s.warmup_steps,
                "schedule: warm-up of {} updates does not end before the decay at update {}",
                s.warmup_steps, s.decay_end);
  const double w = static_cast<double>(s.warmup_steps);
  const double d = static_cast<double>(s.decay_end);
  const double at = static_cast<double>(t);
  if (t <= s.warmup_steps) return s.peak * at / w;
  if (t >= s.decay_end) return s.peak * s.floor_ratio;
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * (at - w) / (d - w)));
  return s.peak * (s.floor_ratio + (1.0 - s.floor_ratio) * cosine);
}

}  // namespace cistron::train
