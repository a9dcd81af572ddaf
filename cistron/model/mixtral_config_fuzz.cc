// Fuzz target: whatever bytes come as a config.json, the answer is an Error or a config that can be
// counted with, written and read again. tests/fuzz/mixtral_config holds the cases found.
#include <cstdint>
#include <string>

#include "cistron/base/error.h"
#include "cistron/model/mixtral_config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cistron::model;
  MixtralConfig config;
  std::string dtype;
  try {
    config = ParseMixtralConfig({reinterpret_cast<const char*>(data), size}, "fuzz", &dtype);
  } catch (const cistron::Error&) {
    return 0;
  }
  // What was accepted holds: nothing below may throw.
  Validate(config);
  if (ParameterCount(config) < ActiveParameterCount(config)) __builtin_trap();
  if (!(TrainingFlopsPerToken(config, 4096) > 0)) __builtin_trap();
  const std::string text = ToJson(config, dtype);
  std::string again_dtype;
  const MixtralConfig again = ParseMixtralConfig(text, "fuzz", &again_dtype);
  if (ToJson(again, again_dtype) != text) __builtin_trap();
  return 0;
}
