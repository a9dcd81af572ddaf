// Golden values of a model folder, checked on this machine.
//
// A folder holds config.json, model.safetensors, golden.safetensors and about.json, all made by
// other software (tests/golden/README.md says how). One forward and backward pass and the AdamW
// steps of the file are repeated, and each quantity is compared.
//
// Bounds. fp32 and fp64: error of a tensor = max|got − golden| / max|golden|; logits, router logits
// and gradients 1e-5; loss and auxiliary loss 1e-6; losses of the steps 1e-5, their gradient norms
// 1e-4 (relative); weights after the steps max|got − golden| ≤ 1e-4. A gradient that is rounding
// noise (below 1e-6 of the model's largest) is measured against that largest, and its parameter is
// left out of the weights after the steps. bf16: twice the error that the scalar reference
// implementation makes at the same precision on the same folder, which is measured in the same
// call.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cistron/base/dtype.h"
#include "cistron/ops/context.h"

namespace cistron::train {

struct VerifyRow {
  std::string quantity;  // "logits", "grad (worst: model.norm.weight)"
  double error = 0;
  double bound = 0;
  bool ok = false;
};

struct VerifyReport {
  std::filesystem::path path;
  std::vector<VerifyRow> rows;
  bool ok() const;
};

// `precision`: f64, f32 or bf16. Throws when the folder or a file of it cannot be read, or lacks a
// tensor.
VerifyReport VerifyModel(const ops::Context& ctx, const std::filesystem::path& directory,
                         DType precision);

// A table for a terminal, one row a quantity.
std::string FormatVerifyReport(const VerifyReport& report);

}  // namespace cistron::train
