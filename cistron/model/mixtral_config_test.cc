#include "cistron/model/mixtral_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cistron/base/error.h"
#include "cistron/model/hugging_face.h"

namespace cistron::model {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Message of the error that parsing throws, "code: text"; empty when it does not throw.
std::string ParseError(const std::string& json) {
  try {
    ParseMixtralConfig(json, "dir/config.json");
  } catch (const Error& e) {
    return std::string(ErrorCodeName(e.code())) + ": " + e.message();
  }
  return "";
}

MixtralConfig Mixtral8x7B() {
  return ParseMixtralConfig("{}", "config.json");
}

// Counts of the published model, as transformers reports them.
TEST(MixtralConfig, CountsOfMixtral8x7B) {
  EXPECT_EQ(ParameterCount(Mixtral8x7B()), 46'702'792'704);
  EXPECT_EQ(ActiveParameterCount(Mixtral8x7B()), 12'879'925'248);
}

TEST(MixtralConfig, CountEqualsTheShapes) {
  for (const bool tied : {false, true}) {
    MixtralConfig c;
    c.tie_word_embeddings = tied;
    c.head_dim = 10;
    c.intermediate_size = 13;
    std::int64_t sum = 0;
    for (const ParameterInfo& p : MixtralParameters(c)) sum += p.shape.numel();
    EXPECT_EQ(ParameterCount(c), sum);
  }
}

// One layer by hand: hidden 4, 2 heads of 2, 1 key head, experts of 3, top-1 of 2, vocabulary 5.
TEST(MixtralConfig, TrainingFlopsByHand) {
  MixtralConfig c;
  c.vocab_size = 5;
  c.hidden_size = 4;
  c.intermediate_size = 3;
  c.num_hidden_layers = 1;
  c.num_attention_heads = 2;
  c.num_key_value_heads = 1;
  c.num_local_experts = 2;
  c.num_experts_per_tok = 1;
  const double weights = 5 * 4 + (4 * 4 + 2 * 2 * 4 + 4 * 4) + 2 * 4 + 3 * 3 * 4;
  // Three queries see 1, 2, 3 keys.
  EXPECT_DOUBLE_EQ(TrainingFlopsPerToken(c, 3), 6 * weights + 12 * 2 * 2 * 2.0);
  c.sliding_window = 2;  // 1, 2, 2 keys
  EXPECT_DOUBLE_EQ(TrainingFlopsPerToken(c, 3), 6 * weights + 12 * 2 * 2 * 5.0 / 3);
  c.tie_word_embeddings = true;
  EXPECT_DOUBLE_EQ(TrainingFlopsPerToken(c, 3), 6 * weights + 12 * 2 * 2 * 5.0 / 3);
}

TEST(MixtralConfig, ReadsBothGenerationsOfFields) {
  std::string dtype;
  const MixtralConfig old = ParseMixtralConfig(
      R"({"model_type": "mixtral", "rope_theta": 10000, "torch_dtype": "bfloat16",
          "rope_scaling": null, "sliding_window": null})",
      "c", &dtype);
  EXPECT_EQ(old.rope_theta, 10000);
  EXPECT_EQ(dtype, "bfloat16");
  EXPECT_FALSE(old.head_dim);
  EXPECT_FALSE(old.sliding_window);
  EXPECT_EQ(old.HeadDim(), 128);
  const MixtralConfig now = ParseMixtralConfig(
      R"({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "dtype": "float32",
          "head_dim": 32, "sliding_window": 7, "bos_token_id": null, "eos_token_id": [9, 2],
          "num_key_value_heads": null})",
      "c", &dtype);
  EXPECT_EQ(now.rope_theta, 5e5);
  EXPECT_EQ(dtype, "float32");
  EXPECT_EQ(now.head_dim, 32);
  EXPECT_EQ(now.sliding_window, 7);
  EXPECT_FALSE(now.bos_token_id);
  EXPECT_EQ(now.eos_token_id, 9);
  EXPECT_EQ(now.num_key_value_heads, now.num_attention_heads);
}

TEST(MixtralConfig, KeepsFieldsItDoesNotKnow) {
  const MixtralConfig c = ParseMixtralConfig(
      R"({"my_field": {"deep": [1, 2.5, "x"]}, "use_cache": false, "hidden_size": 64,
          "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1})",
      "c");
  const std::string text = ToJson(c, "float32");
  EXPECT_THAT(text, HasSubstr("\"my_field\""));
  EXPECT_THAT(text, HasSubstr("\"use_cache\": false"));
  EXPECT_THAT(text, HasSubstr("\"pad_token_id\": 1"));
  EXPECT_THAT(text, HasSubstr("\"architectures\": [\n"));
  MixtralConfig ends = ParseMixtralConfig(R"({"eos_token_id": [9, 2]})", "c");
  EXPECT_THAT(ToJson(ends, "float32"), HasSubstr("\"eos_token_id\": [\n    9,\n    2\n  ]"));
  ends.eos_token_id = 4;
  EXPECT_THAT(ToJson(ends, "float32"), HasSubstr("\"eos_token_id\": 4,"));
  // Written and read again, nothing moves.
  std::string dtype;
  const MixtralConfig again = ParseMixtralConfig(text, "c", &dtype);
  EXPECT_EQ(ToJson(again, dtype), text);
}

