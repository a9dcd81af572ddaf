// FASTA and JSONL: what is legal is read exactly, wherever one starts; what is not is an error that
// names the place.
#include "cistron/data/sequence_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/data/test_files.h"

namespace cistron::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

SequenceFile Parse(std::string text, const SequenceRules& rules = {},
                   std::int64_t chunk = 1 << 20) {
  return SequenceFile("x.fa", MemoryByteSource(std::move(text), chunk), rules);
}

std::string Whole(const SequenceFile& file, std::size_t record) {
  std::string bases;
  file.Read(static_cast<std::int64_t>(record), 0, file.records().at(record).length, bases);
  return bases;
}

SequenceRules Rules(Alphabet alphabet, std::string tags = "") {
  SequenceRules rules;
  rules.table = &ByteTable::Of(alphabet);
  rules.tag_delimiters = std::move(tags);
  return rules;
}

struct Expected {
  std::string name, bases;
  std::int64_t line;
};

void ExpectRecords(const std::string& text, const std::vector<Expected>& records,
                   const SequenceRules& rules = {}) {
  for (const std::int64_t chunk : {1, 2, 3, 7, 1 << 20}) {
    const SequenceFile file = Parse(text, rules, chunk);
    ASSERT_EQ(file.records().size(), records.size()) << text;
    for (std::size_t r = 0; r < records.size(); ++r) {
      EXPECT_EQ(Whole(file, r), records[r].bases) << text;
      EXPECT_EQ(file.RecordName(static_cast<std::int64_t>(r)), records[r].name);
      EXPECT_EQ(file.records()[r].line, records[r].line);
    }
  }
}

TEST(Fasta, LegalForms) {
  ExpectRecords(">a\nACGT\n", {{"a", "ACGT", 1}});
  ExpectRecords(">a\nACGT", {{"a", "ACGT", 1}});                            // no last newline
  ExpectRecords(">a b c\r\nAC\r\nGT\r\n", {{"a", "ACGT", 1}});              // CRLF
  ExpectRecords(">a\nACG\nT\nAA\n\n\nCCCCC\n", {{"a", "ACGTAACCCCC", 1}});  // ragged, blank
  ExpectRecords("\n\r\n>a\nAC\n\n>b\n\nGT\n", {{"a", "AC", 3}, {"b", "GT", 6}});
  ExpectRecords(">a\nacgtNRyk\n", {{"a", "acgtNRyk", 1}});                    // lower case, IUPAC
  ExpectRecords(">a\nAC\n>a\nGT\n", {{"a", "AC", 1}, {"a", "GT", 3}});        // duplicate name
  ExpectRecords(">\nAC\n> \t\r\nGT\n", {{"#0", "AC", 1}, {"#1", "GT", 3}});   // no name
  ExpectRecords("> a b\nAC\n>\t c\nGT\n", {{"a", "AC", 1}, {"c", "GT", 3}});  // blanks before it
  ExpectRecords(">a\n AC GT\t\nA \n", {{"a", "ACGTA", 1}});                   // blanks in lines
  ExpectRecords(">a\x01z >c\nAC\n", {{"a", "AC", 1}});
  ExpectRecords(">p\nMKT*-xBZ\n", {{"p", "MKT*-xBZ", 1}}, Rules(Alphabet::kProtein));
  ExpectRecords(">r\nACGU\n", {{"r", "ACGU", 1}}, Rules(Alphabet::kRna));
  ExpectRecords(">b\nany text!\n", {{"b", "anytext!", 1}}, Rules(Alphabet::kBytes));
  ExpectRecords(">a\nAC|tag >|GT\n", {{"a", "AC|tag>|GT", 1}}, Rules(Alphabet::kDna, "|"));
}

