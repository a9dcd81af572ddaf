#include "cistron/train/markov.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

constexpr int kMaxOrder = 15;
constexpr std::uint8_t kBreak = 4;  // any letter that is no base: contexts end here

constexpr std::array<std::uint8_t, 256> MakeCodes() {
  std::array<std::uint8_t, 256> codes{};
  for (auto& code : codes) code = kBreak;
  codes['A'] = codes['a'] = 0;
  codes['C'] = codes['c'] = 1;
  codes['G'] = codes['g'] = 2;
  codes['T'] = codes['t'] = codes['U'] = codes['u'] = 3;
  return codes;
}
constexpr std::array<std::uint8_t, 256> kCodes = MakeCodes();

constexpr std::uint64_t CellsOfOrder(int k) {
  return std::uint64_t{1} << (2 * (k + 1));
}

// Orders [first, last] counted in one pass; for an order too large for the table, one of `slices`
// equal parts of its cells, chosen by the oldest bases.
struct Pass {
  int first = 0, last = 0;
  std::uint64_t slice = 0, slices = 1;
};

std::vector<Pass> PlanPasses(int max_order, std::uint64_t table_cells) {
  std::vector<Pass> passes;
  Pass pass;
  std::uint64_t cells = 0;
  for (int k = 0; k <= max_order; ++k) {
    if (k > 0 && cells + CellsOfOrder(k) > table_cells) {
      passes.push_back(pass);
      pass.first = k;
      cells = 0;
    }
    pass.last = k;
    cells += CellsOfOrder(k);
    pass.slices = std::max<std::uint64_t>(1, CellsOfOrder(k) / table_cells);
    for (pass.slice = 0; pass.slice + 1 < pass.slices; ++pass.slice) passes.push_back(pass);
  }
  passes.push_back(pass);
  return passes;
}

// Counts of (k+1)-mers of the forward strand; those of the other strand are read off it by
// complement.
class CountTable {
 public:
  // `counts` lends the memory, reused from pass to pass.
  CountTable(const Pass& pass, std::vector<std::uint32_t>& counts) : pass_(pass), counts_(counts) {
    std::uint64_t cells = 0;
    for (int k = pass.first; k <= pass.last; ++k) {
      offsets_[k] = cells;
      cells += CellsOfOrder(k) / pass.slices;
    }
    begin_ = pass.slice * cells;
    cells_ = cells;
    counts_.resize(cells);
    std::memset(counts_.data(), 0, cells * sizeof(std::uint32_t));
  }

  void Count(int k, std::uint64_t word) {
    if (!Holds(word)) return;
    if (++counts_[offsets_[k] + (word - begin_)] == 0) [[unlikely]] {
      CISTRON_THROW(kUnsupported, "markov: a word of {} bases occurs 2^32 times or more", k + 1);
    }
  }
  // 0 for words of other slices: sums over all passes are complete.
  std::uint64_t operator()(int k, std::uint64_t word) const {
    return Holds(word) ? counts_[offsets_[k] + (word - begin_)] : 0;
  }

 private:
  bool Holds(std::uint64_t word) const {
    return pass_.slices == 1 || (word >= begin_ && word - begin_ < cells_);
  }

  Pass pass_;
  std::array<std::uint64_t, kMaxOrder + 1> offsets_{};
  std::uint64_t begin_ = 0, cells_ = 0;
  std::vector<std::uint32_t>& counts_;
};

// Follows a sequence of codes: the last 32 bases, how many of them are known, and their reverse
// complement.
class Window {
 public:
  void Reset() { known_ = 0; }
  void Push(std::uint8_t code) {
    if (code == kBreak) {
      known_ = 0;
      return;
    }
    forward_ = forward_ << 2 | code;
    reverse_ = reverse_ >> 2 | static_cast<std::uint64_t>(3 - code) << 62;
    known_ = std::min(known_ + 1, 32);
  }
  // Known bases up to and including the last one pushed.
  int known() const { return known_; }
  // The last k + 1 bases, newest in the lowest bits.
  std::uint64_t Word(int k) const { return forward_ & (CellsOfOrder(k) - 1); }
  // Their reverse complement: its newest base is the complement of the oldest.
  std::uint64_t ReverseWord(int k) const { return reverse_ >> (64 - 2 * (k + 1)); }

