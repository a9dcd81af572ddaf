// Training and evaluation streams: what is read, in which order, and that it can be resumed.
#include "cistron/data/stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/data/test_files.h"
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

// Everything of a batch, for bitwise comparison.
std::string Bytes(const GlobalBatch& batch) {
  std::string bytes;
  for (const Batch& row : batch.rows) {
    for (const Tensor& t :
         {row.tokens, row.labels, row.weights, row.sequences.cu_seqlens, row.sequences.positions}) {
      bytes.append(static_cast<const char*>(t.raw()), static_cast<std::size_t>(t.bytes()));
    }
  }
  return bytes;
}

std::string RandomBases(std::size_t n, std::uint64_t seed, std::string_view letters = "ACGT") {
  const RandomStream random(seed, "stream test");
  std::string bases;
  for (std::size_t i = 0; i < n; ++i) bases += letters[random.Below(i, letters.size())];
  return bases;
}

// Records of every length from shorter than a window to longer than many.
std::string MixedRecords() {
  std::string text;
  for (std::size_t i = 1; i <= 60; ++i) {
    text += ">r" + std::to_string(i) + "\n" + RandomBases(i * i % 97 + 1, i, "ACGTacgtN") + "\n";
  }
  return text + ">long\n" + RandomBases(2000, 99) + "\n";
}

DataConfig Small(const TemporaryDirectory& scratch, const std::string& text) {
  DataConfig config;
  config.train = {{scratch.Write("small.fa", text)}};
  config.split.kind = SplitRule::Kind::kNone;
  config.seq_len = 16;
  config.reverse_complement = 0;
  return config;
}

// The tokens of the next `epochs` epochs, in order, as text: tokens of all windows must come out
// whole.
std::string ReadEpochs(TrainingStream& stream, std::int64_t epochs) {
  std::string text;
  while (stream.state().epoch < epochs) {
    for (const Batch& row : stream.Next().rows) text += Text(row.tokens);
  }
  return text;
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

// One window a record (each is shorter than a row): an epoch shows each exactly once, another epoch
// in another order.
TEST(Stream, EveryWindowOfAnEpochOnce) {
  const TemporaryDirectory scratch;
  std::string text;
  std::int64_t windows = 0;
  // Lengths 15 and unlike starts: windows of 15 tokens; 16·15 of them are 15 rows of 16.
  for (int i = 0; i < 240; ++i) {
    text += ">\n" + RandomBases(15, static_cast<std::uint64_t>(i)) + "\n";
    ++windows;
  }
  DataConfig config = Small(scratch, text);
  const auto corpus = Corpus::Open(config);
  TrainingStream stream(corpus, 5, 16);
  EXPECT_EQ(stream.windows_in_epoch(0), windows);
  EXPECT_EQ(stream.tokens_per_epoch(), 3600);
  std::vector<std::vector<std::string>> orders;
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::string tokens;
    for (int row = 0; row < 225; ++row) tokens += Text(stream.Next().rows[0].tokens);
    std::vector<std::string> seen;
    for (std::size_t at = 0; at < tokens.size(); at += 15) seen.push_back(tokens.substr(at, 15));
    orders.push_back(seen);
    std::sort(seen.begin(), seen.end());
    std::vector<std::string> all;
    corpus->ForEachChunk(Part::kTrain, [&](std::string_view b, bool) { all.emplace_back(b); });
    std::sort(all.begin(), all.end());
    EXPECT_EQ(seen, all);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

// Files of weight 2, 1, 1/2 and 1/4: over four epochs each window appears 8, 4, 2 and 1 times, in
// every pass once.
TEST(Stream, MixingWeights) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, ">x\nA\n");
  config.train.clear();
  const double weights[] = {2, 1, 0.5, 0.25};
  for (std::size_t f = 0; f < 4; ++f) {
    std::string text;
    for (std::size_t i = 0; i < 32; ++i) {
      text += ">\n" + RandomBases(16, f * 1000 + i) + "\n";
    }
    config.train.push_back({scratch.Write("f" + std::to_string(f) + ".fa", text), weights[f]});
  }
  const auto corpus = Corpus::Open(config);
  TrainingStream stream(corpus, 3, 16);
  EXPECT_EQ(stream.tokens_per_epoch(), 16 * 32 * 3.75);
  std::map<std::string, int> seen;
  const std::string tokens = ReadEpochs(stream, 4);
  for (std::size_t at = 0; at < 16 * 32 * 15; at += 16) ++seen[tokens.substr(at, 16)];
  std::map<int, int> counts;
  for (const auto& [window, times] : seen) ++counts[times];
  EXPECT_EQ(counts, (std::map<int, int>{{8, 32}, {4, 32}, {2, 32}, {1, 32}}));
}

