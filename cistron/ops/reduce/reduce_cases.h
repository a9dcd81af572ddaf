// Sizes of tensors that the unit test of reduce checks and the benchmark measures.
#pragma once

#include <cstdint>

namespace cistron::ops {

// Around the width of a vector and the size of a block of the sum.
inline constexpr std::int64_t kReduceSizes[] = {0,    1,    7,    15,           16,   17,
                                                4095, 4096, 4097, 3 * 4096 + 5, 50003};

struct ReduceShape {
  const char* name;
  std::int64_t numel;
};
// The gradient of the expert weights of one layer, and one beyond the caches.
inline constexpr ReduceShape kReduceShapes[] = {{"experts", 8 * 384 * 192}, {"model", 8 << 20}};

}  // namespace cistron::ops
