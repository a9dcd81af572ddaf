// Routings that the unit test checks.
#pragma once

#include <cstdint>

namespace cistron::ops {

struct PermuteCase {
  const char* name;
  std::int64_t tokens, top_k, experts, width;
  // Every n-th token has no expert (0: all have), only the first `experts_used` experts are chosen.
  std::int64_t masked_every = 0;
  std::int64_t experts_used = 0;
};

inline constexpr PermuteCase kPermuteCases[] = {
    {"one token", 1, 2, 4, 16},
    {"no tokens", 0, 2, 4, 16},
    {"one expert", 9, 1, 1, 7},
    {"top one", 33, 1, 8, 37},
    {"odd width", 20, 2, 8, 35},
    {"width below a vector", 12, 3, 8, 3},
    {"masked tokens", 24, 2, 8, 48, 3},
    {"all tokens masked", 6, 2, 8, 16, 1},
    {"empty experts", 40, 2, 64, 24, 0, 2},
    {"all experts of a token", 5, 8, 8, 32},
    {"many experts", 20, 32, 512, 18},
    {"several threads", 150, 2, 32, 129, 7},
    // Tiles of a GPU: a row to a warp, to part of one, to several.
    {"half a warp", 37, 2, 8, 64, 4},
    {"a warp", 40, 3, 8, 256, 6},
    {"several warps", 21, 3, 8, 776, 5},
    {"wide", 9, 2, 4, 4096},
};

}  // namespace cistron::ops
