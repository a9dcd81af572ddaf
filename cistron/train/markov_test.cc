#include "cistron/train/markov.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cmath>
#include <map>
#include <string>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"

namespace cistron::train {
namespace {

std::string RandomBases(std::size_t n, std::uint64_t seed) {
  const RandomStream random(seed, "markov_test");
  std::string bases(n, 'A');
  for (std::size_t i = 0; i < n; ++i) bases[i] = "ACGT"[random.Below(i, 4)];
  return bases;
}

double Bits(const MarkovBaseline& baseline, int order, bool both_strands,
            MarkovSmoothing smoothing) {
  for (const MarkovScore& score : baseline.scores) {
    if (score.order == order && score.both_strands == both_strands &&
        score.smoothing == smoothing) {
      return score.bits_per_base;
    }
  }
  ADD_FAILURE() << "no score of order " << order;
  return 0;
}

std::string ReverseComplement(const std::string& bases) {
  std::string reversed(bases.rbegin(), bases.rend());
  const std::map<char, char> complement = {{'A', 'T'}, {'C', 'G'}, {'G', 'C'}, {'T', 'A'}};
  for (char& base : reversed) {
    const auto found = complement.find(base);
    if (found != complement.end()) base = found->second;
  }
  return reversed;
}

// The definition of the header, with a map of words, for strings that hold A, C, G, T and N.
class Definition {
 public:
  Definition(const std::string& train, bool both_strands) {
    Count(train);
    if (both_strands) Count(ReverseComplement(train));
  }
  double Add(const std::string& context, char x, double add) const {
    return (Get(context + x) + add) / (Sum(context) + 4 * add);
  }
  double Interpolated(const std::string& context, char x, const std::vector<double>& priors) const {
    const double lower = context.empty() ? 0.25 : Interpolated(context.substr(1), x, priors);
    const double prior = priors[context.size()];
    return (Get(context + x) + prior * lower) / (Sum(context) + prior);
  }

