// Boxes of a global tensor: the parts in which it is stored and asked for. Internal to io/.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "cistron/tensor/shape.h"

namespace cistron::io {

struct Box {
  Shape start;
  Shape size;
};

// "[2, 0] + [4, 8]"
std::string ToString(const Box& box);

// Whether the box lies within a tensor of this shape.
bool IsInside(const Box& box, const Shape& global);

// Empty when the boxes cover the tensor exactly once; otherwise what is wrong: a box outside, the
// first two that overlap, or the first element that no box holds.
std::string ExplainCover(const Shape& global, std::span<const Box> boxes);

// Copies the elements that both boxes hold. Both buffers are dense, `element` bytes an element.
void CopyIntersection(const Box& from, const std::byte* source, const Box& to, std::byte* target,
                      std::size_t element);

}  // namespace cistron::io
