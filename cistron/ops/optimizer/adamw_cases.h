// Sizes of parameters that the unit test of AdamW checks and the benchmark measures.
#pragma once

#include <cstdint>

namespace cistron::ops {

// Around the vectors of every instruction set, and enough for several threads.
inline constexpr std::int64_t kAdamWSizes[] = {1, 15, 16, 17, 100, 40007};

struct AdamWShape {
  const char* name;
  std::int64_t numel;
};
// Expert weights of one layer, and a parameter that stays in the second-level cache.
inline constexpr AdamWShape kAdamWShapes[] = {{"experts", 8 * 384 * 192}, {"attention", 192 * 192}};

}  // namespace cistron::ops
