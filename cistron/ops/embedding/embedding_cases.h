// Problems of the embedding that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>

namespace cistron::ops {

struct EmbeddingCase {
  std::int64_t tokens, vocab, width;
};
// No token, one, one entry, more tokens than entries and fewer, widths around vectors.
inline constexpr EmbeddingCase kEmbeddingCases[] = {
    {1, 1, 1}, {0, 5, 3}, {37, 7, 33}, {5, 300, 64}, {200, 4, 65}, {64, 1, 16}, {513, 256, 20}};

// Of models that users train on CPUs; a byte tokenizer's vocabulary, of which DNA uses five.
struct EmbeddingShape {
  const char* name;
  EmbeddingCase problem;
};
inline constexpr EmbeddingShape kEmbeddingShapes[] = {{"small", {4096, 256, 192}},
                                                      {"wide", {2048, 256, 256}}};

}  // namespace cistron::ops