 private:
  std::uint64_t forward_ = 0, reverse_ = 0;
  int known_ = 0;
};

std::int64_t CountPart(const BaseSource& train, const Pass& pass, CountTable& table) {
  Window window;
  std::int64_t bases = 0;
  train([&](std::string_view stretch, bool continues) {
    if (!continues) window.Reset();
    for (const char letter : stretch) {
      window.Push(kCodes[static_cast<unsigned char>(letter)]);
      bases += window.known() > 0;
      const int last = std::min(pass.last, window.known() - 1);
      for (int k = pass.first; k <= last; ++k) table.Count(k, window.Word(k));
    }
  });
  return bases;
}

// n(c, x) and n(c) of every held-out position at one order.
struct Counts {
  std::vector<std::uint64_t> word, context;
  void Assign(std::size_t n) {
    word.assign(n, 0);
    context.assign(n, 0);
  }
};

struct HeldOut {
  std::vector<std::uint8_t> codes;  // kBreak between stretches
  std::vector<std::uint8_t>
      known;  // bases of context, at most kMaxOrder; only for scored positions
  std::int64_t scored = 0;
};

HeldOut ReadHeldOut(const BaseSource& source) {
  HeldOut heldout;
  Window window;
  source([&](std::string_view stretch, bool continues) {
    if (!continues) {
      window.Reset();
      heldout.codes.push_back(kBreak);
    }
    for (const char letter : stretch) {
      heldout.codes.push_back(kCodes[static_cast<unsigned char>(letter)]);
      window.Push(heldout.codes.back());
      if (window.known() == 0) continue;
      heldout.known.push_back(static_cast<std::uint8_t>(std::min(window.known() - 1, kMaxOrder)));
    }
  });
  heldout.scored = static_cast<std::int64_t>(heldout.known.size());
  return heldout;
}

// Adds what `table` knows of order k to the counts of the held-out positions.
void Gather(const HeldOut& heldout, const CountTable& table, int k, Counts& forward,
            Counts& reverse) {
  Window window;
  std::size_t i = 0;
  for (const std::uint8_t code : heldout.codes) {
    window.Push(code);
    if (window.known() == 0) continue;
    if (window.known() > k) {
      const std::uint64_t word = window.Word(k), reversed = window.ReverseWord(k);
      forward.word[i] += table(k, word);
      reverse.word[i] += table(k, reversed);
      // The other next bases: lowest base of the word, highest base (complemented) of the reversed
      // one.
      const std::uint64_t context = word & ~std::uint64_t{3};
      const std::uint64_t rest = reversed & (CellsOfOrder(k) / 4 - 1);
      for (std::uint64_t x = 0; x < 4; ++x) {
        forward.context[i] += table(k, context | x);
        reverse.context[i] += table(k, x << (2 * k) | rest);
      }
    }
    ++i;
  }
}

// Scores of one kind of model, order after order.
class Scorer {
 public:
  explicit Scorer(std::size_t positions) : probability_(positions, 0.25) {}

  // Mean bits over all positions; positions with less context than k keep the probability of the
  // order below.
  double Evaluate(const HeldOut& heldout, int k,
                  const std::function<double(std::size_t)>& p) const {
    double nats = 0;
    for (std::size_t i = 0; i < probability_.size(); ++i) {
      nats -= std::log(heldout.known[i] >= k ? p(i) : probability_[i]);
    }
    return nats / std::log(2.0) / static_cast<double>(probability_.size());
  }
  void Keep(const HeldOut& heldout, int k, const std::function<double(std::size_t)>& p) {
    for (std::size_t i = 0; i < probability_.size(); ++i) {
      if (heldout.known[i] >= k) probability_[i] = p(i);
    }
  }
  // Of the order kept last.
  double probability(std::size_t i) const { return probability_[i]; }

