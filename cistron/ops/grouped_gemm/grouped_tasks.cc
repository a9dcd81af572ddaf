#include "cistron/ops/grouped_gemm/grouped_tasks.h"

#include <algorithm>
#include <cmath>

namespace cistron::ops::internal {
namespace {

// Tasks a thread when everything divides well: enough that the last ones to finish wait little.
constexpr std::int64_t kTasksPerThread = 4;
// Each task packs its operands for itself: about the time of this many rows and columns of product.
constexpr double kPackingCost = 8;
// Smallest side of a piece of a larger result.
constexpr std::int64_t kMinPiece = 64;

// Steps on which pieces begin: a cache line of f32, and whole register tiles of the product.
constexpr std::int64_t kRowStep = 8;
constexpr std::int64_t kColStep = 16;

struct Grid {
  std::int64_t rows, cols;
};

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// At least `pieces` rectangles where their size allows, with the least packing, and in a number
// that comes out even over the `share` of the threads that the group's work deserves, where that is
// several.
Grid ChooseGrid(const GroupProduct& p, std::int64_t pieces, double share) {
  const std::int64_t max_rows = std::max<std::int64_t>(1, p.m / kMinPiece);
  const std::int64_t max_cols = std::max<std::int64_t>(1, p.n / kMinPiece);
  Grid best{max_rows, max_cols};
  double best_score = 0;
  for (std::int64_t cols = 1; cols <= max_cols; ++cols) {
    const std::int64_t least = CeilDiv(pieces, cols);
    for (std::int64_t rows = least; rows <= std::min(max_rows, 2 * least); ++rows) {
      const double count = static_cast<double>(rows * cols);
      const double packing = kPackingCost * static_cast<double>(rows) / static_cast<double>(p.m) +
                             kPackingCost * static_cast<double>(cols) / static_cast<double>(p.n);
      const double rounds = share < 1 ? 1 : std::ceil(count / share - 1e-9) * share / count;
      const double score = (1 + packing) * rounds;
      if (best_score == 0 || score < best_score) {
        best = {rows, cols};
        best_score = score;
      }
    }
  }
  return best;
}

std::int64_t Begin(std::int64_t n, std::int64_t parts, std::int64_t step, std::int64_t i) {
  return i == parts ? n : n * i / parts / step * step;
}

double Cost(double rows, double cols, std::int64_t k) {
  return (rows + 1) * (cols + 1) * static_cast<double>(k + 1);
}

}  // namespace

std::vector<GroupTask> PlanGroupTasks(std::span<const GroupProduct> products, int threads) {
  double total = 0;
  for (const GroupProduct& p : products) {
    total += Cost(static_cast<double>(p.m), static_cast<double>(p.n), p.k);
  }
  const double target =
      threads <= 1 ? total : total / static_cast<double>(threads * kTasksPerThread);
  std::vector<GroupTask> tasks;
  std::vector<double> costs;
  for (std::size_t g = 0; g < products.size(); ++g) {
    const GroupProduct& p = products[g];
    if (p.m == 0 || p.n == 0) continue;
    const double cost = Cost(static_cast<double>(p.m), static_cast<double>(p.n), p.k);
    const Grid grid = ChooseGrid(p, 1 + static_cast<std::int64_t>(cost / target * (1 - 1e-9)),
                                 threads * cost / total);
    for (std::int64_t r = 0; r < grid.rows; ++r) {
      for (std::int64_t c = 0; c < grid.cols; ++c) {
        tasks.push_back({static_cast<std::int64_t>(g), Begin(p.m, grid.rows, kRowStep, r),
                         Begin(p.m, grid.rows, kRowStep, r + 1), Begin(p.n, grid.cols, kColStep, c),
                         Begin(p.n, grid.cols, kColStep, c + 1)});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [&](const GroupTask& a, const GroupTask& b) {
    const auto cost = [&](const GroupTask& t) {
      return Cost(static_cast<double>(t.row_end - t.row_begin),
                  static_cast<double>(t.col_end - t.col_begin),
                  products[static_cast<std::size_t>(t.group)].k);
    };
    return cost(a) > cost(b);
  });
  return tasks;
}

}  // namespace cistron::ops::internal
