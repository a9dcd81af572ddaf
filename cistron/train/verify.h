// Golden values of a model folder, checked on this machine.
//
// A folder holds config.json, model.safetensors, golden.safetensors and about.json, all made by
// other software (tests/golden/README.md says how). One forward and backward pass and the AdamW
// steps of the file are repeated, and each quantity is compared.
//
// Bounds in fp32 and fp64. Error of a tensor = max|got − golden| / max|golden|; logits, router
// logits and gradients 1e-5; loss and auxiliary loss 1e-6; losses of the steps 1e-5, their gradient
// norms 1e-4 (relative). Weights after the steps: |got − golden| ≤ 1e-4 an element, or what AdamW
// makes of gradients that err by 1e-6 of their tensor's largest (adamw_error.h), where that is
// more: where a gradient is hardly above the rounding of the file's own fp32.
// A gradient that is rounding noise as a whole in the file (below 1e-6 of the model's largest; zero
// in exact arithmetic, as that of keys and queries under a window of one) is measured against that
// largest, and errs by 1e-6 of it in the weights after the steps. Where it is a router's gate
// (top-1 routing without auxiliary loss), noise moves the gate by whole steps and with it the
// routing: then the first step alone is compared, and a note says so.
//
// Bounds in bf16 and in recipes. Twice the error of the scalar reference at the same precision on
// the same folder, measured in the same call: for tensors the worst error against the file; for
// single numbers (losses, norms) what the reference's errors come to when they do not cancel
// (reference_errors.h), plus the fp32 bound for the file's own rounding. A token whose expert the
// precision changes errs by a whole expert: so the reference is given the choices that the
// implementation makes, and a choice that rounding does not explain fails as `choices`; a note
// counts those that are not fp64's. docs/decisions/0010 derives all of it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cistron/base/dtype.h"
#include "cistron/ops/context.h"
#include "cistron/quant/recipe.h"

namespace cistron::train {

// The model's dtype (f64, f32 or bf16) and the recipe of its linear layers.
struct VerifyPrecision {
  DType dtype = DType::kF32;
  quant::Recipe recipe = quant::BF16{};
  bool is_low() const { return dtype == DType::kBF16 || quant::Quantizes(recipe); }
};

// The value of a quantity that comes nearest to its bound, or goes furthest beyond it.
struct VerifyRow {
  std::string quantity;  // "logits", "train.loss"
  double error = 0;
  double bound = 0;
  bool ok = false;
  std::string how = "bound";  // or "bitwise": then `error` counts the values that differ
  std::int64_t compared = 0;  // values, where they are counted
};

struct VerifyReport {
  std::filesystem::path path;
  std::vector<VerifyRow> rows;
  std::string note;         // what could not be compared, and why; mostly empty
  std::string bounds = {};  // where they come from, when not from the precision alone
  bool ok() const;
};

// Throws when the folder or a file of it cannot be read, or lacks a tensor.
VerifyReport VerifyModel(const ops::Context& ctx, const std::filesystem::path& directory,
                         const VerifyPrecision& precision);

// A file of golden numerics (tests/golden/README.md, "numerics"): formats, scales, products,
// activation, router, permutation and schedule, of whatever shapes the file holds. Codes, scales,
// routing and permutation are compared bit for bit, all else under derived bounds. A tensor that
// is not recognised is a failure.
VerifyReport VerifyNumerics(const ops::Context& ctx, const std::filesystem::path& file);

// A table for a terminal, one row a quantity.
std::string FormatVerifyReport(const VerifyReport& report);

}  // namespace cistron::train
