// Problems of the router that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "cistron/ops/router/router.h"

namespace cistron::ops {

struct RouterCase {
  RouterConfig config;
  std::int64_t tokens;
};

inline std::vector<RouterCase> RouterCases() {
  std::vector<RouterCase> cases;
  for (const ScoreFunction score : {ScoreFunction::kSoftmaxBeforeTopK,
                                    ScoreFunction::kSoftmaxAfterTopK, ScoreFunction::kSigmoid}) {
    for (const bool normalize : {true, false}) {
      for (const auto& [experts, k, tokens] : {std::tuple{1, 1, 3},
                                               {8, 2, 530},
                                               {8, 8, 17},
                                               {5, 1, 16},
                                               {32, 4, 40},
                                               {64, 32, 33},
                                               {512, 32, 9}}) {
        cases.push_back({{.score = score,
                          .num_experts = experts,
                          .top_k = k,
                          .normalize = normalize,
                          .routed_scaling = normalize ? 1.0 : 2.5},
                         tokens});
      }
    }
  }
  for (const auto& [experts, k, groups, kept] :
       {std::tuple{32, 8, 8, 4}, {16, 2, 4, 1}, {12, 4, 3, 2}, {512, 32, 16, 16}, {8, 2, 8, 2}}) {
    cases.push_back({{.score = ScoreFunction::kSigmoid,
                      .num_experts = experts,
                      .top_k = k,
                      .num_groups = groups,
                      .groups_kept = kept},
                     41});
  }
  return cases;
}

struct RouterShape {
  const char* name;
  RouterCase problem;
};
inline std::vector<RouterShape> RouterShapes() {
  return {{"small", {{.num_experts = 8, .top_k = 2}, 4096}},
          {"fine", {{.num_experts = 32, .top_k = 4}, 2048}},
          {"sigmoid groups",
           {{.score = ScoreFunction::kSigmoid,
             .num_experts = 64,
             .top_k = 8,
             .num_groups = 8,
             .groups_kept = 4},
            2048}}};
}

}  // namespace cistron::ops