 private:
  std::vector<double> probability_;
};

void CheckOptions(const MarkovOptions& options) {
  CISTRON_CHECK(options.max_order >= 0 && options.max_order <= kMaxOrder,
                "markov: max_order {} is not in 0…{}", options.max_order, kMaxOrder);
  CISTRON_CHECK(options.table_bytes >= 16, "markov: table_bytes {} is below 16",
                options.table_bytes);
  CISTRON_CHECK(options.add > 0 && std::isfinite(options.add),
                "markov: add {} is not a positive number", options.add);
  CISTRON_CHECK(!options.priors.empty(), "markov: the list of priors is empty");
  for (const double prior : options.priors) {
    CISTRON_CHECK(prior > 0 && std::isfinite(prior), "markov: prior {} is not a positive number",
                  prior);
  }
}

// Scores order k of all three kinds from its counts.
class BaselineScorer {
 public:
  BaselineScorer(const HeldOut& heldout, const MarkovOptions& options)
      : heldout_(heldout),
        options_(options),
        forward_(heldout.known.size()),
        both_(heldout.known.size()),
        interpolated_(heldout.known.size()) {}

  void Score(int k, const Counts& forward, const Counts& reverse,
             std::vector<MarkovScore>& scores) {
    const double add = options_.add;
    const auto one = [&](std::size_t i) {
      return (static_cast<double>(forward.word[i]) + add) /
             (static_cast<double>(forward.context[i]) + 4 * add);
    };
    const auto word = [&](std::size_t i) {
      return static_cast<double>(forward.word[i] + reverse.word[i]);
    };
    const auto context = [&](std::size_t i) {
      return static_cast<double>(forward.context[i] + reverse.context[i]);
    };
    const auto two = [&](std::size_t i) { return (word(i) + add) / (context(i) + 4 * add); };

    scores.push_back({k, false, MarkovSmoothing::kAdd, 0, forward_.Evaluate(heldout_, k, one)});
    forward_.Keep(heldout_, k, one);
    scores.push_back({k, true, MarkovSmoothing::kAdd, 0, both_.Evaluate(heldout_, k, two)});
    both_.Keep(heldout_, k, two);

    MarkovScore best{k, true, MarkovSmoothing::kInterpolated, 0,
                     std::numeric_limits<double>::infinity()};
    const auto mixed = [&](double prior) {
      return [&, prior](std::size_t i) {
        return (word(i) + prior * interpolated_.probability(i)) / (context(i) + prior);
      };
    };
    for (const double prior : options_.priors) {
      const double bits = interpolated_.Evaluate(heldout_, k, mixed(prior));
      if (bits < best.bits_per_base) {
        best.prior = prior;
        best.bits_per_base = bits;
      }
    }
    interpolated_.Keep(heldout_, k, mixed(best.prior));
    scores.push_back(best);
  }

 private:
  const HeldOut& heldout_;
  const MarkovOptions& options_;
  Scorer forward_, both_, interpolated_;
};

}  // namespace

const MarkovScore& MarkovBaseline::Best() const {
  CISTRON_CHECK(!scores.empty(), "markov: a baseline without scores has no best one");
  return *std::min_element(
      scores.begin(), scores.end(),
      [](const MarkovScore& a, const MarkovScore& b) { return a.bits_per_base < b.bits_per_base; });
}

