// Random sequences of ops: fused, one by one, and the reference. CISTRON_FUZZ_SECONDS makes it run
// longer than the moment that the test suite gives it.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "cistron/base/philox.h"
#include "cistron/nn/sequence_case.h"
#include "cistron/testing/random.h"

namespace cistron::nn {
namespace {

TEST(SequenceFuzz, FusedUnfusedAndReferenceAgree) {
  const char* longer = std::getenv("CISTRON_FUZZ_SECONDS");
  const std::chrono::duration<double> time(longer != nullptr ? std::atof(longer) : 1.0);
  const RandomStream stream(testing::TestSeed(), "sequences");
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t at = 0;
  int cases = 0;
  while (cases < 5 || std::chrono::steady_clock::now() - start < time) {
    std::vector<std::uint8_t> bytes(24 + stream.Below(at++, 40));
    for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(stream.Below(at++, 256));
    std::string description;
    const std::string wrong = CheckSequence(bytes, &description);
    ASSERT_EQ(wrong, "") << "case " << cases << ": " << description;
    ++cases;
  }
  RecordProperty("cases", cases);
}

// Found by the fuzzer.
TEST(SequenceFuzz, CasesThatFailedOnce) {
  const std::vector<std::uint8_t> cases[] = {{0x26, 0xd7, 0x32, 0x5b, 0x3a, 0x08, 0x5b, 0x26},
                                             {0x00, 0xff, 0x00, 0x00, 0x8b, 0x8b, 0x8b}};
  for (const auto& bytes : cases) {
    std::string description;
    EXPECT_EQ(CheckSequence(bytes, &description), "") << description;
  }
}

// The shortest one too.
TEST(SequenceFuzz, EveryStringOfBytesIsACase) {
  EXPECT_EQ(CheckSequence({}), "");
}

}  // namespace
}  // namespace cistron::nn
