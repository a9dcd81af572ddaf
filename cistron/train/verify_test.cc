// Golden values of Hugging Face's Mixtral: every folder of tests/golden, and proof that a wrong
// model, optimiser or golden value is noticed.
#include "cistron/train/verify.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cistron/io/file.h"
#include "cistron/io/safetensors.h"
#include "cistron/train/golden_replay.h"
#include "cistron/train/reference_errors.h"

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
  const VerifyReport report = VerifyModel(ops::Context(), GetParam(), {DType::kF32});
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
TEST_P(Golden, Fp32Reference) {
  const VerifyReport report =
      VerifyModel(ops::Context().WithImpl("ref"), GetParam(), {DType::kF32});
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
TEST_P(Golden, Fp64) {
  const VerifyReport report = VerifyModel(ops::Context(), GetParam(), {DType::kF64});
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
TEST_P(Golden, Bf16) {
  const VerifyReport report = VerifyModel(ops::Context(), GetParam(), {DType::kBF16});
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}

// A recipe of every kind, over a bf16 model as the program trains it, and over fp32 activations.
struct RecipeCase {
  const char* name;
  VerifyPrecision precision;
};
const RecipeCase kRecipes[] = {
    {"Delayed", {DType::kBF16, quant::DelayedScaling{}}},
    {"Current", {DType::kBF16, quant::Float8CurrentScaling{}}},
    {"Block", {DType::kBF16, quant::Float8BlockScaling{}}},
    {"Mxfp8", {DType::kBF16, quant::MXFP8BlockScaling{}}},
    {"Mxfp8OverFp32", {DType::kF32, quant::MXFP8BlockScaling{}}},
};
class GoldenRecipe : public testing::TestWithParam<std::tuple<std::string, RecipeCase>> {};

TEST_P(GoldenRecipe, TenStepsWithinTwiceTheErrorOfTheReference) {
  const auto& [folder, recipe] = GetParam();
  const VerifyReport report =
      VerifyModel(ops::Context(), CISTRON_SOURCE_DIR "/tests/golden/" + folder, recipe.precision);
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
}
INSTANTIATE_TEST_SUITE_P(Folders, GoldenRecipe,
                         testing::Combine(testing::Values("mixtral_tiny"),
                                          testing::ValuesIn(kRecipes)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + std::get<1>(test.param).name;
                         });

INSTANTIATE_TEST_SUITE_P(Folders, Golden, testing::ValuesIn(GoldenFolders()),
                         [](const auto& test) { return test.param.filename().string(); });

// A copy of mixtral_tiny with one text replaced in one file.
class WrongGolden {
 public:
  WrongGolden(const std::string& file, const std::string& from, const std::string& to)
      : WrongGolden(file) {
    std::string text = io::ReadFile(directory_ / file);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    text.replace(at, from.size(), to);
    Write(file, text);
  }
  // Adds `delta` to one element of a golden tensor.
  WrongGolden(const std::string& tensor, std::int64_t element, float delta)
      : WrongGolden("golden.safetensors") {
    const std::string file = "golden.safetensors";
    std::string bytes = io::ReadFile(directory_ / file);
    const io::SafetensorsFile golden(directory_ / file);
    const io::TensorEntry* entry = golden.Find(tensor);
    EXPECT_NE(entry, nullptr);
    char* at = bytes.data() + bytes.size() - DataBytes(golden) + entry->begin +
               static_cast<std::size_t>(element) * sizeof(float);
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    value += delta;
    std::memcpy(at, &value, sizeof(value));
    Write(file, bytes);
  }
  ~WrongGolden() { fs::remove_all(directory_); }
  VerifyReport Verify(const VerifyPrecision& precision = {}) const {
    return VerifyModel(ops::Context(), directory_, precision);
  }

 private:
  explicit WrongGolden(const std::string& file)
      : directory_(fs::temp_directory_path() /
                   ("cistron_verify_" + std::to_string(::getpid()) + "_" + file)) {
    fs::remove_all(directory_);
    fs::copy(CISTRON_SOURCE_DIR "/tests/golden/mixtral_tiny", directory_);
  }
  static std::size_t DataBytes(const io::SafetensorsFile& file) {
    std::uint64_t end = 0;
    for (const io::TensorEntry& entry : file.entries()) end = std::max(end, entry.end);
    return end;
  }
  void Write(const std::string& file, const std::string& bytes) const {
    std::ofstream(directory_ / file, std::ios::binary | std::ios::trunc) << bytes;
  }

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

// The bound of the weights is wider only where the gradient is rounding noise.
TEST(Verify, NoticesOneWrongWeight) {
  for (const char* tensor : {"after.model.norm.weight", "after.model.embed_tokens.weight"}) {
    const std::int64_t element = 7 * 32;  // a token of the input: ids from 3
    const bool matrix = std::string(tensor).find("embed") != std::string::npos;
    const VerifyReport report = WrongGolden(tensor, matrix ? element : 7, 2e-4f).Verify();
    EXPECT_FALSE(RowOk(report, "after")) << tensor;
    EXPECT_TRUE(RowOk(report, "train.loss"));
  }
}

// The bounds of single numbers in bf16 do not depend on how the errors of the reference cancel, and
// still tell a bf16 result from a wrong one.
TEST(Verify, NoticesAWrongNumberInBf16) {
  const VerifyReport loss = WrongGolden("loss", 0, 0.1f).Verify({DType::kBF16});
  EXPECT_FALSE(RowOk(loss, "loss"));
  const VerifyReport aux = WrongGolden("aux_loss", 0, 0.1f).Verify({DType::kBF16});
  EXPECT_FALSE(RowOk(aux, "aux_loss"));
  const VerifyReport step = WrongGolden("train.loss", 4, 0.1f).Verify({DType::kBF16});
  EXPECT_FALSE(RowOk(step, "train.loss"));
  const VerifyReport norm = WrongGolden("train.grad_norm", 0, 0.2f).Verify({DType::kBF16});
  EXPECT_FALSE(RowOk(norm, "train.grad_norm"));
}

TEST(Verify, NoticesAWrongNumberInARecipe) {
  const VerifyPrecision mxfp8 = {DType::kBF16, quant::MXFP8BlockScaling{}};
  EXPECT_FALSE(RowOk(WrongGolden("train.loss", 4, 0.3f).Verify(mxfp8), "train.loss"));
}

// An implementation that takes, for one token of the last layer, the best expert it should leave
// instead of the worst it should choose: the token whose two logits differ least, or most.
VerifyReport VerifyWithOneOtherChoice(bool nearest) {
  const auto rechoose = [&](std::int64_t step, const std::vector<Tensor>& router_logits,
                            std::vector<Tensor>& experts) {
    if (step != 0) return;
    const Tensor &logits = router_logits.back(), &chosen = experts.back();
    const std::int64_t top_k = chosen.dim(1), num_experts = logits.dim(1);
    double best = 0;
    std::int64_t token = -1, other = -1;
    for (std::int64_t t = 0; t < chosen.dim(0); ++t) {
      const std::int32_t* row = chosen.data<std::int32_t>() + t * top_k;
      const double last = ElementAsDouble(logits, t * num_experts + row[top_k - 1]);
      std::int64_t highest = -1;
      for (std::int64_t e = 0; e < num_experts; ++e) {
        if (std::find(row, row + top_k, e) != row + top_k) continue;
        const auto at = [&](std::int64_t i) {
          return ElementAsDouble(logits, t * num_experts + i);
        };
        if (highest < 0 || at(e) > at(highest)) highest = e;
      }
      const double gap = last - ElementAsDouble(logits, t * num_experts + highest);
      if (token < 0 || (nearest ? gap < best : gap > best)) best = gap, token = t, other = highest;
    }
    experts.back() = chosen.Clone();
    experts.back().data<std::int32_t>()[token * top_k + top_k - 1] =
        static_cast<std::int32_t>(other);
  };
  return VerifyModel(ops::Context().WithImpl("router=ref"),
                     CISTRON_SOURCE_DIR "/tests/golden/mixtral_tied", {DType::kBF16}, rechoose);
}

TEST(Verify, AcceptsAnotherExpertNearATie) {
  const VerifyReport report = VerifyWithOneOtherChoice(/*nearest=*/true);
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
  EXPECT_NE(report.note.find("are not those of fp64"), std::string::npos) << report.note;
}

TEST(Verify, NoticesAWrongExpert) {
  const VerifyReport report = VerifyWithOneOtherChoice(/*nearest=*/false);
  EXPECT_FALSE(RowOk(report, "choices")) << FormatVerifyReport(report);
}

// Of two tokens and four experts.
TEST(Verify, GapOfChoices) {
  const std::vector<double> values = {1, 4, 2, 3, 8, 6, 5, 7};
  const Tensor logits = Tensor::FromSpan<double>({2, 4}, values);
  const auto gap = [&](const std::vector<std::int32_t>& experts) {
    return LargestGap(logits, Tensor::FromSpan<std::int32_t>({2, 2}, experts));
  };
  EXPECT_EQ(gap({1, 3, 3, 0}), 0);  // the best, in any order
  EXPECT_EQ(gap({1, 2, 0, 3}), 1);  // 2 instead of 3
  EXPECT_EQ(gap({1, 2, 2, 1}), 3);  // 5 instead of 8
}

// Gradients of a gate that are zero in exact arithmetic, and noise in the file.
TEST(Verify, SaysWhenNoiseRoutes) {
  const VerifyReport report =
      VerifyModel(ops::Context(), CISTRON_SOURCE_DIR "/tests/golden/mixtral_noise", {DType::kF32});
  EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
  EXPECT_NE(report.note.find("later steps are not compared"), std::string::npos) << report.note;
  for (const VerifyRow& row : report.rows) EXPECT_NE(row.quantity, "after");
}

TEST(Verify, RefusesAFolderWithoutGoldenValues) {
  EXPECT_THROW(VerifyModel(ops::Context(), CISTRON_SOURCE_DIR "/data", {DType::kF32}), Error);
}

}  // namespace
}  // namespace cistron::train
