// Errors, environment, dtypes, log lines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "cistron/base/dtype.h"
#include "cistron/base/env.h"
#include "cistron/base/error.h"
#include "cistron/base/log.h"

namespace cistron {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Error, CarriesCodeMessageAndPlace) {
  try {
    CISTRON_THROW(kBadInput, "genome.fna: record {} holds '{}'", 3, '!');
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kBadInput);
    EXPECT_EQ(e.message(), "genome.fna: record 3 holds '!'");
    EXPECT_STREQ(e.what(), e.message().c_str());
    EXPECT_THAT(e.where(), HasSubstr("base_test.cc:"));
  }
}

TEST(Error, ChecksThrowOnlyWhenTheyFail) {
  int evaluated = 0;
  const auto argument = [&] { return ++evaluated; };
  EXPECT_NO_THROW(CISTRON_CHECK(true, "unused {}", argument()));
  EXPECT_EQ(evaluated, 0);
  try {
    CISTRON_CHECK(1 == 2, "one is not {}", argument() + 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(e.message(), "one is not 2");
  }
  try {
    CISTRON_INVARIANT(false, "broken");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInternal);
  }
}

TEST(Error, BracesInValuesAreNotFormats) {
  try {
    CISTRON_THROW(kNotFound, "{}", std::string("key {x}"));
  } catch (const Error& e) {
    EXPECT_EQ(e.message(), "key {x}");
  }
}

TEST(Error, EveryCodeHasItsName) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    names.insert(ErrorCodeName(static_cast<ErrorCode>(code)));
  }
  EXPECT_EQ(names.size(), 9u);
  EXPECT_EQ(names.count("unknown error"), 0u);
}

TEST(Env, UnsetAndEmptyAreNothing) {
  ASSERT_EQ(setenv("CISTRON_BASE_TEST", "value", 1), 0);
  EXPECT_EQ(GetEnv("CISTRON_BASE_TEST"), "value");
  ASSERT_EQ(setenv("CISTRON_BASE_TEST", "", 1), 0);
  EXPECT_FALSE(GetEnv("CISTRON_BASE_TEST"));
  ASSERT_EQ(unsetenv("CISTRON_BASE_TEST"), 0);
  EXPECT_FALSE(GetEnv("CISTRON_BASE_TEST"));
}

TEST(DType, TablesAgree) {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(DType::kU8); ++i) {
    const auto dtype = static_cast<DType>(i);
    names.insert(Name(dtype));
    EXPECT_EQ(FromSafetensorsName(SafetensorsName(dtype)), dtype);
  }
  EXPECT_EQ(names.size(), 10u);
  EXPECT_FALSE(FromSafetensorsName("f32"));
  EXPECT_FALSE(FromSafetensorsName(""));
  EXPECT_EQ(SizeOf(kDTypeOf<double>), 8u);
  EXPECT_EQ(SizeOf(kDTypeOf<float>), sizeof(float));
  EXPECT_EQ(SizeOf(kDTypeOf<bf16>), sizeof(bf16));
  EXPECT_EQ(SizeOf(kDTypeOf<f16>), sizeof(f16));
  EXPECT_EQ(SizeOf(kDTypeOf<e4m3>), sizeof(e4m3));
  EXPECT_EQ(SizeOf(kDTypeOf<e5m2>), sizeof(e5m2));
  EXPECT_EQ(SizeOf(kDTypeOf<e8m0>), sizeof(e8m0));
  EXPECT_EQ(SizeOf(kDTypeOf<std::int64_t>), sizeof(std::int64_t));
  EXPECT_EQ(SizeOf(kDTypeOf<std::int32_t>), sizeof(std::int32_t));
  EXPECT_EQ(SizeOf(kDTypeOf<std::uint8_t>), sizeof(std::uint8_t));
}

TEST(DType, ComputeTypeIsAtLeastF32) {
  EXPECT_EQ(ComputeType(DType::kF64), DType::kF64);
  EXPECT_EQ(ComputeType(DType::kF32), DType::kF32);
  EXPECT_EQ(ComputeType(DType::kBF16), DType::kF32);
  EXPECT_TRUE(IsFloat(DType::kE8M0));
  EXPECT_FALSE(IsFloat(DType::kI32));
}

TEST(DType, DispatchNamesTheOpThatRefuses) {
  const auto size = [](auto tag) { return sizeof(typename decltype(tag)::type); };
  EXPECT_EQ(DispatchFloat("norm", DType::kBF16, size), 2u);
  EXPECT_EQ(DispatchFloat("norm", DType::kF64, size), 8u);
  try {
    DispatchFloat("norm", DType::kE4M3, size);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(e.message(), HasSubstr("norm: dtype e4m3"));
  }
}

TEST(Log, LevelsFilterAndBracesPass) {
  SetLogLevel(LogLevel::kWarning);
  ::testing::internal::CaptureStderr();
  LogInfo("quiet {}", 1);
  LogWarning("loud {}", "{2}");
  LogMessage(LogLevel::kError, "plain {}");
  const std::string text = ::testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);
  EXPECT_THAT(text, Not(HasSubstr("quiet")));
  EXPECT_THAT(text, HasSubstr("loud {2}"));
  EXPECT_THAT(text, HasSubstr("plain {}"));
}

}  // namespace
}  // namespace cistron
