// Training and evaluation streams: what is read, in which order, and that it can be resumed.
#include "cistron/data/stream.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "cistron/data/data_test_util.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::data {
namespace {

std::string Text(const Tensor& tokens) {
  std::string text;
  for (const std::int64_t t : tokens.span<std::int64_t>()) text += static_cast<char>(t);
  return text;
}

DataConfig EColi(const TemporaryDirectory& scratch) {
  DataConfig config;
  config.train = {{std::filesystem::path(CISTRON_SOURCE_DIR) / "data/ecoli_k12_mg1655.fna.gz"}};
  config.cache_dir = scratch.path();
  return config;
}

TEST(Stream, EColiSplitAndFirstBases) {
  const TemporaryDirectory scratch;
  const auto corpus = Corpus::Open(EColi(scratch));
  EXPECT_EQ(corpus->train_bases(), 4407691);  // floor(0.95 · 4639675)
  EXPECT_EQ(corpus->heldout_bases(), 4639675 - 4407691);
  EXPECT_EQ(corpus->record(0).name, "K-12-MG1655");
  EXPECT_EQ(corpus->record(0).length, 4639675);

  const EvaluationStream all(corpus, Part::kAll);
  EXPECT_EQ(Text(all.Rows(0, 1).tokens).substr(0, 70),
            "AGCTTTTCATTCTGACTGCAACGGGCAATATGTCTCTGTGTGGATTAAAAAAAGAGTGTCTGATAGCAGC");
  const EvaluationStream heldout(corpus);
  EXPECT_EQ(heldout.num_rows(), (231984 + 511) / 512);
  EXPECT_EQ(heldout.Row(0).begin, 4407691);
  const Batch last = heldout.Rows(heldout.num_rows() - 1, 1);
  EXPECT_EQ(last.num_tokens(), 231984 % 512);
  EXPECT_EQ(Text(last.tokens).substr(static_cast<std::size_t>(last.num_tokens()) - 5), "TTTTC");

  TrainingStream stream(corpus, 1, 4096);
  const GlobalBatch batch = stream.Next();
  EXPECT_EQ(batch.rows.size(), 8u);
  EXPECT_EQ(batch.totals.tokens, 4096);
  EXPECT_EQ(batch.totals.weight_sum, 8 * 511);
  const Batch micro = batch.MicroBatch(2, 3);
  EXPECT_EQ(micro.num_tokens(), 3 * 512);
  EXPECT_EQ(micro.sequences.num_sequences(), 3);
  EXPECT_EQ(micro.labels.span<std::int64_t>()[511], ops::kIgnoreLabel);
  EXPECT_EQ(micro.labels.span<std::int64_t>()[0], micro.tokens.span<std::int64_t>()[1]);
}

}  // namespace
}  // namespace cistron::data