// The trap stream-restarts: continuing from any step, in a new object, gives the same bits.
TEST(Stream, StreamRestarts) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, MixedRecords());
  config.reverse_complement = 0.5;
  config.begin_token = config.end_token = true;
  const auto corpus = Corpus::Open(config);
  constexpr int kSteps = 200;
  std::vector<std::string> batches;
  std::vector<StreamState> states;
  TrainingStream stream(corpus, 42, 64);
  for (int step = 0; step < kSteps; ++step) {
    states.push_back(stream.state());
    EXPECT_EQ(states.back().step, step);
    batches.push_back(Bytes(stream.Next()));
  }
  EXPECT_GT(stream.state().epoch, 1);
  EXPECT_NE(batches[0], batches[1]);
  for (std::size_t step = 0; step < kSteps; ++step) {
    TrainingStream other(Corpus::Open(config), 42, 64);
    other.Restore(states[step]);
    for (std::size_t next = step; next < std::min<std::size_t>(step + 3, kSteps); ++next) {
      ASSERT_EQ(Bytes(other.Next()), batches[next]) << step;
    }
  }
  TrainingStream reseeded(corpus, 43, 64);
  EXPECT_NE(Bytes(reseeded.Next()), batches[0]);
}

TEST(Stream, StatesOfOtherDataAreRefused) {
  const TemporaryDirectory scratch;
  TrainingStream stream(Corpus::Open(Small(scratch, MixedRecords())), 1, 16);
  EXPECT_THROW(stream.Restore({0, 0, 1000000, 0}), Error);
  EXPECT_THROW(stream.Restore({0, 0, 0, 16}), Error);
  EXPECT_THROW(stream.Restore({0, -1, 0, 0}), Error);
}

// The packing rule: the rows of a stream do not depend on how many make a step, each token of a
// window is in exactly one row, sequences and positions restart at every piece.
TEST(Stream, RowsDoNotDependOnTheBatch) {
  const TemporaryDirectory scratch;
  const auto corpus = Corpus::Open(Small(scratch, MixedRecords()));
  TrainingStream one(corpus, 9, 16), four(corpus, 9, 64);
  for (int step = 0; step < 60; ++step) {
    const GlobalBatch batch = four.Next();
    for (const Batch& row : batch.rows) {
      const Batch alone = one.Next().rows[0];
      ASSERT_EQ(Text(row.tokens), Text(alone.tokens));
    }
    const Batch micro = batch.MicroBatch(0, 4);
    const auto cu = micro.sequences.cu_seqlens.span<std::int64_t>();
    EXPECT_EQ(cu.back(), 64);
    for (std::size_t s = 0; s + 1 < cu.size(); ++s) {
      EXPECT_EQ(micro.labels.span<std::int64_t>()[static_cast<std::size_t>(cu[s + 1] - 1)],
                ops::kIgnoreLabel);
      for (std::int64_t t = cu[s]; t < cu[s + 1]; ++t) {
        EXPECT_EQ(micro.sequences.positions.span<std::int64_t>()[static_cast<std::size_t>(t)],
                  t - cu[s]);
      }
    }
    EXPECT_EQ(batch.totals.tokens, 64);
    EXPECT_EQ(batch.totals.rows, 4);
  }
}

std::vector<std::int64_t> LengthsOf(const ops::PackedSequences& sequences) {
  const auto cu = sequences.cu_seqlens.span<std::int64_t>();
  std::vector<std::int64_t> lengths;
  for (std::size_t s = 1; s < cu.size(); ++s) {
    if (cu[s] > cu[s - 1]) lengths.push_back(cu[s] - cu[s - 1]);
  }
  return lengths;
}

