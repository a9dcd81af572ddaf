#include "cistron/io/box.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::io {
namespace {

// The part that two boxes share; nothing when it has no element.
std::optional<Box> Intersect(const Box& a, const Box& b) {
  Box both = a;
  for (int d = 0; d < a.start.rank(); ++d) {
    const std::int64_t begin = std::max(a.start[d], b.start[d]);
    const std::int64_t end = std::min(a.start[d] + a.size[d], b.start[d] + b.size[d]);
    if (begin >= end) return std::nullopt;
    both.start[d] = begin;
    both.size[d] = end - begin;
  }
  return both;
}

// Index of the first element, in row-major order, that no box holds: dimension `d` is cut at all
// edges of the boxes, and each slab is searched in the remaining dimensions.
bool FindGap(const Shape& global, const std::vector<const Box*>& boxes, int d, Shape& index) {
  if (d == global.rank()) return boxes.empty();
  std::vector<std::int64_t> edges = {0};
  for (const Box* box : boxes) {
    edges.push_back(box->start[d]);
    edges.push_back(box->start[d] + box->size[d]);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (const std::int64_t edge : edges) {
    if (edge >= global[d]) break;
    std::vector<const Box*> crossing;
    for (const Box* box : boxes) {
      if (box->start[d] <= edge && edge < box->start[d] + box->size[d]) crossing.push_back(box);
    }
    index[d] = edge;
    if (FindGap(global, crossing, d + 1, index)) return true;
  }
  return false;
}

}  // namespace

std::string ToString(const Box& box) {
  return cistron::ToString(box.start) + " + " + cistron::ToString(box.size);
}

bool IsInside(const Box& box, const Shape& global) {
  if (box.start.rank() != global.rank() || box.size.rank() != global.rank()) return false;
  for (int d = 0; d < global.rank(); ++d) {
    if (box.start[d] < 0 || box.size[d] < 0 || box.start[d] > global[d] ||
        box.size[d] > global[d] - box.start[d]) {
      return false;
    }
  }
  return true;
}

std::string ExplainCover(const Shape& global, std::span<const Box> boxes) {
  std::int64_t covered = 0;
  std::vector<const Box*> filled;
  for (const Box& box : boxes) {
    if (!IsInside(box, global)) {
      return fmt::format("box {} lies outside shape {}", ToString(box), cistron::ToString(global));
    }
    if (box.size.numel() > 0) filled.push_back(&box);
  }
  for (std::size_t i = 0; i < filled.size(); ++i) {
    for (std::size_t j = i + 1; j < filled.size(); ++j) {
      if (Intersect(*filled[i], *filled[j])) {
        return fmt::format("boxes {} and {} overlap", ToString(*filled[i]), ToString(*filled[j]));
      }
    }
    covered += filled[i]->size.numel();  // without overlap never beyond global.numel()
  }
  if (covered == global.numel()) return "";
  Shape index = global;
  FindGap(global, filled, 0, index);
  return fmt::format("{} of {} elements are in no box, the first at {}", global.numel() - covered,
                     global.numel(), cistron::ToString(index));
}

void CopyIntersection(const Box& from, const std::byte* source, const Box& to, std::byte* target,
                      std::size_t element) {
  const std::optional<Box> both = Intersect(from, to);
  if (!both) return;
  const int rank = from.start.rank();
  // Rows along the last dimension are contiguous in both; the others are counted through.
  const std::int64_t row = rank == 0 ? 1 : both->size[rank - 1];
  const std::int64_t rows = both->size.numel() / row;
  const auto offset = [rank](const Box& box, const Shape& index) {
    std::int64_t flat = 0;
    for (int d = 0; d < rank; ++d) flat = flat * box.size[d] + (index[d] - box.start[d]);
    return static_cast<std::size_t>(flat);
  };
  Shape index = both->start;
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(target + offset(to, index) * element, source + offset(from, index) * element,
                static_cast<std::size_t>(row) * element);
    for (int d = rank - 2; d >= 0; --d) {
      if (++index[d] < both->start[d] + both->size[d]) break;
      index[d] = both->start[d];
    }
  }
}

}  // namespace cistron::io
