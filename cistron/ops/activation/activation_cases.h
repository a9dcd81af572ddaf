// SwiGLU problems that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>

namespace cistron::ops {

struct SwiGluCase {
  const char* name;
  std::int64_t rows;         // in use
  std::int64_t width;        // F
  std::int64_t rows_beyond;  // of the buffer
  bool has_scale;
};

inline constexpr SwiGluCase kSwiGluCases[] = {
    {"one element", 1, 1, 0, true},
    {"one token", 1, 64, 2, true},
    {"no rows", 0, 32, 3, true},
    {"no columns", 4, 0, 0, true},
    {"odd width", 5, 37, 1, true},
    {"width below a vector", 9, 3, 0, true},
    {"whole vectors", 6, 96, 2, true},
    {"without scale", 7, 50, 0, false},
    {"several threads", 150, 129, 11, true},
    {"long rows", 3, 2080, 1, true},
};

// Rows and F of a layer's activation in the models that users train on CPUs, for the benchmark.
struct SwiGluShape {
  const char* name;
  std::int64_t rows, width;
};
inline constexpr SwiGluShape kSwiGluShapes[] = {
    {"L0", 4096, 256}, {"small", 8192, 384}, {"wide", 4096, 768}, {"fine", 8192, 128}};

}  // namespace cistron::ops
