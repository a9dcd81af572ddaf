// Splits, the raw bases of each part, and the errors of opening.
#include "cistron/data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cistron/data/stream.h"
#include "cistron/data/test_files.h"

namespace cistron::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

DataConfig Config(std::vector<std::filesystem::path> files) {
  DataConfig config;
  for (auto& file : files) config.train.push_back({std::move(file)});
  config.seq_len = 8;
  return config;
}

std::vector<std::string> Stretches(const Corpus& corpus, Part part) {
  std::vector<std::string> stretches;
  corpus.ForEachChunk(part, [&](std::string_view bases, bool starts) {
    if (starts) stretches.emplace_back();
    stretches.back() += bases;
  });
  return stretches;
}

TEST(Corpus, RegionCutsEachRecordAtTheFloor) {
  const TemporaryDirectory scratch;
  DataConfig config = Config({scratch.Write("a.fa", ">a\nACGTACGTAC\n>b\nttg\n>c\nG\n")});
  config.split.train_fraction = 0.75;
  const auto corpus = Corpus::Open(config);
  EXPECT_EQ(Stretches(*corpus, Part::kTrain), (std::vector<std::string>{"ACGTACG", "TT"}));
  EXPECT_EQ(Stretches(*corpus, Part::kHeldout), (std::vector<std::string>{"TAC", "G", "G"}));
  EXPECT_EQ(Stretches(*corpus, Part::kAll), (std::vector<std::string>{"ACGTACGTAC", "TTG", "G"}));
  EXPECT_EQ(corpus->train_bases(), 9);
  EXPECT_EQ(corpus->heldout_bases(), 5);
  EXPECT_EQ(corpus->num_records(), 3);
  EXPECT_EQ(corpus->record(1).name, "b");
  EXPECT_EQ(corpus->record(1).line, 3);
  config.upper_case = false;
  EXPECT_EQ(Stretches(*Corpus::Open(config), Part::kTrain)[1], "tt");
}

TEST(Corpus, RecordsSplitByNameAndKey) {
  const TemporaryDirectory scratch;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += ">seq" + std::to_string(i) + "\nACGTA\n";
  DataConfig config = Config({scratch.Write("a.fa", text)});
  config.split = {SplitRule::Kind::kRecords, 0.8, 0};
  const auto corpus = Corpus::Open(config);
  const std::int64_t train = corpus->train_bases() / 5;
  // Binomial with mean 1600 and deviation 17.9; six are allowed.
  EXPECT_NEAR(static_cast<double>(train), 1600, 108);
  EXPECT_EQ(corpus->heldout_bases(), 5 * (2000 - train));
  config.split.key = 1;
  EXPECT_NE(Corpus::Open(config)->fingerprint(), corpus->fingerprint());
  // Copies of a record fall on its side.
  config.split.key = 0;
  config.train = {{scratch.Write("b.fa", text + text)}};
  EXPECT_EQ(Corpus::Open(config)->train_bases(), 2 * corpus->train_bases());
}

// JSONL: numbers are names too.
TEST(Corpus, RecordsOfOneNumberFallOnOneSide) {
  const TemporaryDirectory scratch;
  std::string text;
  for (int i = 0; i < 600; ++i) {
    text += fmt::format("{{\"id\": {}, \"sequence\": \"{}\"}}\n", i % 200,
                        std::string(2, "ACG"[i / 200]));
  }
  DataConfig config = Config({scratch.Write("a.jsonl", text)});
  config.split = {SplitRule::Kind::kRecords, 0.5, 0};
  const auto corpus = Corpus::Open(config);
  std::string train;
  for (const std::string& bases : Stretches(*corpus, Part::kTrain)) train += bases;
  // Each name has one record of each letter, in the same order.
  const std::size_t names = train.size() / 6;
  EXPECT_GT(names, 60u);
  EXPECT_LT(names, 140u);
  EXPECT_EQ(train, std::string(2 * names, 'A') + std::string(2 * names, 'C') +
                       std::string(2 * names, 'G'));
}

TEST(Corpus, ACopyOfATrainingFileIsNotHeldOut) {
  const TemporaryDirectory scratch;
  const std::string text = ">a\nACGTACGT\n";
  DataConfig config = Config({scratch.Write("other.fa", ">b\nAA\n"), scratch.Write("a.fa", text)});
  config.split.kind = SplitRule::Kind::kFiles;
  config.cache_dir = scratch.path() / "cache";
  for (const auto& copy :
       {scratch.Write("copy.fa", text), scratch.Write("copy.fa.gz", Gzip(text))}) {
    config.heldout = {{copy}};
    EXPECT_THAT(MessageOf([&] { Corpus::Open(config); }),
                AllOf(HasSubstr(copy.string()), HasSubstr("has the content of"),
                      HasSubstr((scratch.path() / "a.fa").string())));
  }
}

