#include "cistron/io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "cistron/base/error.h"
#include "cistron/io/file.h"

namespace cistron::io {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = fs::path(::testing::TempDir()) /
            ("safetensors_test." + std::to_string(::getpid()) + ".safetensors");
  }
  void TearDown() override { fs::remove(path_); }

  // Opens a file of these bytes; the error's code and message, empty when it opens.
  std::string OpenError(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    try {
      SafetensorsFile file(path_);
    } catch (const Error& e) {
      EXPECT_THAT(e.message(), HasSubstr(path_.string()));
      return std::string(ErrorCodeName(e.code())) + ": " + e.message();
    }
    return "";
  }
  static std::string WithHeader(const std::string& header, std::size_t data_bytes) {
    const std::uint64_t n = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &n, 8);
    return bytes + header + std::string(data_bytes, 'x');
  }
  std::string HeaderError(const std::string& header, std::size_t data_bytes) {
    return OpenError(WithHeader(header, data_bytes));
  }

  fs::path path_;
};

TEST_F(Safetensors, WritesAndReadsEveryDType) {
  std::vector<NamedTensor> tensors;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3,
                            DType::kE5M2, DType::kE8M0, DType::kI64, DType::kI32, DType::kU8}) {
    Tensor t = Tensor::Empty({3, 5}, dtype);
    for (std::int64_t i = 0; i < t.bytes(); ++i) {
      static_cast<unsigned char*>(t.raw())[i] = static_cast<unsigned char>(37 * i + 11);
    }
    tensors.push_back({"t." + std::string(Name(dtype)), t});
  }
  tensors.push_back({"scalar", Tensor::Scalar(1.5)});
  tensors.push_back({"empty", Tensor::Empty({0, 4}, DType::kF32)});
  tensors.push_back({"strange \"name\"\n\xc3\xa9", Tensor::Scalar(2)});
  WriteSafetensors(path_, tensors, {{"format", "pt"}, {"k", "v"}});

  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata().at("k"), "v");
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const Tensor read = file.Read(t.name);
    EXPECT_EQ(read.dtype(), t.tensor.dtype());
    EXPECT_EQ(read.shape(), t.tensor.shape());
    EXPECT_EQ(std::memcmp(read.raw(), t.tensor.raw(), static_cast<std::size_t>(read.bytes())), 0);
  }
  // Data begin at a multiple of 8.
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.Bytes(file.entries()[0]).data()) % 8, 0u);
}

TEST_F(Safetensors, NearestName) {
  const Tensor t = Tensor::Scalar(0);
  WriteSafetensors(path_, std::vector<NamedTensor>{{"model.norm.weight", t}, {"lm_head.weight", t}},
                   {});
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.Find("model.nrm.weight"), nullptr);
  try {
    file.Read("model.nrm.weight");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kNotFound);
    EXPECT_THAT(e.message(),
                AllOf(HasSubstr("model.nrm.weight"), HasSubstr("'model.norm.weight'")));
  }
}

TEST_F(Safetensors, LegalHeaders) {
  EXPECT_THAT(HeaderError("{}", 0), IsEmpty());
  EXPECT_THAT(HeaderError("{}      ", 0), IsEmpty());
  EXPECT_THAT(HeaderError(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4),
              IsEmpty());
  // Not in order, with an empty tensor between.
  EXPECT_THAT(HeaderError(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)"
                          R"("e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},)"
                          R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                          7),
              IsEmpty());
}

TEST_F(Safetensors, TruncatedAndForeignFiles) {
  EXPECT_THAT(OpenError(""), HasSubstr("too few"));
  EXPECT_THAT(OpenError("1234567"), HasSubstr("too few"));
  EXPECT_THAT(
      OpenError(std::string("\x10\0\0\0\0\0\0\0{}", 10)),
      AllOf(HasSubstr("bad input"), HasSubstr("header of 16 bytes"), HasSubstr("truncated")));
  EXPECT_THAT(OpenError("PK\x03\x04 this is a zip file"), HasSubstr("not a safetensors file"));
  EXPECT_THAT(OpenError(std::string(64, '\xff')), HasSubstr("not a safetensors file"));
  // Truncated at every byte: never accepted, never a crash.
  WriteSafetensors(
      path_, std::vector<NamedTensor>{{"a", Tensor::Scalar(1)}, {"b", Tensor::Scalar(2)}}, {});
  const std::string whole = ReadFile(path_);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THAT(OpenError(whole.substr(0, n)), HasSubstr("bad input")) << n;
  }
  EXPECT_THAT(OpenError(whole + "x"), HasSubstr("bad input"));
  fs::remove(path_);
  EXPECT_THROW(SafetensorsFile{path_}, Error);
  EXPECT_THROW(SafetensorsFile{fs::temp_directory_path()}, Error);
}

