// Runs tuned kernels with each instruction set that this machine has, not only the best.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cistron::testing {

// Highway targets that kernels are compiled for and this machine runs, best first; the last is the
// scalar baseline.
std::vector<std::int64_t> InstructionSets();
std::string InstructionSetName(std::int64_t target);

// Kernels use `target` while this lives.
class ScopedInstructionSet {
 public:
  explicit ScopedInstructionSet(std::int64_t target);
  ~ScopedInstructionSet();
  ScopedInstructionSet(const ScopedInstructionSet&) = delete;
  ScopedInstructionSet& operator=(const ScopedInstructionSet&) = delete;
};

}  // namespace cistron::testing
