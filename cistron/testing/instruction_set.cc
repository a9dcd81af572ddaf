#include "cistron/testing/instruction_set.h"

#include <hwy/targets.h>

namespace cistron::testing {

std::vector<std::int64_t> InstructionSets() {
  std::vector<std::int64_t> targets;
  for (const std::int64_t target : {std::int64_t{HWY_AVX3}, std::int64_t{HWY_AVX2}}) {
    if (hwy::SupportedTargets() & target) targets.push_back(target);
  }
  targets.push_back(HWY_STATIC_TARGET);
  return targets;
}

std::string InstructionSetName(std::int64_t target) {
  return hwy::TargetName(target);
}

ScopedInstructionSet::ScopedInstructionSet(std::int64_t target) {
  hwy::GetChosenTarget().Update(target);
}

// The next dispatch asks the processor again.
ScopedInstructionSet::~ScopedInstructionSet() {
  hwy::GetChosenTarget().DeInit();
}

}  // namespace cistron::testing
