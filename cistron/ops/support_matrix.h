// Which implementation of which op runs which dtype: asked of the implementations, never written
// down.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/ops/implementation.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

// Sizes at which implementations are asked; the defaults are those of a small model.
struct OpSizes {
  std::int64_t tokens = 4096, hidden = 192, ffn = 384, vocab = 256;
  std::int64_t experts = 8, top_k = 2;
  std::int64_t heads = 6, kv_heads = 6, head_dim = 32;
  // Of attention, as in AttentionConfig and AttentionProblem.
  std::int64_t window = 0;
  std::int64_t num_sequences = 1, max_length = 0;
  bool uniform = false;
};

// One row for each op, implementation (in the order of preference at these sizes) and dtype f64,
// f32, bf16: the answer of the implementation to a problem of these sizes. `device`: whose
// implementations are asked; all without it.
std::vector<SupportRow> SupportMatrix(const OpSizes& sizes = {},
                                      std::optional<DeviceType> device = {});

// The same for ops on 8-bit formats: one row for each op, implementation, format e4m3, e5m2 and
// scaling. Both directions of a copy are one answer.
std::vector<SupportRow> FormatSupport(const OpSizes& sizes = {},
                                      std::optional<DeviceType> device = {});

// Both as Markdown tables, a line for each op and implementation (and format); reasons of refusals
// in place.
std::string FormatSupportMatrix();

// Throws kBadInput, naming the nearest and all that there are, unless every op and implementation
// that `choice` names is there: on `device`, or anywhere. `choice`: a value of CISTRON_IMPL.
void CheckImplChoice(std::string_view choice, std::optional<DeviceType> device = {});

// What a training step of a model asks of the ops.
struct Workload {
  DType dtype = DType::kF32;
  DType optimizer_dtype = DType::kF32;  // of the weights that AdamW updates
  OpSizes sizes = {};
  std::vector<QuantizedLayout> layouts = {};  // of quantised operands
  std::vector<std::string> unused = {};       // ops that the model does not run
};

// What Select makes of one op in one direction.
struct OpChoice {
  std::string op, direction;
  std::string preferred = {};              // that the user asked for; empty: the library chooses
  std::string impl = {};                   // empty: none runs
  std::vector<std::string> names = {};     // of all implementations on the device
  std::vector<std::string> refusals = {};  // "cudnn: only bf16", of those that go before
};
std::vector<OpChoice> ChooseImplementations(const Context& ctx, const Workload& workload);

// Throws kUnsupported unless every op has an implementation that runs; names all that have none,
// why, and what to change.
void CheckThatAllRun(const Context& ctx, std::span<const OpChoice> choices);
// What Context::strict() refuses, a line each.
std::vector<std::string> StrictRefusals(std::span<const OpChoice> choices);
// For people: a line an op.
std::string FormatChosen(std::span<const OpChoice> choices);

}  // namespace cistron::ops
