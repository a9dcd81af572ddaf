#include "cistron/model/hugging_face.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cistron/base/error.h"
#include "cistron/check/compare.h"
#include "cistron/io/file.h"

namespace cistron::model {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

const fs::path kTiny = fs::path(CISTRON_SOURCE_DIR) / "tests/golden/mixtral_tiny";

class HuggingFace : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(::testing::TempDir()) /
                 ("hugging_face_test." + std::to_string(::getpid()) + "." +
                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }

  fs::path directory_;
};

std::string LoadError(const fs::path& directory) {
  try {
    LoadHuggingFace(directory);
  } catch (const Error& e) {
    return std::string(ErrorCodeName(e.code())) + ": " + e.message();
  }
  return "";
}

// A model whose elements all differ, so that any two that change places are seen.
std::vector<io::NamedTensor> CountingModel(const MixtralConfig& config) {
  std::vector<io::NamedTensor> tensors;
  float next = 1;
  for (const ParameterInfo& p : MixtralParameters(config)) {
    Tensor t = Tensor::Empty(p.shape, DType::kF32);
    for (float& v : t.span<float>()) v = next++;
    tensors.push_back({p.name, t});
  }
  return tensors;
}

MixtralConfig SmallConfig() {
  MixtralConfig c;
  c.vocab_size = 256;
  c.hidden_size = 8;
  c.intermediate_size = 5;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 2;
  c.num_key_value_heads = 1;
  c.num_local_experts = 12;  // two digits: experts.10 sorts before experts.2
  c.head_dim = 6;
  return c;
}

void ExpectEqual(const std::vector<io::NamedTensor>& got,
                 const std::vector<io::NamedTensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].name, expected[i].name);
    const auto same = check::CompareBitwise(got[i].name, got[i].tensor, expected[i].tensor);
    EXPECT_TRUE(same) << same.message;
  }
}

// Gate rows first, then up; [out, in]: as the golden file of the same model in memory has them.
TEST_F(HuggingFace, TransposedWeights) {
  const HuggingFaceModel model = LoadHuggingFace(kTiny);
  const io::SafetensorsFile file(kTiny / "model.safetensors");
  const io::SafetensorsFile golden(kTiny / "golden.safetensors");
  EXPECT_EQ(model.config.num_local_experts, 4);
  EXPECT_EQ(model.dtype, "float32");
  for (const io::NamedTensor& t : model.tensors) {
    // The golden gradients bear canonical names and shapes.
    ASSERT_NE(golden.Find("grad." + t.name), nullptr) << t.name;
    EXPECT_EQ(golden.Find("grad." + t.name)->shape, t.tensor.shape()) << t.name;
    if (!t.name.ends_with("gate_up_proj")) continue;
    const std::string layer = t.name.substr(0, t.name.find("mlp."));
    for (std::int64_t e = 0; e < 4; ++e) {
      const std::string expert = layer + "block_sparse_moe.experts." + std::to_string(e);
      const Tensor both = t.tensor.Select(e);
      EXPECT_TRUE(
          check::CompareBitwise("gate", both.Slice(0, 0, 48), file.Read(expert + ".w1.weight")));
      EXPECT_TRUE(
          check::CompareBitwise("up", both.Slice(0, 48, 48), file.Read(expert + ".w3.weight")));
    }
  }
}

// Export equals import bitwise: the files that save_pretrained wrote come out again, byte for byte.
TEST_F(HuggingFace, InterleaveExport) {
  int folders = 0;
  for (const auto& folder : fs::directory_iterator(kTiny.parent_path())) {
    if (!fs::exists(folder.path() / "model.safetensors")) continue;
    ++folders;
    const HuggingFaceModel model = LoadHuggingFace(folder.path());
    ExportOptions options;
    options.write_tokenizer = false;
    options.overwrite = true;
    SaveHuggingFace(directory_ / "out", model.config, model.tensors, options);
    for (const char* name : {"model.safetensors", "config.json", "generation_config.json"}) {
      EXPECT_EQ(io::ReadFile(directory_ / "out" / name), io::ReadFile(folder.path() / name))
          << folder.path() << " " << name;
    }
  }
  EXPECT_GE(folders, 6);
}