TEST_F(Safetensors, DamagedHeaders) {
  const auto one = [](const std::string& entry) { return "{\"ten\":" + entry + "}"; };
  const auto has = [](const char* text) { return AllOf(HasSubstr("bad input"), HasSubstr(text)); };
  EXPECT_THAT(HeaderError("[]", 0), has("not an object"));
  EXPECT_THAT(HeaderError("{", 0), has("not valid JSON"));
  EXPECT_THAT(HeaderError("{\"\xff\": 1}", 0), has("not valid JSON"));
  EXPECT_THAT(HeaderError(std::string(2000, '['), 0), has("nested deeper"));
  EXPECT_THAT(HeaderError(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                          R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                          2),
              AllOf(has("'a'"), HasSubstr("twice")));
  EXPECT_THAT(HeaderError(one("3"), 0), AllOf(has("'ten'"), HasSubstr("not an object")));
  EXPECT_THAT(HeaderError(one(R"({"shape":[],"data_offsets":[0,4]})"), 4), has("no dtype"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","data_offsets":[0,4]})"), 4), has("no shape"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[]})"), 4), has("no data_offsets"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[],"data_offsets":[0,4],"x":1})"), 4),
              has("unknown key 'x'"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F33","shape":[],"data_offsets":[0,4]})"), 4),
              has("unknown dtype 'F33'"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":32,"shape":[],"data_offsets":[0,4]})"), 4),
              has("dtype is 32"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"BOOL","shape":[],"data_offsets":[0,1]})"), 1),
              AllOf(HasSubstr("unsupported"), HasSubstr("BOOL")));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":7,"data_offsets":[0,4]})"), 4),
              has("shape is 7"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), 4),
              has("[-1]"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})"), 4),
              has("[1.0]"));
  EXPECT_THAT(
      HeaderError(one(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]})"), 4),
      has("dimension"));
  EXPECT_THAT(
      HeaderError(one(R"({"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]})"),
                  4),
      has("exceeds"));
  EXPECT_THAT(
      HeaderError(one(R"({"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]})"), 4),
      has("does not fill"));
  EXPECT_THAT(
      HeaderError(one(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1],"data_offsets":[0,4]})"), 4),
      has("7 dimensions"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), 4),
              has("F32 [2]"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})"), 4),
              has("[-4,0]"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"), 4),
              has("end before they begin"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})"), 4), has("[0]"));
  EXPECT_THAT(
      HeaderError(
          one(R"({"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551616]})"),
          4),
      has("data_offsets"));
  EXPECT_THAT(
      HeaderError(
          one(R"({"dtype":"F32","shape":[1],"data_offsets":[18446744073709551611,18446744073709551615]})"),
          4),
      has("the file holds 4 bytes"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), 8),
              has("belong to no tensor"));
  EXPECT_THAT(HeaderError(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})"), 8),
              has("end at byte 4"));
  EXPECT_THAT(HeaderError(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                          R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                          6),
              AllOf(has("overlap"), HasSubstr("'a'"), HasSubstr("'b'")));
  EXPECT_THAT(
      HeaderError(R"({"__metadata__":[],"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
      has("__metadata__"));
  EXPECT_THAT(HeaderError(R"({"__metadata__":{"a":1}})", 0), has("__metadata__"));
}

TEST_F(Safetensors, WriterHoldsCallersToTheirWord) {
  const Tensor t = Tensor::Scalar(1);
  EXPECT_THROW(WriteSafetensors(path_, std::vector<NamedTensor>{{"a", t}, {"a", t}}, {}), Error);
  EXPECT_THROW(WriteSafetensors(path_, std::vector<NamedTensor>{{"__metadata__", t}}, {}), Error);
  EXPECT_THROW(WriteSafetensors(path_, std::vector<NamedTensor>{{"\xff", t}}, {}), Error);
  const std::vector<SafetensorsWriter::Spec> specs = {{"a", DType::kF64, {}},
                                                      {"b", DType::kF64, {}}};
  SafetensorsWriter writer(path_, specs, {});
  writer.Append(t);
  EXPECT_THROW(writer.Finish(), Error);
  EXPECT_THROW(writer.Append(Tensor::Zeros({}, DType::kF32)), Error);
}

// A full disk: every byte is refused.
TEST_F(Safetensors, FullDisk) {
  try {
    WriteSafetensors("/dev/full", std::vector<NamedTensor>{{"a", Tensor::Scalar(1)}}, {});
    FAIL() << "writing to a full device succeeded";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kIo);
    EXPECT_THAT(e.message(), AllOf(HasSubstr("/dev/full"), HasSubstr("No space left on device")));
  }
}

TEST(SafetensorsIndexTest, ReadsAndWrites) {
  const SafetensorsIndex index =
      ParseSafetensorsIndex(R"({"metadata":{"total_size":12.0},"weight_map":{"a":"f"}})", "i");
  EXPECT_EQ(index.total_size, 12u);
  EXPECT_EQ(index.weight_map.at("a"), "f");
  EXPECT_EQ(ParseSafetensorsIndex(ToJson(index), "i").total_size, 12u);
  for (const char* bad :
       {"[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})",
        R"({"weight_map":{"a":""}})", R"({"weight_map":{"a":"../f"}})",
        R"({"weight_map":{"a":"/f"}})", R"({"weight_map":{"a":".."}})",
        R"({"weight_map":{"a":"f\u0000"}})", R"({"metadata":{"total_size":-1},"weight_map":{}})"}) {
    EXPECT_THROW(ParseSafetensorsIndex(bad, "i"), Error) << bad;
  }
}

}  // namespace
}  // namespace cistron::io
