// Names of number formats on the command line.
#pragma once

#include <string>

#include "cistron/base/dtype.h"

namespace cistron::app {

// "fp64", "fp32", "bf16". Throws kInvalidArgument.
inline DType ParsePrecision(const std::string& name) {
  if (name == "fp64") return DType::kF64;
  if (name == "fp32") return DType::kF32;
  if (name == "bf16") return DType::kBF16;
  CISTRON_THROW(kInvalidArgument, "--precision={}: not one of fp64, fp32, bf16", name);
}

}  // namespace cistron::app
