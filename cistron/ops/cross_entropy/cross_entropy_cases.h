// Problems of linear cross-entropy that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>

namespace cistron::ops {

struct CrossEntropyCase {
  std::int64_t tokens, width, vocab;
};
// Vocabularies around vectors of every instruction set, one entry, one token.
inline constexpr CrossEntropyCase kCrossEntropyCases[] = {
    {1, 1, 1}, {7, 5, 3}, {37, 16, 256}, {19, 33, 300}, {64, 8, 17}, {257, 12, 5}, {3, 40, 1031}};

struct CrossEntropyShape {
  const char* name;
  CrossEntropyCase problem;
};
inline constexpr CrossEntropyShape kCrossEntropyShapes[] = {
    {"small", {4096, 192, 256}},
    {"wide", {2048, 256, 256}},
    {"large vocabulary", {512, 256, 32000}}};

}  // namespace cistron::ops
