// One token of the router in a warp: its scores, the order of choice, its probabilities.
#pragma once

#include <cstdint>

#include "cistron/ops/cuda/element.cuh"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/router/router.h"

namespace cistron::ops::internal {

// RouterConfig with what follows from it, as kernels take it.
struct RouterOptions {
  ScoreFunction score;
  int experts, top_k, groups, groups_kept;
  bool normalizes;  // whether the probabilities of a token are divided by their sum
  double routed_scaling;

  explicit RouterOptions(const RouterConfig& c)
      : score(c.score),
        experts(static_cast<int>(c.num_experts)),
        top_k(static_cast<int>(c.top_k)),
        groups(static_cast<int>(c.num_groups)),
        groups_kept(static_cast<int>(c.groups_kept)),
        normalizes(c.normalize && (c.score == ScoreFunction::kSoftmaxAfterTopK ||
                                   (c.score == ScoreFunction::kSigmoid && c.top_k > 1))),
        routed_scaling(c.routed_scaling) {}
  __host__ __device__ bool sigmoid() const { return score == ScoreFunction::kSigmoid; }
  // Added to the sum of the chosen scores before dividing by it.
  template <class C>
  __device__ C epsilon() const {
    return sigmoid() ? static_cast<C>(1e-20) : C(0);
  }
};

// fp32 functions by way of fp64, whose rounding is nearly always the exact one, as that of a C
// library is: choices by a sigmoid are then those of the reference.
__device__ inline float RouterExp(float x) {
  return static_cast<float>(exp(static_cast<double>(x)));
}
__device__ inline double RouterExp(double x) {
  return exp(x);
}
__device__ inline float RouterLog(float x) {
  return static_cast<float>(log(static_cast<double>(x)));
}
__device__ inline double RouterLog(double x) {
  return log(x);
}

__device__ inline int Lane() {
  return static_cast<int>(threadIdx.x) % 32;
}

// What the sums over all experts of a token are.
template <class C>
struct TokenSums {
  C largest;    // logit
  C of_scores;  // Σ sigmoid(l), or Σ exp(l − largest)
  C log_sum_exp;
};

template <class C>
__device__ C ScoreOf(const RouterOptions& options, C logit, C largest) {
  return options.sigmoid() ? 1 / (1 + RouterExp(-logit)) : RouterExp(logit - largest);
}

// Reads a row of logits into `logits` and its scores into `scores`, both [E] in shared memory.
template <class T>
__device__ TokenSums<Compute<T>> LoadToken(const RouterOptions& options, const T* row,
                                           Compute<T>* logits, Compute<T>* scores) {
  using C = Compute<T>;
  C largest = Value(row[0]);
  for (int e = Lane(); e < options.experts; e += 32) {
    logits[e] = Value(row[e]);
    largest = logits[e] > largest ? logits[e] : largest;
  }
  largest = WarpMax(largest);
  C sum_of_exp = 0, sum_of_scores = 0;
  for (int e = Lane(); e < options.experts; e += 32) {
    sum_of_exp += RouterExp(logits[e] - largest);
    scores[e] = ScoreOf(options, logits[e], largest);
    sum_of_scores += scores[e];
  }
  sum_of_exp = WarpSum(sum_of_exp);
  sum_of_scores = WarpSum(sum_of_scores);
  __syncwarp();
  return {largest, sum_of_scores, largest + RouterLog(sum_of_exp)};
}

// A candidate of the choice; index −1: none.
template <class C>
struct Ranked {
  C key;
  int index;
};

// The order of choice: larger keys first, NaN last, ties to the lower index.
template <class C>
__device__ bool Before(const Ranked<C>& a, const Ranked<C>& b) {
  const bool a_nan = isnan(a.key), b_nan = isnan(b.key);
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a.key != b.key) return a.key > b.key;
  return a.index < b.index;
}
template <class C>
__device__ bool IsBetter(const Ranked<C>& a, const Ranked<C>& b) {
  return a.index >= 0 && (b.index < 0 || Before(a, b));
}
template <class C>
__device__ bool Follows(const Ranked<C>& a, const Ranked<C>& last) {
  return last.index < 0 || Before(last, a);
}

// The first of keys[0…n) that comes after `last`, by one thread.
template <class C>
__device__ Ranked<C> NextOf(const C* keys, int n, const Ranked<C>& last) {
  Ranked<C> best{C(0), -1};
  for (int i = 0; i < n; ++i) {
    const Ranked<C> candidate{keys[i], i};
    if (Follows(candidate, last) && IsBetter(candidate, best)) best = candidate;
  }
  return best;
}

// The same by a warp, in every lane, among those whose group of `size` is kept (null: all are).
template <class C>
__device__ Ranked<C> WarpNextOf(const C* keys, int n, const Ranked<C>& last,
                                const unsigned char* kept, int size) {
  Ranked<C> best{C(0), -1};
  for (int i = Lane(); i < n; i += 32) {
    const Ranked<C> candidate{keys[i], i};
    if (kept != nullptr && kept[i / size] == 0) continue;
    if (Follows(candidate, last) && IsBetter(candidate, best)) best = candidate;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const Ranked<C> other{__shfl_xor_sync(0xffffffffu, best.key, offset),
                          __shfl_xor_sync(0xffffffffu, best.index, offset)};
    if (IsBetter(other, best)) best = other;
  }
  return best;
}

// Marks the groups whose experts may be chosen. `group_keys` and `kept` hold an entry a group.
template <class C>
__device__ void KeepGroups(const RouterOptions& options, const C* keys, C* group_keys,
                           unsigned char* kept) {
  const int size = options.experts / options.groups;
  const int counted = options.top_k / options.groups_kept;
  for (int g = Lane(); g < options.groups; g += 32) {
    Ranked<C> last{C(0), -1};
    C sum = 0;
    for (int i = 0; i < counted; ++i) {
      last = NextOf(keys + g * size, size, last);
      sum += last.key;
    }
    group_keys[g] = sum;
    kept[g] = 0;
  }
  __syncwarp();
  Ranked<C> last{C(0), -1};
  for (int i = 0; i < options.groups_kept; ++i) {
    last = WarpNextOf<C>(group_keys, options.groups, last, nullptr, 1);
    if (Lane() == 0) kept[last.index] = 1;
  }
  __syncwarp();
}

// Sum of x over lanes 0…n−1, in their order, in every lane.
template <class C>
__device__ C SumInOrder(C x, int n, C start) {
  for (int i = 0; i < n; ++i) start += __shfl_sync(0xffffffffu, x, i);
  return start;
}

// Probability of slot `lane`, whose expert is `chosen`, before routed_scaling. Lanes from top_k on
// get 0.
template <class C>
__device__ C Probability(const RouterOptions& options, const TokenSums<C>& sums, const C* logits,
                         const C* scores, int chosen) {
  const bool has_slot = Lane() < options.top_k;
  C p = 0;
  if (options.sigmoid()) {
    p = scores[chosen];
  } else if (!options.normalizes) {
    p = scores[chosen] / sums.of_scores;
  } else {
    // Relative to the largest chosen logit, which is the first: its exponential is 1.
    p = RouterExp(logits[chosen] - logits[__shfl_sync(0xffffffffu, chosen, 0)]);
  }
  if (!has_slot) p = 0;
  if (options.normalizes) {
    p /= SumInOrder(p, options.top_k, C(0)) + options.epsilon<C>();
  }
  return p;
}

}  // namespace cistron::ops::internal