// The bounds of a run's micro-batches are the same in all steps, those of a stream that resumes
// too, and the sequences are those of the rows.
TEST(Stream, MicroBatchesKeepTheirBounds) {
  const TemporaryDirectory scratch;
  const auto corpus = Corpus::Open(Small(scratch, MixedRecords()));
  TrainingStream stream(corpus, 9, 64);
  StreamState middle;
  std::set<std::size_t> numbers;
  ops::PackedSequences first;
  for (int step = 0; step < 100; ++step) {
    if (step == 50) middle = stream.state();
    const GlobalBatch batch = stream.Next();
    const ops::PackedSequences own = batch.MicroBatch(1, 3).sequences;
    if (step == 0) first = own;
    ASSERT_EQ(own.num_sequences(), first.num_sequences());
    ASSERT_EQ(own.max_length, 16);
    EXPECT_FALSE(own.uniform);
    std::vector<std::int64_t> expected;
    for (std::size_t row = 1; row < 4; ++row) {
      const auto more = LengthsOf(batch.rows[row].sequences);
      expected.insert(expected.end(), more.begin(), more.end());
    }
    EXPECT_EQ(LengthsOf(own), expected);
    numbers.insert(expected.size());
  }
  EXPECT_GT(numbers.size(), 3u) << "the packings hardly differ";
  TrainingStream resumed(corpus, 9, 64);
  resumed.Restore(middle);
  EXPECT_EQ(resumed.Next().MicroBatch(1, 3).sequences.num_sequences(), first.num_sequences());
}

// Records that all fill rows: sequences of one length, which need no bounds.
TEST(Stream, FullWindowsNeedNoBounds) {
  const TemporaryDirectory scratch;
  TrainingStream stream(
      Corpus::Open(Small(scratch, ">a\n" + RandomBases(100, 1) + "\n>b\n" + RandomBases(16, 2))), 9,
      64);
  for (int step = 0; step < 20; ++step) {
    const ops::PackedSequences own = stream.Next().MicroBatch(1, 3).sequences;
    EXPECT_TRUE(own.uniform);
    EXPECT_EQ(own.num_sequences(), 3);
    EXPECT_EQ(own.max_length, 16);
  }
}

// Records that are all short: no window is as long as a row, and no bound needs to be.
TEST(Stream, BoundsAreThoseOfTheWindows) {
  const TemporaryDirectory scratch;
  TrainingStream stream(
      Corpus::Open(Small(scratch, ">a\n" + RandomBases(5, 1) + "\n>b\n" + RandomBases(5, 2) +
                                      "\n>c\n" + RandomBases(6, 3))),
      9, 16);
  for (int step = 0; step < 20; ++step) {
    const ops::PackedSequences own = stream.Next().MicroBatch(0, 1).sequences;
    EXPECT_EQ(own.max_length, 6);
    // Two whole windows and two parts; none has fewer than 5 tokens.
    EXPECT_EQ(own.num_sequences(), 5);
  }
}

// Windows never cross records: with one letter a record, every piece has one letter.
TEST(Stream, WindowsNeverCrossRecords) {
  const TemporaryDirectory scratch;
  DataConfig config =
      Small(scratch, ">a\n" + std::string(41, 'A') + "\n>c\n" + std::string(7, 'C') + "\n>g\n" +
                         std::string(333, 'G') + "\n>t\n" + std::string(16, 'T') + "\n");
  config.stride = 5;
  TrainingStream stream(Corpus::Open(config), 2, 32);
  for (int step = 0; step < 50; ++step) {
    const Batch batch = stream.Next().MicroBatch(0, 2);
    const std::string text = Text(batch.tokens);
    const auto cu = batch.sequences.cu_seqlens.span<std::int64_t>();
    for (std::size_t s = 0; s + 1 < cu.size(); ++s) {
      for (std::int64_t t = cu[s]; t < cu[s + 1]; ++t) {
        EXPECT_EQ(text[static_cast<std::size_t>(t)], text[static_cast<std::size_t>(cu[s])]);
      }
    }
  }
}

// The trap shuffle-window, on the stream: the first tenth of an epoch shows windows of the whole
// genome. The largest gap between the starts of 1,000 uniform windows of 10,000 exceeds 3% with
// probability 1e-10.
TEST(Stream, ShuffleWindow) {
  const TemporaryDirectory scratch;
  std::string text;
  for (std::size_t i = 0; i < 10000; ++i) {
    // A record names itself: its number in base 4, eight letters.
    text += ">\n";
    for (std::size_t digit = 0, n = i; digit < 8; ++digit, n /= 4) text += "ACGT"[n % 4];
    text += "\n";
  }
  DataConfig config = Small(scratch, text);
  config.seq_len = 8;
  TrainingStream stream(Corpus::Open(config), 8, 8000);
  std::set<std::size_t> numbers = {0, 9999};
  for (const Batch& row : stream.Next().rows) {
    std::size_t n = 0;
    const std::string letters = Text(row.tokens);
    for (std::size_t digit = 8; digit-- > 0;) {
      n = 4 * n + std::string_view("ACGT").find(letters[digit]);
    }
    numbers.insert(n);
  }
  EXPECT_GE(numbers.size(), 1000u);
  std::size_t before = 0, gap = 0;
  for (const std::size_t n : numbers) {
    gap = std::max(gap, n - before);
    before = n;
  }
  EXPECT_LT(gap, 300u);
}

