// Golden values of Hugging Face's Mixtral: every folder of tests/golden, and proof that a wrong
// model, optimiser or golden value is noticed.
#include "cistron/train/verify.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cistron/io/file.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> GoldenFolders() {
  std::vector<fs::path> folders;
  for (const auto& entry : fs::directory_iterator(CISTRON_SOURCE_DIR "/tests/golden")) {
    if (fs::exists(entry.path() / "about.json")) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

class Golden : public testing::TestWithParam<fs::path> {};

TEST_P(Golden, Fp32) {
  const VerifyReport report = VerifyModel(ops::Context(), GetParam(), DType::kF32);
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
TEST_P(Golden, Fp32Reference) {
  const VerifyReport report = VerifyModel(ops::Context().WithImpl("ref"), GetParam(), DType::kF32);
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
TEST_P(Golden, Fp64) {
  const VerifyReport report = VerifyModel(ops::Context(), GetParam(), DType::kF64);
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
TEST_P(Golden, Bf16) {
  const VerifyReport report = VerifyModel(ops::Context(), GetParam(), DType::kBF16);
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}

INSTANTIATE_TEST_SUITE_P(Folders, Golden, testing::ValuesIn(GoldenFolders()),
                         [](const auto& test) { return test.param.filename().string(); });

// A copy of mixtral_tiny with one text replaced in one file.
class WrongGolden {
 public:
  WrongGolden(const std::string& file, const std::string& from, const std::string& to)
      : directory_(fs::temp_directory_path() /
                   ("cistron_verify_" + std::to_string(::getpid()) + "_" + file)) {
    fs::remove_all(directory_);
    fs::copy(CISTRON_SOURCE_DIR "/tests/golden/mixtral_tiny", directory_);
    std::string text = io::ReadFile(directory_ / file);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    text.replace(at, from.size(), to);
    std::ofstream(directory_ / file, std::ios::binary) << text;
  }
  ~WrongGolden() { fs::remove_all(directory_); }
  VerifyReport Verify() const { return VerifyModel(ops::Context(), directory_, DType::kF32); }

 private:
  fs::path directory_;
};

bool RowOk(const VerifyReport& report, const std::string& quantity) {
  for (const VerifyRow& row : report.rows) {
    if (row.quantity == quantity) return row.ok;
  }
  ADD_FAILURE() << "no row " << quantity;
  return true;
}

TEST(Verify, NoticesAWrongDecay) {
  const VerifyReport report =
      WrongGolden("about.json", "\"weight_decay\": 0.1", "\"weight_decay\": 0.0").Verify();
  EXPECT_FALSE(report.ok());
  EXPECT_TRUE(RowOk(report, "logits"));
  EXPECT_FALSE(RowOk(report, "after"));
}

TEST(Verify, NoticesAWrongAuxiliaryCoefficient) {
  const VerifyReport report =
      WrongGolden("config.json", "\"router_aux_loss_coef\": 0.02", "\"router_aux_loss_coef\": 0.01")
          .Verify();
  EXPECT_TRUE(RowOk(report, "aux_loss"));
  EXPECT_FALSE(RowOk(report, "loss"));
  EXPECT_FALSE(RowOk(report, "grad"));
}

TEST(Verify, NoticesAWrongNormEpsilon) {
  const VerifyReport report =
      WrongGolden("config.json", "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-03").Verify();
  EXPECT_FALSE(RowOk(report, "logits"));
}

TEST(Verify, RefusesAFolderWithoutGoldenValues) {
  EXPECT_THROW(VerifyModel(ops::Context(), CISTRON_SOURCE_DIR "/data", DType::kF32), Error);
}

}  // namespace
}  // namespace cistron::train