TEST(Fasta, BadInputNamesThePlaceAndTheRemedy) {
  const auto message = [](const std::string& text, const SequenceRules& rules = {}) {
    std::string first;
    for (const std::int64_t chunk : {1 << 20, 1, 3}) {
      const std::string m = MessageOf([&] { Parse(text, rules, chunk); });
      if (first.empty()) first = m;
      // The place, "x.fa:LINE", does not depend on how the bytes arrive.
      EXPECT_EQ(m.substr(0, m.find(':', 5)), first.substr(0, first.find(':', 5)));
    }
    return first;
  };
  EXPECT_THAT(message(">a\nACGT\n>b\n>c\nAC\n"),
              AllOf(StartsWith("x.fa:3: record 'b' has no sequence"), HasSubstr("remove")));
  EXPECT_THAT(message(">a\nACGT\n>b"), StartsWith("x.fa:3: record 'b' has no sequence"));
  EXPECT_THAT(message(">a\nACGT\n\nAC!T\n"),
              StartsWith("x.fa:4: record 'a', column 3: character '!' (0x21) is not of"));
  EXPECT_THAT(message(std::string(">a\nAC\0T\n", 8)),
              AllOf(StartsWith("x.fa:2: record 'a', column 3: character 0x00 (NUL)")));
  EXPECT_THAT(message(std::string(">a\0b\nACT\n", 9)), HasSubstr("NUL byte in the header"));
  EXPECT_THAT(message(std::string(">a\0b\nACT\n", 9)), StartsWith("x.fa:1: record 'a\\x00b': NUL"));
  EXPECT_THAT(message(">a\x1b[2J\nA!\n"), HasSubstr("record 'a\\x1b[2J', column 2"));
  EXPECT_THAT(message(">a\nMKVLAAGIE\n"), HasSubstr("data.alphabet=protein"));
  EXPECT_THAT(message("hello world\n"), StartsWith("x.fa:1: no FASTA: text '"));
  EXPECT_THAT(message("@read1\nACGT\n+\nIIII\n"), HasSubstr("FASTQ"));
  EXPECT_THAT(message("\n \n"), HasSubstr("the file is empty but for blank lines"));
  EXPECT_THAT(message(">a\rACGT\rAC\r"), HasSubstr("tr '\\r' '\\n'"));
  EXPECT_THAT(message(">a\nAC\n|GT\n", Rules(Alphabet::kDna, "|")),
              StartsWith("x.fa:3: record 'a': the tag opened here by '|' is never closed"));
}

// Every (begin, count) of records laid out at random, longer than a checkpoint interval, against
// the bases that were written.
TEST(Fasta, RandomAccessEqualsWhatWasWritten) {
  const RandomStream random(20240607, "fasta test");
  std::uint64_t draw = 0;
  const auto below = [&](std::uint64_t n) {
    return static_cast<std::size_t>(random.Below(draw++, n));
  };
  for (const bool tags : {false, true}) {
    std::string text;
    std::vector<std::string> bases(3);
    for (std::size_t r = 0; r < bases.size(); ++r) {
      text += ">r" + std::to_string(r) + "\n";
      const std::size_t length = r == 1 ? 5 : 3 * kCheckpointBases + below(1000);
      for (std::size_t i = 0; i < length; ++i) {
        const char c = "ACGTacgtN"[below(9)];
        text += c;
        bases[r] += c;
        if (tags && below(500) == 0) {
          text += "|d__X;|";
          bases[r] += "|d__X;|";
        }
        if (below(50) == 0) text += below(3) == 0 ? "\r\n" : below(20) == 0 ? "\n\n \n" : "\n";
      }
      text += "\n";
    }
    const SequenceRules rules = Rules(Alphabet::kDna, tags ? "|" : "");
    const SequenceFile file = Parse(text, rules, 777);
    for (int i = 0; i < 2000; ++i) {
      const std::size_t r = below(3);
      const std::size_t begin = below(bases[r].size());
      const std::size_t count = below(std::min<std::size_t>(bases[r].size() - begin, 5000) + 1);
      std::string got;
      TagState tag;
      file.Read(static_cast<std::int64_t>(r), static_cast<std::int64_t>(begin),
                static_cast<std::int64_t>(count), got, &tag);
      ASSERT_EQ(got, bases[r].substr(begin, count)) << r << " " << begin << " " << count;
      const auto delimiters =
          std::count(bases[r].begin(), bases[r].begin() + static_cast<std::ptrdiff_t>(begin), '|');
      ASSERT_EQ(tag.open, delimiters % 2) << begin;
    }
  }
}

TEST(Jsonl, LegalForms) {
  ExpectRecords("{\"sequence\": \"ACGT\"}\n\n{\"id\": \"b\", \"sequence\":\"GT\"}",
                {{"#0", "ACGT", 1}, {"b", "GT", 3}});
  ExpectRecords("{\"text\": \"AC\", \"name\": \"n\", \"x\": [1, {\"sequence\": \"T\"}, null]}\r\n",
                {{"n", "AC", 1}});
  ExpectRecords(
      "{\"text\": \"AC\", \"sequence\": \"GT\"}\n{\"sequence\": \"GT\", \"text\": \"A\"}\n",
      {{"#0", "GT", 1}, {"#1", "GT", 2}});
  ExpectRecords("{\"text\": \"a\\u00e9\\n\\\"b\"}\n", {{"#0", "a\xc3\xa9\n\"b", 1}},
                Rules(Alphabet::kBytes));
  SequenceRules rules;
  rules.json_field = "dna";
  ExpectRecords("{\"sequence\": 5, \"dna\": \"\\u0041CG\"}\n", {{"#0", "ACG", 1}}, rules);
}