// Another epoch cuts a long record at other places, and every base is read in each.
TEST(Stream, PhasesDifferBetweenEpochs) {
  const TemporaryDirectory scratch;
  const std::string genome = RandomBases(16 * 100, 4);
  const auto corpus = Corpus::Open(Small(scratch, ">g\n" + genome + "\n"));
  TrainingStream stream(corpus, 6, 16);
  std::set<std::set<std::size_t>> grids;
  for (int epoch = 0; epoch < 8; ++epoch) {
    std::set<std::size_t> starts;
    std::vector<bool> covered(genome.size());
    const std::int64_t windows = stream.windows_in_epoch(epoch);
    for (std::int64_t w = 0; w < windows; ++w) {
      const std::size_t start = genome.find(Text(stream.Next().rows[0].tokens));
      ASSERT_NE(start, std::string::npos);
      starts.insert(start);
      std::fill_n(covered.begin() + static_cast<std::ptrdiff_t>(start), 16, true);
    }
    EXPECT_EQ(std::count(covered.begin(), covered.end(), false), 0);
    grids.insert(starts);
  }
  EXPECT_GE(grids.size(),
            5u);  // of 17 phases; 8 draws with fewer than 5 values: probability 3e-3 at most
}

// Reverse complement: with probability 1 every window is the complement of what probability 0
// gives, read backwards, labels and weights too; twice is the identity.
TEST(Stream, ReverseComplement) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, ">g\n" + RandomBases(16 * 40, 4, "ACGTacgtNRykbv") + "\n");
  config.upper_case = false;
  config.soft_mask_weight = 0.25;
  TrainingStream forward(Corpus::Open(config), 6, 16);
  config.reverse_complement = 1;
  TrainingStream reverse(Corpus::Open(config), 6, 16);
  config.reverse_complement = 0.5;
  TrainingStream half(Corpus::Open(config), 6, 16);
  const ByteTable& table = ByteTable::Of(Alphabet::kDna);
  int reversed = 0;
  constexpr int kSteps = 400;
  for (int step = 0; step < kSteps; ++step) {
    const Batch f = forward.Next().rows[0], r = reverse.Next().rows[0], h = half.Next().rows[0];
    std::string text = Text(f.tokens);
    std::reverse(text.begin(), text.end());
    for (char& c : text) c = static_cast<char>(table.Complement(static_cast<unsigned char>(c)));
    ASSERT_EQ(Text(r.tokens), text);
    for (std::size_t t = 0; t + 1 < 16; ++t) {
      const auto flags = table.flags(static_cast<unsigned char>(text[t + 1]));
      const float weight = flags & kDegenerate ? 0.0f : flags & kLowerCase ? 0.25f : 1.0f;
      ASSERT_EQ(r.weights.span<float>()[t], weight);
      ASSERT_EQ(r.labels.span<std::int64_t>()[t],
                weight > 0 ? static_cast<std::int64_t>(text[t + 1]) : ops::kIgnoreLabel);
    }
    const bool is_reverse = Text(h.tokens) == text;
    ASSERT_TRUE(is_reverse || Text(h.tokens) == Text(f.tokens));
    reversed += is_reverse;
  }
  EXPECT_NEAR(reversed, 0.5 * kSteps, 60);  // six deviations of 10
}

// The trap masked-loss-scale: the denominator is the weight that is there, not the number of
// tokens.
TEST(Stream, MaskedLossScale) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, ">g\n" + RandomBases(4000, 4, "ACGTaN") + "\n");
  for (const double soft : {1.0, 0.5, 0.0}) {
    config.soft_mask_weight = soft;
    TrainingStream stream(Corpus::Open(config), 6, 128);
    double smallest = 1e9, largest = 0;
    for (int step = 0; step < 20; ++step) {
      const GlobalBatch batch = stream.Next();
      double sum = 0;
      std::int64_t scored = 0;
      for (const Batch& row : batch.rows) {
        for (std::size_t t = 0; t < 16; ++t) {
          const float weight = row.weights.span<float>()[t];
          const std::int64_t label = row.labels.span<std::int64_t>()[t];
          EXPECT_EQ(weight > 0, label != ops::kIgnoreLabel);
          EXPECT_NE(label, 'N');
          sum += weight;
          scored += label != ops::kIgnoreLabel;
        }
      }
      EXPECT_EQ(batch.totals.weight_sum, sum);
      EXPECT_LT(scored, 8 * 15);
      smallest = std::min(smallest, sum);
      largest = std::max(largest, sum);
    }
    EXPECT_LT(smallest, largest);
  }
}

