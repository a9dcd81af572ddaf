// Problems of rope that the unit test, the gradient check and the benchmark run.
#pragma once

#include <cstdint>
#include <vector>

namespace cistron::ops {

struct RopeCase {
  std::int64_t tokens, heads, head_dim;
};

// Half widths around the vectors of every instruction set.
inline std::vector<RopeCase> RopeCases() {
  return {{0, 2, 8}, {1, 1, 2}, {5, 3, 6}, {40, 2, 20}, {33, 6, 32}, {20, 4, 64}, {9, 1, 70}};
}

}  // namespace cistron::ops
