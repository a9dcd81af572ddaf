// Training steps by ranks that are threads: what each sends to each, and the memory that each
// takes.
#pragma once

#include <cstdint>
#include <vector>

#include "cistron/train/step_plan.h"

namespace cistron::train {

struct MeasuredRanks {
  std::vector<std::int64_t> sent;   // bytes, [from · ranks + to]
  std::vector<std::int64_t> peaks;  // bytes, of each rank's tensors

  std::int64_t Sent() const;
};

// `steps` steps on random tokens, on the CPU, whatever device the problem names. What ranks agree
// on before the first step is counted too; two calls tell how much that is.
MeasuredRanks MeasureRanks(const StepProblem& problem, int steps);

}  // namespace cistron::train