TEST(Stream, BeginAndEndTokensStandAtTheEndsOfRecords) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, ">a\nAACCG\n");
  config.begin_token = config.end_token = true;
  config.seq_len = 7;
  TrainingStream stream(Corpus::Open(config), 1, 7);
  const Batch row = stream.Next().rows[0];
  EXPECT_EQ(Text(row.tokens), std::string("\2AACCG\0", 7));
  EXPECT_EQ(row.labels.span<std::int64_t>()[5], kEndToken);
  EXPECT_EQ(row.weights.span<float>()[5], 1.0f);
  config.reverse_complement = 1;
  TrainingStream reverse(Corpus::Open(config), 1, 7);
  const Batch back = reverse.Next().rows[0];
  EXPECT_EQ(Text(back.tokens), std::string("\2CGGTT\0", 7));
  EXPECT_EQ(back.labels.span<std::int64_t>()[5], kEndToken);
  EXPECT_EQ(back.weights.span<float>()[0], 1.0f);
  // Evaluation scores bases alone, and not the first.
  const EvaluationStream evaluation(Corpus::Open(config), Part::kAll);
  const Batch scored = evaluation.Rows(0, 1);
  const std::vector<float> weights(scored.weights.span<float>().begin(),
                                   scored.weights.span<float>().end());
  EXPECT_EQ(weights, (std::vector<float>{0, 1, 1, 1, 1, 0, 0}));
}

TEST(Stream, TagsAreMaskedAndKeepTheirWindowForward) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, ">a\nACG|d_e|TTacGA\n");
  config.tag_delimiters = {"|"};
  config.reverse_complement = 1;
  config.seq_len = 14;
  TrainingStream stream(Corpus::Open(config), 1, 14);
  const Batch row = stream.Next().rows[0];
  EXPECT_EQ(Text(row.tokens), "ACG|d_e|TTACGA");
  const std::vector<std::int64_t> labels(row.labels.span<std::int64_t>().begin(),
                                         row.labels.span<std::int64_t>().end());
  const std::int64_t x = ops::kIgnoreLabel;
  EXPECT_EQ(labels,
            (std::vector<std::int64_t>{'C', 'G', x, x, x, x, x, 'T', 'T', 'A', 'C', 'G', 'A', x}));
}

TEST(Stream, StridedWindowsOverlap) {
  const TemporaryDirectory scratch;
  DataConfig config = Small(scratch, ">g\n" + RandomBases(1600, 4) + "\n");
  config.stride = 4;
  TrainingStream stream(Corpus::Open(config), 6, 16);
  EXPECT_EQ(stream.windows_in_epoch(0), (1600 - 16) / 4 + 2);
}

TEST(Evaluation, RowsOfEveryRecordInOrder) {
  const TemporaryDirectory scratch;
  const DataConfig config =
      Small(scratch, ">a\nACGTacgtNACGTACGTACG\n>b\nA\n>c\nACGTACGTACGTACGTA\n>d\nGT\n");
  const EvaluationStream stream(Corpus::Open(config), Part::kAll);
  ASSERT_EQ(stream.num_rows(), 4);  // 16 + 4 of a, none of b, 16 (and a lone A) of c, 2 of d
  const std::int64_t expected[4][3] = {{0, 0, 16}, {0, 16, 4}, {2, 0, 16}, {3, 0, 2}};
  for (std::int64_t r = 0; r < 4; ++r) {
    const EvaluationRow row = stream.Row(r);
    EXPECT_EQ(row.record, expected[r][0]);
    EXPECT_EQ(row.begin, expected[r][1]);
    EXPECT_EQ(row.tokens, expected[r][2]);
  }
  const Batch batch = stream.Rows(0, 4);
  EXPECT_EQ(Text(batch.tokens), "ACGTACGTNACGTACGTACGACGTACGTACGTACGTGT");
  EXPECT_EQ(batch.sequences.num_sequences(), 4);
  double weight = 0;
  for (const float w : batch.weights.span<float>()) weight += w;
  EXPECT_EQ(weight, 14 + 3 + 15 + 1);  // N is not scored, nor the first base of each row
  EXPECT_EQ(batch.labels.span<std::int64_t>()[7], ops::kIgnoreLabel);
}

}  // namespace
}  // namespace cistron::data