TEST_F(HuggingFace, EveryLayoutDtypeAndShardSizeRoundTrips) {
  for (const bool tied : {false, true}) {
    MixtralConfig config = SmallConfig();
    config.tie_word_embeddings = tied;
    const std::vector<io::NamedTensor> model = CountingModel(config);
    for (const ExpertLayout layout : {ExpertLayout::kPublished, ExpertLayout::kStacked}) {
      for (const std::int64_t shard : {std::int64_t{1} << 40, std::int64_t{4000}}) {
        for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
          std::vector<io::NamedTensor> stored;
          stored.reserve(model.size());
          for (const auto& t : model) stored.push_back({t.name, ConvertTo(t.tensor, dtype)});
          ExportOptions options;
          options.layout = layout;
          options.max_shard_bytes = shard;
          options.dtype = dtype;
          options.overwrite = true;
          SaveHuggingFace(directory_ / "out", config, model, options);
          EXPECT_EQ(fs::exists(directory_ / "out/model.safetensors"), shard > 4000);
          EXPECT_TRUE(fs::exists(directory_ / "out/tokenizer.json"));
          const HuggingFaceModel loaded = LoadHuggingFace(directory_ / "out");
          ExpectEqual(loaded.tensors, stored);
        }
      }
    }
  }
  // Nothing else was left behind.
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);
}

TEST_F(HuggingFace, ConvertDropsExperts) {
  const MixtralConfig config = SmallConfig();
  std::vector<io::NamedTensor> model = CountingModel(config);
  const fs::path out = directory_ / "out";
  // On the way out: a tensor too few, one too many, one misshapen.
  const auto save_error = [&](const std::vector<io::NamedTensor>& tensors) -> std::string {
    try {
      SaveHuggingFace(out, config, tensors, {});
    } catch (const Error& e) {
      return e.message();
    }
    return "";
  };
  auto changed = model;
  changed.pop_back();
  EXPECT_THAT(save_error(changed), HasSubstr("lm_head.weight is missing"));
  changed = model;
  changed.push_back({"model.extra", model[0].tensor});
  EXPECT_THAT(save_error(changed), HasSubstr("model.extra"));
  changed = model;
  changed[6].tensor = Tensor::Zeros({11, 10, 8}, DType::kF32);  // an expert too few
  EXPECT_THAT(save_error(changed), AllOf(HasSubstr("gate_up_proj"), HasSubstr("[11, 10, 8]")));
  EXPECT_TRUE(fs::is_empty(directory_));

  // On the way in: the same, in the file.
  SaveHuggingFace(out, config, model, {});
  std::vector<io::NamedTensor> stored;
  {
    const io::SafetensorsFile file(out / "model.safetensors");
    for (const auto& entry : file.entries()) stored.push_back({entry.name, file.Read(entry.name)});
  }
  const auto load_error = [&](const std::vector<io::NamedTensor>& tensors) {
    io::WriteSafetensors(out / "model.safetensors", tensors, {{"format", "pt"}});
    return LoadError(out);
  };
  EXPECT_EQ(load_error(stored), "");
  changed = stored;
  std::erase_if(changed, [](const auto& t) {
    return t.name.ends_with("1.block_sparse_moe.experts.11.w3.weight");
  });
  ASSERT_EQ(changed.size(), stored.size() - 1);
  EXPECT_THAT(load_error(changed),
              AllOf(HasSubstr("bad input"), HasSubstr("model.safetensors"),
                    HasSubstr("model.layers.1.block_sparse_moe.experts.11.w3.weight"),
                    HasSubstr("missing")));
  changed = stored;
  changed.push_back({"model.layers.0.block_sparse_moe.experts.12.w1.weight", stored[0].tensor});
  EXPECT_THAT(load_error(changed), AllOf(HasSubstr("bad input"), HasSubstr("experts.12.w1")));
  changed = stored;
  for (auto& t : changed) {
    if (t.name == "model.layers.0.block_sparse_moe.experts.3.w2.weight")
      t.tensor = t.tensor.Reshape({5, 8});
  }
  EXPECT_THAT(load_error(changed), AllOf(HasSubstr("experts.3.w2"), HasSubstr("[5, 8]"),
                                         HasSubstr("[8, 5]"), HasSubstr("transposed")));
  changed = stored;
  changed[0].tensor = Tensor::Zeros(changed[0].tensor.shape(), DType::kI32);
  EXPECT_THAT(load_error(changed), AllOf(HasSubstr("unsupported"), HasSubstr("i32")));
  // Even where all are.
  for (auto& t : changed) t.tensor = Tensor::Zeros(t.tensor.shape(), DType::kF64);
  EXPECT_THAT(load_error(changed), AllOf(HasSubstr("unsupported"), HasSubstr(" is f64; weights"),
                                         HasSubstr("f32, bf16 or f16")));
  changed = stored;
  for (auto& t : changed) {
    if (t.name == "model.layers.0.block_sparse_moe.experts.3.w2.weight")
      t.tensor = ConvertTo(t.tensor, DType::kBF16);
  }
  EXPECT_THAT(load_error(changed), HasSubstr("one dtype"));
}

