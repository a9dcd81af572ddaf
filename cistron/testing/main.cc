// The main of every test program: GoogleTest's, with the seed printed once and again at each
// failure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "cistron/testing/cuda.h"
#include "cistron/testing/random.h"

namespace {

class SeedPrinter final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const ::testing::UnitTest&) override { Print(); }
  void OnTestEnd(const ::testing::TestInfo& info) override {
    if (info.result()->Failed()) Print();
  }

 private:
  static void Print() {
    std::printf("[   seed   ] %llu (CISTRON_TEST_SEED changes it)\n",
                static_cast<unsigned long long>(cistron::testing::TestSeed()));
  }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedPrinter);
  cistron::testing::UseCuda();
  return RUN_ALL_TESTS();
}
