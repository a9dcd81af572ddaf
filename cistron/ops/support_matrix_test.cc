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
    EXPECT_TRUE(seen.insert(row.op + "/" + row.impl + "/" + row.dtype).second) << row.op;
  }
}

TEST(SupportMatrix, TableHasOneLineForEachImplementation) {
  const std::string table = FormatSupportMatrix();
  std::set<std::string> implementations;
  for (const SupportRow& row : SupportMatrix()) implementations.insert(row.op + "/" + row.impl);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'),
            static_cast<std::ptrdiff_t>(implementations.size() + 2));
  EXPECT_THAT(table, ::testing::HasSubstr("| adamw | ref | yes | yes | no: masters"));
  // Every line has the same number of cells.
  std::size_t begin = 0;
  while (begin < table.size()) {
    const std::size_t end = table.find('\n', begin);
    EXPECT_EQ(std::count(table.begin() + static_cast<std::ptrdiff_t>(begin),
                         table.begin() + static_cast<std::ptrdiff_t>(end), '|'),
              6)
        << table.substr(begin, end - begin);
    begin = end + 1;
  }
}

}  // namespace
}  // namespace cistron::ops