TEST(MixtralConfig, RefusesByName) {
  EXPECT_THAT(ParseError(R"({"model_type": "llama"})"),
              AllOf(HasSubstr("unsupported"), HasSubstr("dir/config.json"), HasSubstr("model_type"),
                    HasSubstr("llama")));
  EXPECT_THAT(ParseError(R"({"hidden_act": "gelu"})"),
              AllOf(HasSubstr("unsupported"), HasSubstr("hidden_act"), HasSubstr("gelu")));
  EXPECT_THAT(ParseError(R"({"attention_dropout": 0.1})"),
              AllOf(HasSubstr("unsupported"), HasSubstr("attention_dropout"), HasSubstr("0.1")));
  EXPECT_THAT(ParseError(R"({"router_jitter_noise": 1.0})"), HasSubstr("router_jitter_noise"));
  EXPECT_THAT(ParseError(R"({"rope_scaling": {"type": "linear", "factor": 2.0}})"),
              AllOf(HasSubstr("unsupported"), HasSubstr("rope_scaling")));
  EXPECT_THAT(ParseError(R"({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}})"),
              AllOf(HasSubstr("rope_type"), HasSubstr("yarn")));
  EXPECT_THAT(ParseError(R"({"architectures": ["MixtralForSequenceClassification"]})"),
              HasSubstr("architectures"));
  EXPECT_THAT(ParseError(R"({"quantization_config": {"bits": 4}})"),
              HasSubstr("quantization_config"));
}

TEST(MixtralConfig, BadValuesNameTheField) {
  EXPECT_THAT(ParseError("not json"), AllOf(HasSubstr("bad input"), HasSubstr("dir/config.json")));
  EXPECT_THAT(ParseError("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(ParseError(R"({"hidden_size": 1, "hidden_size": 2})"), HasSubstr("twice"));
  EXPECT_THAT(ParseError(R"({"hidden_size": "64"})"),
              AllOf(HasSubstr("hidden_size"), HasSubstr("integer")));
  EXPECT_THAT(ParseError(R"({"hidden_size": -64})"), HasSubstr("hidden_size is -64"));
  EXPECT_THAT(ParseError(R"({"hidden_size": 64.5})"), HasSubstr("hidden_size"));
  EXPECT_THAT(ParseError(R"({"hidden_size": 99999999999999999999})"), HasSubstr("hidden_size"));
  EXPECT_THAT(ParseError(R"({"hidden_size": 9000000000000000000})"), HasSubstr("hidden_size"));
  EXPECT_THAT(ParseError(R"({"num_hidden_layers": 2000000000})"), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(ParseError(R"({"hidden_size": 4097})"), HasSubstr("not divisible"));
  EXPECT_THAT(ParseError(R"({"num_experts_per_tok": 9})"),
              HasSubstr("num_experts_per_tok = 9 exceeds num_local_experts = 8"));
  EXPECT_THAT(ParseError(R"({"num_key_value_heads": 7})"), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(ParseError(R"({"head_dim": 33})"), HasSubstr("odd"));
  EXPECT_THAT(ParseError(R"({"sliding_window": 0})"), HasSubstr("sliding_window"));
  EXPECT_THAT(ParseError(R"({"tie_word_embeddings": 1})"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(ParseError(R"({"rope_theta": "big"})"), HasSubstr("rope_theta"));
  EXPECT_THAT(ParseError(R"({"rope_parameters": 3})"), HasSubstr("rope_parameters"));
  EXPECT_THAT(ParseError(R"({"pad_token_id": 32000})"), HasSubstr("pad_token_id"));
  EXPECT_THAT(ParseError(std::string(1000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(ParseError("{\"a\": \"\xff\xfe\"}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(
      ParseError(
          R"({"num_hidden_layers": 100000, "vocab_size": 2000000000, "num_local_experts": 100000})"),
      HasSubstr("beyond any machine"));
}

TEST(MixtralConfig, AuxScopeSurvives) {
  MixtralConfig c;
  EXPECT_EQ(ToJson(c, "float32").find("cistron"), std::string::npos);
  c.aux_scope = AuxScope::kSequence;
  EXPECT_EQ(ParseMixtralConfig(ToJson(c, "float32"), "c").aux_scope, AuxScope::kSequence);
}

}  // namespace
}  // namespace cistron::model
