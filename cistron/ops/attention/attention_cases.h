// Problems of attention that the unit test, the gradient check and the benchmark run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/ops/attention/attention.h"

namespace cistron::ops {

struct AttentionCase {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the sequences
  std::int64_t padding;               // tokens beyond the last
  AttentionConfig config;
};

// Small ones, for tests: lengths around blocks of 64 and 128 queries, of 64 and 96 keys, every
// option.
inline std::vector<AttentionCase> AttentionCases() {
  return {
      {"no_sequence", {}, 0, {2, 1, 8, 0}},
      {"only_padding", {0, 0}, 3, {2, 1, 8, 0}},
      {"one_token", {1}, 0, {2, 1, 16, 0}},
      {"one_token_padded", {1}, 3, {2, 1, 16, 0}},
      {"short_sequences", {1, 2, 0, 3, 17, 0, 1}, 2, {4, 2, 8, 0}},
      {"around_blocks", {63, 64, 65, 95, 96, 97}, 1, {1, 1, 16, 0}},
      {"several_blocks", {200, 97}, 5, {2, 2, 32, 0}},
      {"grouped_query", {130}, 7, {6, 2, 32, 0}},
      {"multi_query", {98, 4}, 0, {8, 1, 16, 0}},
      {"one_head", {100}, 0, {1, 1, 64, 0}},
      {"window_one", {70, 5}, 2, {2, 1, 16, 1}},
      {"window_two", {100}, 0, {2, 1, 16, 2}},
      {"window_short", {210, 40}, 3, {2, 1, 16, 10}},
      {"window_of_a_block", {200}, 0, {2, 2, 16, 64}},
      {"window_across_blocks", {230}, 0, {2, 1, 8, 101}},
      {"window_beyond_sequence", {100, 30}, 0, {2, 1, 16, 1000}},
      {"around_tiles", {127, 128, 129}, 0, {2, 1, 64, 0}},
      {"many_sequences", std::vector<std::int64_t>(300, 3), 5, {2, 1, 16, 0}},
      {"several_tiles", {300, 129}, 3, {4, 2, 128, 0}},
      {"window_across_tiles", {400}, 1, {4, 2, 64, 150}},
      {"head_dim_1", {70}, 0, {2, 1, 1, 0}},
      {"head_dim_7", {80, 9}, 1, {2, 1, 7, 0}},
      {"head_dim_20", {100, 33}, 1, {4, 2, 20, 0}},
      {"head_dim_80", {70}, 0, {2, 1, 80, 0}},
      {"head_dim_128", {130}, 2, {2, 1, 128, 50}},
      {"head_dim_129", {66}, 0, {1, 1, 129, 0}},
  };
}

// Large ones, for the benchmark: the shapes `small` and `wide`, then longer sequences.
inline std::vector<AttentionCase> AttentionBenchmarkCases() {
  return {
      {"small", std::vector<std::int64_t>(8, 512), 0, {6, 2, 32, 0}},
      {"wide", std::vector<std::int64_t>(4, 512), 0, {4, 2, 64, 0}},
      {"small_2048", std::vector<std::int64_t>(2, 2048), 0, {6, 2, 32, 0}},
      {"wide_2048", std::vector<std::int64_t>(2, 2048), 0, {4, 2, 64, 0}},
      {"head_dim_128_2048", std::vector<std::int64_t>(1, 2048), 0, {4, 1, 128, 0}},
      {"window_256_2048", std::vector<std::int64_t>(2, 2048), 0, {4, 2, 64, 256}},
  };
}

}  // namespace cistron::ops