 private:
  void Count(const std::string& bases) {
    for (std::size_t i = 0; i < bases.size(); ++i) {
      for (std::size_t n = 1; n <= 32 && i + n <= bases.size(); ++n) ++counts_[bases.substr(i, n)];
    }
  }
  double Get(const std::string& word) const {
    const auto found = counts_.find(word);
    return found == counts_.end() ? 0.0 : found->second;
  }
  double Sum(const std::string& context) const {
    double sum = 0;
    for (const char x : {'A', 'C', 'G', 'T'}) sum += Get(context + x);
    return sum;
  }
  std::map<std::string, double> counts_;
};

double MeanBits(const std::string& heldout, int order,
                const std::function<double(const std::string&, char)>& p) {
  double bits = 0;
  int scored = 0;
  for (std::size_t i = 0; i < heldout.size(); ++i) {
    if (heldout[i] == 'N') continue;
    std::size_t known = 0;
    while (known < static_cast<std::size_t>(order) && known < i && heldout[i - known - 1] != 'N') {
      ++known;
    }
    bits -= std::log2(p(heldout.substr(i - known, known), heldout[i]));
    ++scored;
  }
  return bits / scored;
}

// Both compute the same sums of a few hundred fp64 terms of size ~2: 1e-12 is far above their
// rounding.
constexpr double kRounding = 1e-12;

void ExpectMatchesDefinition(const std::string& train, const std::string& heldout, int max_order,
                             std::int64_t table_bytes) {
  MarkovOptions options;
  options.table_bytes = table_bytes;
  options.max_order = max_order;
  options.priors = {3};
  const MarkovBaseline baseline =
      FitMarkovBaseline(FromString(train), FromString(heldout), options);
  const std::vector<double> priors(32, 3.0);
  const Definition one(train, false), both(train, true);
  for (int k = 0; k <= max_order; ++k) {
    EXPECT_NEAR(Bits(baseline, k, false, MarkovSmoothing::kAdd),
                MeanBits(heldout, k, [&](auto& c, char x) { return one.Add(c, x, 0.25); }),
                kRounding)
        << k;
    EXPECT_NEAR(Bits(baseline, k, true, MarkovSmoothing::kAdd),
                MeanBits(heldout, k, [&](auto& c, char x) { return both.Add(c, x, 0.25); }),
                kRounding)
        << k;
    EXPECT_NEAR(
        Bits(baseline, k, true, MarkovSmoothing::kInterpolated),
        MeanBits(heldout, k, [&](auto& c, char x) { return both.Interpolated(c, x, priors); }),
        kRounding)
        << k;
  }
}

TEST(Markov, MatchesItsDefinition) {
  // A repeat makes long contexts that have been seen; N breaks contexts in both parts.
  std::string train = RandomBases(700, 1);
  train += train.substr(100, 300);
  train[50] = train[222] = 'N';
  std::string heldout = train.substr(250, 120) + RandomBases(60, 2);
  heldout[31] = 'N';
  ExpectMatchesDefinition(train, heldout, 6, 1 << 20);
}

TEST(Markov, TableOfAnySizeMatchesTheDefinition) {
  const std::string train = RandomBases(400, 3);
  const std::string heldout = train.substr(10, 200) + RandomBases(40, 4);
  // An order a pass, some, and all of them.
  for (const int bytes : {0, 5'000, 20'000, 1 << 20}) {
    ExpectMatchesDefinition(train, heldout, 6, bytes);
  }
}

TEST(Markov, HighestOrderMatchesTheDefinition) {
  const std::string train = RandomBases(60, 9);
  ExpectMatchesDefinition(train, train.substr(5, 40), kMaxMarkovOrder, 1 << 18);
}

// Repeats of 14 bases among 4,000: contexts longer than these tell nothing.
TEST(Markov, OrdersAreAddedUntilTheyGainNothing) {
  const std::string train = RandomBases(4000, 10);
  std::string heldout;
  for (std::size_t at = 3; at + 14 < train.size(); at += 97) heldout += train.substr(at, 14);
  const MarkovBaseline baseline = FitMarkovBaseline(FromString(train), FromString(heldout));
  // 2 · 4,000 bases hold all words of up to log4(8000) = 6.5 letters.
  EXPECT_GE(baseline.Best().order, 7);
  EXPECT_LE(baseline.Best().order, 14);
  EXPECT_GE(baseline.MaxOrder(), baseline.Best().order + 3);
  EXPECT_LT(baseline.MaxOrder(), kMaxMarkovOrder);
  EXPECT_EQ(OrderWarning(baseline), "");
  const MarkovBaseline all =
      FitMarkovBaseline(FromString(train), FromString(heldout), {.max_order = kMaxMarkovOrder});
  EXPECT_LT(baseline.Best().bits_per_base - all.Best().bits_per_base, 2 * kFlatBits);
  EXPECT_EQ(DescribeAll(all), "every Markov model fitted (orders 0…31)");
  // Nothing to learn: the search ends as soon as repeats would have shown.
  const MarkovBaseline none =
      FitMarkovBaseline(FromString(train), FromString(RandomBases(600, 11)));
  EXPECT_EQ(none.MaxOrder(), 10);
  EXPECT_EQ(OrderWarning(none), "");
}

TEST(Markov, WarnsWhenTheBestOrderIsTheLargestFitted) {
  const std::string train = RandomBases(4000, 10);
  const MarkovBaseline baseline =
      FitMarkovBaseline(FromString(train), FromString(train.substr(1000, 600)), {.max_order = 5});
  EXPECT_EQ(baseline.Best().order, 5);
  EXPECT_NE(OrderWarning(baseline).find("the best order, 5, is the largest fitted"),
            std::string::npos);
  EXPECT_NE(FormatTable(baseline).find("warning: the best order"), std::string::npos);
}

TEST(Markov, BestIsTheLowestOrderOfEquals) {
  MarkovBaseline baseline;
  baseline.scores = {{0, true, MarkovSmoothing::kAdd, 0, 1.95},
                     {1, false, MarkovSmoothing::kAdd, 0, 1.90003},
                     {1, true, MarkovSmoothing::kAdd, 0, 1.90001},
                     {2, true, MarkovSmoothing::kAdd, 0, 1.9}};
  EXPECT_EQ(baseline.Best().bits_per_base, 1.90001);
}

TEST(Markov, PriorIsTheBestOfTheListForEachOrder) {
  const std::string train = RandomBases(3000, 5), heldout = RandomBases(400, 6);
  MarkovOptions options;
  options.max_order = 5;
  options.priors = {1, 16, 256};
  const MarkovBaseline all = FitMarkovBaseline(FromString(train), FromString(heldout), options);
  std::vector<double> chosen;
  for (const MarkovScore& score : all.scores) {
    if (score.smoothing == MarkovSmoothing::kInterpolated) chosen.push_back(score.prior);
  }
  ASSERT_EQ(chosen.size(), 6u);
  const Definition both(train, true);
  for (int k = 0; k <= 5; ++k) {
    for (const double prior : options.priors) {
      std::vector<double> priors = chosen;
      priors[k] = prior;
      const double bits =
          MeanBits(heldout, k, [&](auto& c, char x) { return both.Interpolated(c, x, priors); });
      EXPECT_LE(Bits(all, k, true, MarkovSmoothing::kInterpolated), bits + kRounding)
          << k << " " << prior;
    }
  }
}

TEST(Markov, StretchesContinueOrBreak) {
  const std::string train = RandomBases(500, 7), heldout = RandomBases(90, 8);
  MarkovOptions options;
  options.max_order = 4;
  const auto cut = [](const std::string& bases, bool continues) -> BaseSource {
    return [bases, continues](const BaseVisitor& visit) {
      visit(std::string_view(bases).substr(0, 40), false);
      visit(std::string_view(bases).substr(40), continues);
    };
  };
  const auto bits = [&](const BaseSource& a, const BaseSource& b) {
    return Bits(FitMarkovBaseline(a, b, options), 4, true, MarkovSmoothing::kInterpolated);
  };
  const double whole = bits(FromString(train), FromString(heldout));
  EXPECT_EQ(bits(cut(train, true), cut(heldout, true)), whole);
  // A break is a letter that is no base.
  std::string broken = heldout;
  broken.insert(40, "N");
  EXPECT_EQ(bits(FromString(train), cut(heldout, false)),
            bits(FromString(train), FromString(broken)));
  EXPECT_NE(bits(FromString(train), cut(heldout, false)), whole);
  EXPECT_NE(bits(cut(train, false), FromString(heldout)), whole);
}

TEST(Markov, CaseAndUracilDoNotMatter) {
  const std::string train = "ACGTTGCAAACGTGT", heldout = "GTTGA";
  MarkovOptions options;
  options.max_order = 3;
  const MarkovBaseline a = FitMarkovBaseline(FromString(train), FromString(heldout), options);
  const MarkovBaseline b =
      FitMarkovBaseline(FromString("acguugCAAACGTgt"), FromString("GUUGA"), options);
  EXPECT_EQ(a.Best().bits_per_base, b.Best().bits_per_base);
  EXPECT_EQ(a.train_bases, 15);
  EXPECT_EQ(a.heldout_bases, 5);
}

TEST(Markov, SaysWhatIsWrong) {
  EXPECT_THROW(FitMarkovBaseline(FromString("NN"), FromString("ACGT")), Error);
  EXPECT_THROW(FitMarkovBaseline(FromString("ACGT"), FromString("")), Error);
  MarkovOptions options;
  options.max_order = kMaxMarkovOrder + 1;
  EXPECT_THROW(FitMarkovBaseline(FromString("ACGT"), FromString("ACGT"), options), Error);
  options = {};
  options.priors = {0};
  EXPECT_THROW(FitMarkovBaseline(FromString("ACGT"), FromString("ACGT"), options), Error);
  options.priors = {};
  EXPECT_THROW(FitMarkovBaseline(FromString("ACGT"), FromString("ACGT"), options), Error);
  EXPECT_THROW(MarkovBaseline{}.Best(), Error);
}

std::string ReadGenome() {
  const std::string path = CISTRON_SOURCE_DIR "/data/ecoli_k12_mg1655.fna.gz";
  const gzFile file = gzopen(path.c_str(), "rb");
  EXPECT_NE(file, nullptr) << path;
  std::string text(6'000'000, '\0');
  const int read = gzread(file, text.data(), static_cast<unsigned>(text.size()));
  gzclose(file);
  text.resize(static_cast<std::size_t>(std::max(read, 0)));
  text.erase(0, text.find('\n') + 1);
  std::erase(text, '\n');
  return text;
}

// Published figures for this genome and split, made by other software, to their four decimals.
TEST(Markov, EscherichiaColiTable) {
  const std::string genome = ReadGenome();
  ASSERT_EQ(genome.size(), 4'639'675u);
  const std::size_t cut = genome.size() * 95 / 100;
  const MarkovBaseline baseline =
      FitMarkovBaseline(FromString(std::string_view(genome).substr(0, cut)),
                        FromString(std::string_view(genome).substr(cut)));
  std::fputs(FormatTable(baseline).c_str(), stdout);
  EXPECT_EQ(baseline.train_bases, static_cast<std::int64_t>(cut));
  EXPECT_EQ(baseline.heldout_bases, static_cast<std::int64_t>(genome.size() - cut));

  struct Line {
    int order;
    double forward, both, interpolated;
  };
  constexpr Line kLines[] = {
      {2, 1.9663, 1.9663, 1.9663}, {3, 1.9541, 1.9541, 1.9541},  {4, 1.9468, 1.9467, 1.9467},
      {5, 1.9407, 1.9404, 1.9404}, {6, 1.9377, 1.9366, 1.9365},  {7, 1.9405, 1.9362, 1.9342},
      {8, 1.9633, 1.9449, 1.9327}, {10, 2.2320, 2.1380, 1.9303}, {12, 2.1173, 2.1720, 1.9273},
      {13, 0, 0, 1.9247},          {14, 0, 0, 1.9226},           {15, 0, 0, 1.9196},
      {16, 0, 0, 1.9183},          {17, 0, 0, 1.9176},           {18, 0, 0, 1.9173},
  };
  const auto four_decimals = [](double bits) { return std::round(bits * 1e4) / 1e4; };
  for (const Line& line : kLines) {
    EXPECT_EQ(four_decimals(Bits(baseline, line.order, true, MarkovSmoothing::kInterpolated)),
              line.interpolated)
        << line.order;
    if (line.forward == 0) continue;
    EXPECT_EQ(four_decimals(Bits(baseline, line.order, false, MarkovSmoothing::kAdd)), line.forward)
        << line.order;
    EXPECT_EQ(four_decimals(Bits(baseline, line.order, true, MarkovSmoothing::kAdd)), line.both)
        << line.order;
  }
  // Higher orders gain nothing, which ends the search.
  EXPECT_EQ(four_decimals(baseline.Best().bits_per_base), 1.9171);
  EXPECT_LT(baseline.Best().order, baseline.MaxOrder());
  EXPECT_EQ(OrderWarning(baseline), "");
}

}  // namespace
}  // namespace cistron::train
