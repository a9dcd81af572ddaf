// How a grouped product is cut into tasks for threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cistron::ops::internal {

// The product of one group: c [m, n] summed over k.
struct GroupProduct {
  std::int64_t m, n, k;
};

// A rectangle of one group's result, computed by one thread.
struct GroupTask {
  std::int64_t group;
  std::int64_t row_begin, row_end;
  std::int64_t col_begin, col_end;
};

// Covers every result exactly once with tasks of similar cost, largest first, so that `threads`
// threads that take them in order finish together. A pure function of its arguments.
std::vector<GroupTask> PlanGroupTasks(std::span<const GroupProduct> products, int threads);

}  // namespace cistron::ops::internal
