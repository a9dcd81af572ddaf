// libFuzzer target: sequences of fusible ops drawn from the input; see sequence_case.h.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cistron/nn/sequence_case.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string description;
  const std::string wrong = cistron::nn::CheckSequence({data, size}, &description);
  if (!wrong.empty()) {
    std::fprintf(stderr, "%s\n%s", description.c_str(), wrong.c_str());
    std::abort();
  }
  return 0;
}