MarkovBaseline FitMarkovBaseline(const BaseSource& train, const BaseSource& heldout_source,
                                 const MarkovOptions& options) {
  CheckOptions(options);
  const HeldOut heldout = ReadHeldOut(heldout_source);
  if (heldout.scored == 0) {
    CISTRON_THROW(kBadInput, "markov: the held-out part holds no A, C, G or T to score");
  }
  MarkovBaseline baseline;
  baseline.heldout_bases = heldout.scored;

  BaselineScorer scorer(heldout, options);
  Counts forward, reverse;
  std::vector<std::uint32_t> table_memory;
  // Slices are cut at whole bases: a power of four.
  std::uint64_t table_cells = 4;
  while (table_cells * 4 * sizeof(std::uint32_t) <=
         static_cast<std::uint64_t>(options.table_bytes)) {
    table_cells *= 4;
  }
  for (const Pass& pass : PlanPasses(options.max_order, table_cells)) {
    CountTable table(pass, table_memory);
    baseline.train_bases = CountPart(train, pass, table);
    if (baseline.train_bases == 0) {
      CISTRON_THROW(kBadInput, "markov: the training part holds no A, C, G or T to count");
    }
    for (int k = pass.first; k <= pass.last; ++k) {
      if (pass.slice == 0) {
        forward.Assign(heldout.known.size());
        reverse.Assign(heldout.known.size());
      }
      Gather(heldout, table, k, forward, reverse);
      if (pass.slice + 1 == pass.slices) scorer.Score(k, forward, reverse, baseline.scores);
    }
  }
  return baseline;
}

BaseSource FromString(std::string_view bases) {
  return [bases](const BaseVisitor& visit) { visit(bases, false); };
}

std::string Describe(const MarkovScore& score) {
  const char* strands = score.both_strands ? "both strands" : "forward strand";
  if (score.smoothing == MarkovSmoothing::kAdd) {
    return fmt::format("{}, add-constant, order {}", strands, score.order);
  }
  return fmt::format("{}, interpolated, order {} (prior {:g})", strands, score.order, score.prior);
}

std::string FormatTable(const MarkovBaseline& baseline) {
  const MarkovScore& best = baseline.Best();
  struct Column {
    const char* title;
    bool both_strands;
    MarkovSmoothing smoothing;
  };
  constexpr Column kColumns[] = {{"forward strand", false, MarkovSmoothing::kAdd},
                                 {"both strands", true, MarkovSmoothing::kAdd},
                                 {"both, interpolated", true, MarkovSmoothing::kInterpolated}};
  std::string text = fmt::format(
      "Markov models counted on {} bases, bits per base on {} held-out bases\n"
      "{:>5}  {:>15}  {:>15}  {:>19}  {:>6}\n",
      baseline.train_bases, baseline.heldout_bases, "order", kColumns[0].title, kColumns[1].title,
      kColumns[2].title, "prior");
  int max_order = -1;
  for (const MarkovScore& score : baseline.scores) max_order = std::max(max_order, score.order);
  for (int k = 0; k <= max_order; ++k) {
    text += fmt::format("{:>5}", k);
    double prior = 0;
    for (std::size_t c = 0; c < std::size(kColumns); ++c) {
      const auto found = std::find_if(
          baseline.scores.begin(), baseline.scores.end(), [&](const MarkovScore& score) {
            return score.order == k && score.both_strands == kColumns[c].both_strands &&
                   score.smoothing == kColumns[c].smoothing;
          });
      const std::string cell =
          found == baseline.scores.end()
              ? "-"
              : fmt::format("{:.4f}{}", found->bits_per_base, &*found == &best ? "*" : " ");
      text += fmt::format("  {:>{}}", cell, c + 1 == std::size(kColumns) ? 19 : 15);
      if (found != baseline.scores.end()) prior = std::max(prior, found->prior);
    }
    text += prior > 0 ? fmt::format("  {:>6g}\n", prior) : "\n";
  }
  text += fmt::format(
      "* best: {}\n  (the prior of each order is the one that scores best on the held-out part, "
      "which favours "
      "these models)\n",
      Describe(best));
  return text;
}

}  // namespace cistron::train
