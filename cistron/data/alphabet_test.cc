#include "cistron/data/alphabet.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

namespace cistron::data {
namespace {

using ::testing::HasSubstr;

constexpr Alphabet kAll[] = {Alphabet::kDna, Alphabet::kRna, Alphabet::kProtein, Alphabet::kBytes};

// Bytes of the table whose flags, lower case and blanks apart, are `wanted`.
std::string BytesWith(Alphabet alphabet, int wanted) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) {
    const std::uint8_t flags = ByteTable::Of(alphabet).flags(static_cast<unsigned char>(i));
    if ((flags & (kIllegal | kDegenerate)) == wanted) bytes += static_cast<char>(i);
  }
  return bytes;
}

TEST(Alphabet, EveryByte) {
  EXPECT_EQ(BytesWith(Alphabet::kDna, 0), "ACGTacgt");
  EXPECT_EQ(BytesWith(Alphabet::kDna, kDegenerate), "BDHKMNRSVWYbdhkmnrsvwy");
  EXPECT_EQ(BytesWith(Alphabet::kRna, 0), "ACGUacgu");
  EXPECT_EQ(BytesWith(Alphabet::kRna, kDegenerate), "BDHKMNRSVWYbdhkmnrsvwy");
  EXPECT_EQ(BytesWith(Alphabet::kProtein, 0), "*ACDEFGHIKLMNOPQRSTUVWYacdefghiklmnopqrstuvwy");
  EXPECT_EQ(BytesWith(Alphabet::kProtein, kDegenerate), "-BJXZbjxz");
  EXPECT_EQ(BytesWith(Alphabet::kBytes, kIllegal), std::string("\0\1\2\3", 4));
  EXPECT_EQ(BytesWith(Alphabet::kBytes, kDegenerate), "");
}

TEST(Alphabet, CaseAndBlanks) {
  for (const Alphabet alphabet : kAll) {
    const ByteTable& table = ByteTable::Of(alphabet);
    for (int i = 0; i < 256; ++i) {
      const auto byte = static_cast<unsigned char>(i);
      const bool blank = byte == ' ' || byte == '\t' || byte == '\r';
      EXPECT_EQ((table.flags(byte) & kBlank) != 0, blank) << i;
      const bool lower = byte >= 'a' && byte <= 'z' && alphabet != Alphabet::kBytes;
      EXPECT_EQ((table.flags(byte) & kLowerCase) != 0, lower) << i;
      EXPECT_EQ(table.Upper(byte), lower ? byte - 32 : byte) << i;
    }
  }
}

TEST(Alphabet, ComplementIsAnInvolutionThatKeepsKindAndCase) {
  for (const Alphabet alphabet : kAll) {
    const ByteTable& table = ByteTable::Of(alphabet);
    for (int i = 0; i < 256; ++i) {
      const auto byte = static_cast<unsigned char>(i);
      const unsigned char other = table.Complement(byte);
      EXPECT_EQ(table.Complement(other), byte) << i;
      EXPECT_EQ(table.flags(other), table.flags(byte)) << i;
      if (!table.HasComplement()) {
        EXPECT_EQ(other, byte);
      }
    }
  }
}

// A code stands for a set of bases; its complement for the complements of that set (IUPAC 1984).
TEST(Alphabet, ComplementOfIupacCodes) {
  const std::pair<char, std::string> codes[] = {
      {'A', "A"},   {'C', "C"},   {'G', "G"},   {'T', "T"},   {'R', "AG"},
      {'Y', "CT"},  {'K', "GT"},  {'M', "AC"},  {'S', "CG"},  {'W', "AT"},
      {'B', "CGT"}, {'D', "AGT"}, {'H', "ACT"}, {'V', "ACG"}, {'N', "ACGT"}};
  const auto complement = [](std::string set) {
    for (char& c : set) c = c == 'A' ? 'T' : c == 'C' ? 'G' : c == 'G' ? 'C' : 'A';
    std::sort(set.begin(), set.end());
    return set;
  };
  for (const auto& [code, set] : codes) {
    for (const auto& [other, other_set] : codes) {
      if (other_set != complement(set)) continue;
      EXPECT_EQ(ByteTable::Of(Alphabet::kDna).Complement(static_cast<unsigned char>(code)), other);
    }
  }
  EXPECT_EQ(ByteTable::Of(Alphabet::kRna).Complement('A'), 'U');
  EXPECT_EQ(ByteTable::Of(Alphabet::kRna).Complement('u'), 'a');
}

TEST(Alphabet, RemediesFitTheByte) {
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, 'E', "MKTAYIAKQRE"),
              AllOf(HasSubstr("'E' (0x45)"), HasSubstr("data.alphabet=protein")));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, 'U', "ACGU"), HasSubstr("data.alphabet=rna"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kRna, 't', "ACGT"), HasSubstr("data.alphabet=dna"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kRna, 'T', "MKTAYIAKQRE"),
              HasSubstr("data.alphabet=protein"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, '*', "MKTAYI*"), HasSubstr("=protein"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, '!', "MKTAYI!"), HasSubstr("legal: correct it"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, '-', "AC--GT"), HasSubstr("alignment"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, '\0', ""), HasSubstr("NUL"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kProtein, '1', "MK1"), HasSubstr("'1' (0x31)"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kBytes, 3, ""), HasSubstr("special tokens"));
  EXPECT_THAT(ExplainIllegalByte(Alphabet::kDna, 0xC3, ""), HasSubstr("0xC3"));
}

}  // namespace
}  // namespace cistron::data
