// A limit on the vector instructions that kernels use, for one set of numbers on a mixed cluster or
// for the speed of another processor: CISTRON_ISA=avx2 or avx512 (default: the best there is).
#pragma once

#include <string>

namespace cistron::ops {

// Applies CISTRON_ISA to this library's kernels and to oneDNN. The first Context calls it; later
// calls do nothing. Throws when the variable names no known set, or one that the processor lacks.
void LimitInstructionSet();

// What kernels use now: "avx512", "avx2" or "baseline".
std::string InstructionSetInUse();

}  // namespace cistron::ops
