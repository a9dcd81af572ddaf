// Which implementation of which op runs which dtype: asked of the implementations, never written
// down.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/ops/implementation.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

// One row for each op, implementation (in the order of preference) and dtype f64, f32, bf16: the
// answer of the implementation to a problem of the sizes of a small model.
std::vector<SupportRow> SupportMatrix();

// The same for ops on 8-bit formats: one row for each op, implementation, format e4m3, e5m2 and
// scaling. Both directions of a copy are one answer.
std::vector<SupportRow> FormatSupport();

// Both as Markdown tables, a line for each op and implementation (and format); reasons of refusals
// in place.
std::string FormatSupportMatrix();

// Throws kBadInput, naming the nearest, unless every op and implementation that `choice` names is
// there. `choice`: a value of CISTRON_IMPL.
void CheckImplChoice(std::string_view choice);
// A line for each op: the implementation that `ctx` would choose for a model in `dtype`, and for
// operands quantised as `layouts` say; "none" with the reasons where all refuse.
std::string FormatChosen(const Context& ctx, DType dtype, std::span<const QuantizedLayout> layouts);

}  // namespace cistron::ops