TEST(Jsonl, TheNameIsIdThenName) {
  const auto name = [](const std::string& fields) {
    const SequenceFile file =
        Parse("{\"sequence\": \"AC\"}\n{" + fields + ", \"sequence\": \"AC\"}");
    EXPECT_EQ(file.records()[1].name_hash, HashName(file.RecordName(1))) << fields;
    return file.RecordName(1);
  };
  EXPECT_EQ(name(R"("id": "a", "name": "b")"), "a");
  EXPECT_EQ(name(R"("name": "b", "id": "a")"), "a");
  EXPECT_EQ(name(R"("name": "b", "id": "")"), "b");
  EXPECT_EQ(name(R"("id": "", "name": "b")"), "b");
  EXPECT_EQ(name(R"("name": "")"), "#1");
  // Numbers are names by their text.
  EXPECT_EQ(name(R"("id": 17)"), "17");
  EXPECT_EQ(name(R"("id": 0, "name": "b")"), "0");
  EXPECT_EQ(name(R"("id": -3)"), "-3");
  EXPECT_EQ(name(R"("id": 18446744073709551617)"), "18446744073709551617");
  EXPECT_EQ(name(R"("id": 1.50)"), "1.50");
  EXPECT_EQ(name(R"("name": 9007199254740993)"), "9007199254740993");
  EXPECT_EQ(name(R"("x": {"id": 5}, "name": 6)"), "6");
  // What is not asked for may be anything.
  EXPECT_EQ(name(R"("id": "a", "name": ["b"])"), "a");
}

TEST(Jsonl, BadInputNamesFileAndLine) {
  const auto message = [](const std::string& text) {
    return MessageOf([&] { Parse("{\"sequence\":\"A\"}\n" + text); });
  };
  EXPECT_THAT(message("{\"sequence\": \"AC\"\n"), StartsWith("x.fa:2: malformed JSON: column"));
  EXPECT_THAT(message("[1]\n"), StartsWith("x.fa:2: not a JSON object"));
  EXPECT_THAT(message("{\"sequence\": \"\"}\n"), HasSubstr("x.fa:2: record '#1' has no sequence"));
  EXPECT_THAT(message("{\"sequence\": 3}\n"), HasSubstr("is not a string"));
  EXPECT_THAT(message("{\"seq\": \"AC\", \"k\": 1}\n"),
              AllOf(StartsWith("x.fa:2: no field \"sequence\" or \"text\" (there are: seq, k)"),
                    HasSubstr("data.json_field")));
  EXPECT_THAT(message("{\"sequence\": \"ACxG\", \"id\": \"q\"}\n"),
              HasSubstr("x.fa:2: record 'q', position 3 of the sequence: character 'x'"));
  EXPECT_THAT(message("{\"sequence\": \"AC\\u0000G\"}\n"), HasSubstr("NUL"));
  EXPECT_THAT(message("{\"id\": \"a\\u0000\\nb\", \"sequence\": \"\"}\n"),
              HasSubstr("record 'a\\x00\\x0ab' has no sequence"));
  for (const auto& [value, what] :
       {std::pair{"null", "null"}, {"true", "a boolean"}, {"[1]", "a list"}, {"{}", "an object"}}) {
    for (const char* field : {"id", "name"}) {
      EXPECT_THAT(
          message(fmt::format("{{\"{}\": {}, \"sequence\": \"AC\"}}\n", field, value)),
          StartsWith(fmt::format("x.fa:2: field \"{}\" is {}; the name of a record", field, what)));
    }
  }
  EXPECT_THAT(message("{\"sequence\": \"AC G\"}\n"), HasSubstr("position 3"));
}

TEST(Jsonl, RandomAccessOfLongRecords) {
  std::string bases;
  const RandomStream random(5, "jsonl test");
  for (std::uint64_t i = 0; i < 40000; ++i) bases += "ACGT"[random.Bits(i) & 3];
  for (const char* prefix : {"", "\\u0041"}) {  // as it stands, and escaped
    const std::string decoded = (*prefix ? "A" : "") + bases;
    const SequenceFile file = Parse("{\"sequence\": \"" + (prefix + bases) + "\"}\n");
    for (const std::int64_t begin : {0, 1, 16383, 16384, 16385, 33000}) {
      std::string got;
      file.Read(0, begin, 1000, got);
      EXPECT_EQ(got, decoded.substr(static_cast<std::size_t>(begin), 1000));
    }
    EXPECT_THROW(
        {
          std::string got;
          file.Read(0, 40000, 1000, got);
        },
        Error);
  }
}

}  // namespace
}  // namespace cistron::data
