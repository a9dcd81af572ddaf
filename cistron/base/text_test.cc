#include "cistron/base/text.h"

#include <gtest/gtest.h>

namespace cistron {
namespace {

using namespace std::string_view_literals;  // NOLINT(google-build-using-namespace): for sv

TEST(Text, PrintableEscapesControlBytesAndCuts) {
  EXPECT_EQ(Printable("chr1 é\\"), "chr1 é\\");
  EXPECT_EQ(Printable("a\0b\t\x1b[2J\x7f"sv), "a\\x00b\\x09\\x1b[2J\\x7f");
  EXPECT_EQ(Printable("abcdef", 4), "abcd…");
  EXPECT_EQ(Printable("abcd", 4), "abcd");
}

TEST(Text, EscapedFieldsCanBeToldApart) {
  EXPECT_EQ(EscapedField("a\tb\nc"), "a\\x09b\\x0ac");
  EXPECT_EQ(EscapedField("a\\x09b"), "a\\x5cx09b");
  EXPECT_EQ(EscapedField(std::string(500, 'x')), std::string(500, 'x'));
}

TEST(Text, EditDistance) {
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("hiden", "hidden"), 1);
  EXPECT_EQ(EditDistance("tarin", "train"), 1);
}

}  // namespace
}  // namespace cistron
