// Which implementation of which op runs which dtype: asked of the implementations, never written
// down.
#pragma once

#include <string>
#include <vector>

#include "cistron/ops/implementation.h"

namespace cistron::ops {

// One row for each op, implementation (in the order of preference) and dtype f64, f32, bf16: the
// answer of the implementation to a problem of the sizes of a small model.
std::vector<SupportRow> SupportMatrix();

// The matrix as a Markdown table, a line for each op and implementation; reasons of refusals in
// place.
std::string FormatSupportMatrix();

}  // namespace cistron::ops