TEST_F(HuggingFace, BadIndexAndDirectories) {
  EXPECT_THAT(LoadError(directory_ / "absent"), AllOf(HasSubstr("not found"), HasSubstr("absent")));
  EXPECT_THAT(LoadError(directory_), AllOf(HasSubstr("not found"), HasSubstr("config.json")));
  const MixtralConfig config = SmallConfig();
  io::WriteNewFile(directory_ / "config.json", ToJson(config, "float32"));
  EXPECT_THAT(LoadError(directory_), HasSubstr("neither"));
  std::ofstream(directory_ / "pytorch_model.bin") << "x";
  EXPECT_THAT(LoadError(directory_), HasSubstr("save_pretrained"));

  const fs::path out = directory_ / "out";
  ExportOptions options;
  options.max_shard_bytes = 4000;
  SaveHuggingFace(out, config, CountingModel(config), options);
  const fs::path index = out / "model.safetensors.index.json";
  const std::string text = io::ReadFile(index);
  EXPECT_EQ(LoadError(out), "");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    io::WriteFileAtomically(index, changed);
    return LoadError(out);
  };
  EXPECT_THAT(with("\"lm_head.weight\"", "\"lm_head.other\""), HasSubstr("lm_head"));
  EXPECT_THAT(
      with("\"lm_head.weight\"", "\"a\": \"model-00001-of-00099.safetensors\", \"lm_head.weight\""),
      AllOf(HasSubstr("not found"), HasSubstr("model-00001-of-00099.safetensors")));
  EXPECT_THAT(with("\"lm_head.weight\"", "\"a\": \"../x.safetensors\", \"lm_head.weight\""),
              AllOf(HasSubstr("bad input"), HasSubstr("plain file name")));
  EXPECT_THAT(with("\"weight_map\"", "\"weightmap\""), HasSubstr("weight_map"));
  EXPECT_EQ(with("\"weight_map\"", "\"weight_map\""), "");
  fs::remove(out / "model-00002-of-00003.safetensors");
  for (const auto& entry : fs::directory_iterator(out)) {
    if (entry.path().filename().string().starts_with("model-00002")) fs::remove(entry.path());
  }
  EXPECT_THAT(LoadError(out), AllOf(HasSubstr("not found"), HasSubstr("model-00002")));
}

TEST_F(HuggingFace, TiedHeadMustEqualTheEmbedding) {
  MixtralConfig config = SmallConfig();
  std::vector<io::NamedTensor> model = CountingModel(config);
  SaveHuggingFace(directory_ / "out", config, model, {});
  config.tie_word_embeddings = true;
  io::WriteFileAtomically(directory_ / "out/config.json", ToJson(config, "float32"));
  EXPECT_THAT(LoadError(directory_ / "out"), HasSubstr("tie_word_embeddings"));
  model.back().tensor = model.front().tensor;
  config.tie_word_embeddings = false;
  SaveHuggingFace(directory_ / "out", config, model, {.overwrite = true});
  config.tie_word_embeddings = true;
  io::WriteFileAtomically(directory_ / "out/config.json", ToJson(config, "float32"));
  EXPECT_EQ(LoadError(directory_ / "out"), "");
}

TEST_F(HuggingFace, RefusesToOverwrite) {
  const MixtralConfig config = SmallConfig();
  std::ofstream(directory_ / "mine.txt") << "precious";
  EXPECT_THROW(SaveHuggingFace(directory_, config, CountingModel(config), {}), Error);
  EXPECT_EQ(io::ReadFile(directory_ / "mine.txt"), "precious");
}

TEST_F(HuggingFace, CopiesATokenizerWhenAsked) {
  const MixtralConfig config = SmallConfig();
  fs::create_directory(directory_ / "source");
  std::ofstream(directory_ / "source/tokenizer.model") << "pieces";
  std::ofstream(directory_ / "source/generation_config.json") << "{}";
  SaveHuggingFace(directory_ / "out", config, CountingModel(config),
                  {.tokenizer_from = directory_ / "source"});
  EXPECT_EQ(io::ReadFile(directory_ / "out/generation_config.json"), "{}");
  EXPECT_EQ(io::ReadFile(directory_ / "out/tokenizer.model"), "pieces");
  EXPECT_FALSE(fs::exists(directory_ / "out/tokenizer.json"));
}

}  // namespace
}  // namespace cistron::model
