#include "cistron/ops/support_matrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

namespace cistron::ops {
namespace {

TEST(SupportMatrix, ReferenceRunsEveryFloatAndComesLast) {
  std::map<std::string, std::string> last;
  for (const SupportRow& row : SupportMatrix()) {
    last[row.op] = row.impl;
    // Masters of the optimiser are f32 or f64.
    if (row.impl == "ref" && !(row.op == "adamw" && row.dtype == "bf16")) {
      EXPECT_TRUE(row.support) << row.op << " " << row.dtype << ": " << row.support.reason;
    }
  }
  EXPECT_GE(last.size(), 12u);
  for (const auto& [op, impl] : last) EXPECT_EQ(impl, "ref") << op;
}

TEST(SupportMatrix, RefusalsHaveReasons) {
  std::set<std::string> seen;
  for (const SupportRow& row : SupportMatrix()) {
    EXPECT_EQ(static_cast<bool>(row.support), row.support.reason.empty());
    EXPECT_TRUE(seen.insert(row.op + "/" + row.direction + "/" + row.impl + "/" + row.dtype).second)
        << row.op;
  }
}

TEST(SupportMatrix, EveryFormatAndScalingRunsAndTheReferenceComesLast) {
  std::map<std::string, std::string> last;
  std::set<std::string> seen;
  for (const SupportRow& row : FormatSupport()) {
    last[row.op] = row.impl;
    EXPECT_TRUE(row.support) << row.op << " " << row.dtype << " " << row.scaling << ": "
                             << row.support.reason;
    EXPECT_TRUE(seen.insert(row.op + "/" + row.direction + "/" + row.impl + "/" + row.dtype + "/" +
                            row.scaling)
                    .second);
  }
  EXPECT_EQ(last.size(), 3u);  // quantize of two dtypes, products
  for (const auto& [op, impl] : last) EXPECT_EQ(impl, "ref") << op;
  EXPECT_EQ(seen.size(), 5u * 2 * 2 * 5);  // ops and directions, implementations, formats, scalings
}

// Lines of a table, which all have as many cells as its head.
void ExpectCells(const std::string& table, std::ptrdiff_t cells) {
  std::size_t begin = 0;
  while (begin < table.size()) {
    const std::size_t end = table.find('\n', begin);
    const std::string line = table.substr(begin, end - begin);
    EXPECT_EQ(std::count(line.begin(), line.end(), '|'), cells + 1) << line;
    begin = end + 1;
  }
}

TEST(SupportMatrix, TablesHaveOneLineForEachImplementation) {
  const std::string text = FormatSupportMatrix();
  const std::size_t gap = text.find("\n\n");
  ASSERT_NE(gap, std::string::npos);
  const std::string table = text.substr(0, gap + 1), formats = text.substr(gap + 2);
  std::set<std::string> implementations;
  for (const SupportRow& row : SupportMatrix()) {
    implementations.insert(row.op + "/" + row.direction + "/" + row.impl);
  }
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'),
            static_cast<std::ptrdiff_t>(implementations.size() + 2));
  EXPECT_THAT(table,
              ::testing::HasSubstr("| adamw | ref | cpu | update | yes | yes | no: masters"));
  ExpectCells(table, 7);
  EXPECT_EQ(std::count(formats.begin(), formats.end(), '\n'), 5 * 2 * 2 + 2);
  EXPECT_THAT(formats, ::testing::HasSubstr("| quantized_gemm | cpu | cpu | dgrad | e5m2 | yes |"));
  ExpectCells(formats, 10);
}

}  // namespace
}  // namespace cistron::ops
