// Random sequences of fusible ops for sequence_fuzz_test and the libFuzzer target sequence_fuzz:
// ops, recipe, dtype, counts and options are drawn from bytes, and the fused run is compared with
// the ops one by one and with the reference.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace cistron::nn {

// Runs the case that the bytes stand for; every string of bytes is one. Returns what was wrong with
// its results, empty when nothing was; `description` says what the case is.
std::string CheckSequence(std::span<const std::uint8_t> bytes, std::string* description = nullptr);

}  // namespace cistron::nn