TEST(Corpus, FilesSplit) {
  const TemporaryDirectory scratch;
  DataConfig config =
      Config({scratch.Write("a.fa", ">a\nACGT\n"), scratch.Write("b.fa", ">b\nAA\n")});
  config.heldout = {{scratch.Write("c.fa", ">c\nGGG\n")}};
  config.split.kind = SplitRule::Kind::kFiles;
  const auto corpus = Corpus::Open(config);
  EXPECT_EQ(Stretches(*corpus, Part::kTrain), (std::vector<std::string>{"ACGT", "AA"}));
  EXPECT_EQ(Stretches(*corpus, Part::kHeldout), (std::vector<std::string>{"GGG"}));
  EXPECT_EQ(corpus->record(2).name, "c");
  EXPECT_EQ(corpus->record(2).file, scratch.path() / "c.fa");
}

TEST(Corpus, LongRecordsComeInChunks) {
  const TemporaryDirectory scratch;
  std::string bases;
  for (int i = 0; i < 300000; ++i) bases += i % 7 == 0 ? "CATGA" : "GTTGC";
  DataConfig config = Config({scratch.Write("a.fa", ">a\n" + bases)});
  config.split.kind = SplitRule::Kind::kNone;
  const auto corpus = Corpus::Open(config);
  EXPECT_EQ(Stretches(*corpus, Part::kTrain), std::vector<std::string>{bases});
  EXPECT_TRUE(Stretches(*corpus, Part::kHeldout).empty());
}

TEST(Corpus, FingerprintKnowsContentAndSettingsNotPaths) {
  const TemporaryDirectory scratch;
  const std::string text = ">a\nACGTACGTACGTACGTACGTACGTACGTACGTACGT\n";
  DataConfig config = Config({scratch.Write("a.fa", text)});
  const std::uint64_t first = Corpus::Open(config)->fingerprint();
  config.train = {{scratch.Write("moved.fa", text)}};
  EXPECT_EQ(Corpus::Open(config)->fingerprint(), first);
  config.train = {{scratch.Write("other.fa", text + ">b\nAC\n")}};
  EXPECT_NE(Corpus::Open(config)->fingerprint(), first);
  config.train = {{scratch.path() / "a.fa"}};
  config.seq_len = 9;
  EXPECT_NE(Corpus::Open(config)->fingerprint(), first);
}

TEST(Corpus, BadInput) {
  const TemporaryDirectory scratch;
  const auto open = [&](const std::string& text) {
    Corpus::Open(Config({scratch.Write("a.fa", text)}));
  };
  EXPECT_THAT(MessageOf([&] { open(">a\nA\n"); }), HasSubstr("nothing is left to train on"));
  EXPECT_THAT(MessageOf([&] { open(">a\nACGTACGTAC\n"); }),
              AllOf(HasSubstr("the held-out part of"), HasSubstr("holds no window"),
                    HasSubstr("data.train_fraction")));
  DataConfig config = Config({scratch.Write("a.fa", ">a\nACGT\n")});
  config.seq_len = 1;
  MessageOf([&] { Corpus::Open(config); }, ErrorCode::kInvalidArgument);
  config = Config({});
  MessageOf([&] { Corpus::Open(config); }, ErrorCode::kInvalidArgument);
  config = Config({scratch.path() / "a.fa"});
  config.heldout = config.train;
  EXPECT_THAT(MessageOf([&] { Corpus::Open(config); }, ErrorCode::kInvalidArgument),
              HasSubstr("data.split is not 'files'"));
  config.split.kind = SplitRule::Kind::kFiles;
  EXPECT_THAT(MessageOf([&] { Corpus::Open(config); }, ErrorCode::kInvalidArgument),
              HasSubstr("a.fa is in data.train too"));
  config = Config({scratch.path() / "a.fa"});
  config.tag_delimiters = {"A"};
  EXPECT_THAT(MessageOf([&] { Corpus::Open(config); }, ErrorCode::kInvalidArgument),
              HasSubstr("is a letter of the alphabet"));
  config = Config({scratch.path() / "a.fa"});
  config.split.kind = SplitRule::Kind::kNone;
  const auto corpus = Corpus::Open(config);
  EXPECT_THAT(MessageOf([&] { EvaluationStream{corpus}; }), HasSubstr("holds no window"));
  EXPECT_THAT(
      MessageOf([&] { TrainingStream(corpus, 1, 8); }, ErrorCode::kInvalidArgument),
      HasSubstr("batch.global_tokens = 8 is more than the training data hold: an epoch has 4"));
  EXPECT_THAT(MessageOf([&] { TrainingStream(corpus, 1, 12); }, ErrorCode::kInvalidArgument),
              HasSubstr("not a positive multiple of data.seq_len"));
}

}  // namespace
}  // namespace cistron::data
