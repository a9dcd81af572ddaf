// Grouped products that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>
#include <vector>

namespace cistron::ops {

struct GroupedGemmCase {
  const char* name;
  std::vector<std::int64_t> split_sizes;
  std::int64_t n, k;             // w [E, n, k]
  std::int64_t rows_beyond = 0;  // of the buffer, after the last group
};

inline std::vector<GroupedGemmCase> GroupedGemmCases() {
  return {
      {"one group", {9}, 12, 10},
      {"one token", {0, 1, 0}, 24, 16},
      {"first group empty", {0, 5, 7}, 8, 12, 3},
      {"middle group empty", {4, 0, 6}, 8, 12},
      {"last group empty", {4, 6, 0}, 8, 12, 3},
      {"all groups empty", {0, 0, 0}, 8, 12, 4},
      {"no rows at all", {0, 0}, 8, 12},
      {"odd rows", {1, 7, 33, 5, 65, 0, 31}, 24, 20, 9},
      {"odd widths", {3, 17, 6}, 37, 29, 2},
      {"all rows on one expert", {0, 0, 150, 0}, 136, 16, 20},
      {"uneven", {130, 60, 10, 30}, 40, 132, 0},
  };
}

// Shapes of one layer's products in the models that users train on CPUs, for the benchmark:
// tokens·top-k rows over uneven groups.
struct GroupedGemmShape {
  const char* name;
  std::int64_t groups, rows, n, k;
};
inline constexpr GroupedGemmShape kGroupedGemmShapes[] = {
    {"L0 fc1", 8, 4096, 512, 128},    {"L0 fc2", 8, 4096, 128, 256},
    {"small fc1", 8, 8192, 768, 192}, {"small fc2", 8, 8192, 192, 384},
    {"wide fc1", 8, 4096, 1536, 256}, {"wide fc2", 8, 4096, 256, 768},
    {"fine fc1", 32, 8192, 256, 256}, {"fine fc2", 32, 8192, 256, 128},
};

}  // namespace cistron::ops
