// The published layout of Mixtral's weights, one tensor an expert, as parts of the canonical
// tensors. Internal to model/.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/model/hugging_face.h"
#include "cistron/tensor/shape.h"

namespace cistron::model {

// A tensor of a file that is `shape.numel()` consecutive elements of a canonical tensor.
struct FilePart {
  std::string name;
  Shape shape;
  std::int64_t begin = 0;  // first element in the flat canonical tensor
};

// How a canonical parameter is named in a file. Published: w1 is the gate, w3 up, w2 down, each
// [out, in] as in memory, so every part is contiguous and nothing is transposed. Stacked: itself.
std::vector<FilePart> FileParts(const ParameterInfo& parameter, ExpertLayout layout);

}  // namespace cistron::model
