#include "cistron/train/markov.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"

namespace cistron::train {
namespace {

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

constexpr std::uint64_t Mask(int k) {
  return (std::uint64_t{1} << (2 * k)) - 1;
}

// Follows a sequence of codes: the last 32 bases, how many of them are known, and their reverse
// complement.
class Window {
 public:
  static constexpr int kBases = 32;
  void Reset() { known_ = 0; }
  void Push(std::uint8_t code) {
    if (code == kBreak) {
      known_ = 0;
      return;
    }
    forward_ = forward_ << 2 | code;
    reverse_ = reverse_ >> 2 | static_cast<std::uint64_t>(3 - code) << 62;
    known_ = std::min(known_ + 1, kBases);
  }
  // Known bases up to and including the last one pushed.
  int known() const { return known_; }
  // The last base, and those before it from the lowest bits up.
  std::uint64_t Forward() const { return forward_; }
  // Of the other strand, the base `back` bases before the last one, and those before it.
  std::uint64_t Reverse(int back) const { return reverse_ >> (62 - 2 * back); }

 private:
  std::uint64_t forward_ = 0, reverse_ = 0;
  int known_ = 0;
};

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
  // Bases of context, at most kMaxMarkovOrder; only for scored positions.
  std::vector<std::uint8_t> known;
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
      heldout.known.push_back(
          static_cast<std::uint8_t>(std::min(window.known() - 1, kMaxMarkovOrder)));
    }
  });
  heldout.scored = static_cast<std::int64_t>(heldout.known.size());
  return heldout;
}

// Calls `visit(i, context, next)` for every scored position that has k bases of context.
template <class F>
void ForEachContext(const HeldOut& heldout, int k, F&& visit) {
  Window window;
  std::size_t i = 0;
  for (const std::uint8_t code : heldout.codes) {
    window.Push(code);
    if (window.known() == 0) continue;
    if (window.known() > k) {
      visit(i, window.Forward() >> 2 & Mask(k), static_cast<int>(window.Forward() & 3));
    }
    ++i;
  }
}

// How often each base follows each of the held-out part's contexts of k bases in the training part,
// on either strand.
class ContextTable {
 public:
  ContextTable(const HeldOut& heldout, int k)
      : order_(k), direct_(IsDirect(heldout, k)), counts_(Cells(heldout, k)) {
    if (direct_) return;
    keys_.assign(counts_.size(), kEmpty);
    ForEachContext(heldout, k, [&](std::size_t, std::uint64_t context, int) {
      keys_[Find(context)] = context;
    });
  }
  static std::int64_t Bytes(const HeldOut& heldout, int k) {
    const std::size_t cell = sizeof(Cell) + (IsDirect(heldout, k) ? 0 : sizeof(std::uint64_t));
    return static_cast<std::int64_t>(Cells(heldout, k) * cell);
  }

  int order() const { return order_; }
  // False when the held-out part does not hold the context.
  bool Count(std::uint64_t context, std::size_t next, std::size_t strand) {
    const std::size_t at = Find(context);
    if (!direct_ && keys_[at] == kEmpty) return false;
    if (++counts_[at][4 * strand + next] == 0) [[unlikely]] {
      CISTRON_THROW(kUnsupported, "markov: a word of {} bases occurs 2^32 times or more",
                    order_ + 1);
    }
    return true;
  }
  // Of every position with a whole context.
  void Gather(const HeldOut& heldout, Counts& forward, Counts& reverse) const {
    ForEachContext(heldout, order_, [&](std::size_t i, std::uint64_t context, int next) {
      const Cell& cell = counts_[Find(context)];
      const auto x = static_cast<std::size_t>(next);
      forward.word[i] = cell[x];
      reverse.word[i] = cell[4 + x];
      for (std::size_t other = 0; other < 4; ++other) {
        forward.context[i] += cell[other];
        reverse.context[i] += cell[4 + other];
      }
    });
  }

 private:
  using Cell = std::array<std::uint32_t, 8>;  // four bases of the forward strand, four of the other
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};  // no context: those have 62 bits

  // Four fifths of a hash table are used at most; where all contexts fit, they are the index.
  static std::size_t HashCells(const HeldOut& heldout) { return heldout.known.size() * 5 / 4 + 1; }
  static bool IsDirect(const HeldOut& heldout, int k) { return Mask(k) < HashCells(heldout); }
  static std::size_t Cells(const HeldOut& heldout, int k) {
    return IsDirect(heldout, k) ? Mask(k) + 1 : HashCells(heldout);
  }
  // Where the context is, or would be put.
  std::size_t Find(std::uint64_t context) const {
    if (direct_) return context;
    std::size_t at = static_cast<std::size_t>(
        static_cast<unsigned __int128>(Mix64(context)) * keys_.size() >> 64);
    while (keys_[at] != context && keys_[at] != kEmpty) at = at + 1 == keys_.size() ? 0 : at + 1;
    return at;
  }

  int order_;
  bool direct_;
  std::vector<Cell> counts_;
  std::vector<std::uint64_t> keys_;
};

// One base of a strand with the `available` bases before it, from the lowest bits up. A context
// that the held-out part lacks is in no longer one, so most bases end after a few orders.
void CountBase(std::uint64_t bases, int available, std::size_t strand,
               std::vector<ContextTable>& tables) {
  for (ContextTable& table : tables) {
    const int k = table.order();
    if (k > available || !table.Count(bases >> 2 & Mask(k), bases & 3, strand)) return;
  }
}

// Counts the training part into the tables, of ascending orders; returns its bases.
std::int64_t CountPart(const BaseSource& train, std::vector<ContextTable>& tables) {
  Window window;
  std::int64_t bases = 0;
  // The other strand's contexts lie ahead, so its bases are counted when they have been seen whole:
  // one a step, the last ones where a stretch ends.
  const auto end_stretch = [&] {
    for (int back = std::min(window.known(), Window::kBases - 1) - 1; back >= 0; --back) {
      CountBase(window.Reverse(back), back, 1, tables);
    }
    window.Reset();
  };
  train([&](std::string_view stretch, bool continues) {
    if (!continues) end_stretch();
    for (const char letter : stretch) {
      const std::uint8_t code = kCodes[static_cast<unsigned char>(letter)];
      if (code == kBreak) {
        end_stretch();
        continue;
      }
      window.Push(code);
      ++bases;
      CountBase(window.Forward(), window.known() - 1, 0, tables);
      if (window.known() == Window::kBases) {
        CountBase(window.Reverse(Window::kBases - 1), Window::kBases - 1, 1, tables);
      }
    }
  });
  end_stretch();
  return bases;
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
  if (options.max_order) {
    CISTRON_CHECK(*options.max_order >= 0 && *options.max_order <= kMaxMarkovOrder,
                  "markov: max_order {} is not in 0…{}", *options.max_order, kMaxMarkovOrder);
  }
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

double LowestUpTo(const std::vector<MarkovScore>& scores, int order) {
  double lowest = std::numeric_limits<double>::infinity();
  for (const MarkovScore& score : scores) {
    if (score.order <= order) lowest = std::min(lowest, score.bits_per_base);
  }
  return lowest;
}

// Whether orders above k promise nothing (MarkovOptions::max_order).
bool IsFlat(const MarkovBaseline& baseline, int k) {
  constexpr int kOrders = 3;
  const double words = std::log(2.0 * static_cast<double>(baseline.train_bases)) / std::log(4.0);
  if (k < words + kOrders) return false;
  return LowestUpTo(baseline.scores, k - kOrders) - LowestUpTo(baseline.scores, k) < kFlatBits;
}

}  // namespace

const MarkovScore& MarkovBaseline::Best() const {
  CISTRON_CHECK(!scores.empty(), "markov: a baseline without scores has no best one");
  const double lowest = LowestUpTo(scores, MaxOrder());
  const MarkovScore* best = nullptr;
  for (const MarkovScore& score : scores) {
    if (score.bits_per_base >= lowest + kFlatBits) continue;
    const bool better = best == nullptr || score.order < best->order ||
                        (score.order == best->order && score.bits_per_base < best->bits_per_base);
    if (better) best = &score;
  }
  return *best;
}

int MarkovBaseline::MaxOrder() const {
  int order = -1;
  for (const MarkovScore& score : scores) order = std::max(order, score.order);
  return order;
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
  const int last = options.max_order.value_or(kMaxMarkovOrder);
  for (int k = 0; k <= last;) {
    std::vector<ContextTable> tables;
    std::int64_t bytes = 0;
    for (; k <= last &&
           (tables.empty() || bytes + ContextTable::Bytes(heldout, k) <= options.table_bytes);
         ++k) {
      bytes += ContextTable::Bytes(heldout, k);
      tables.emplace_back(heldout, k);
    }
    baseline.train_bases = CountPart(train, tables);
    if (baseline.train_bases == 0) {
      CISTRON_THROW(kBadInput, "markov: the training part holds no A, C, G or T to count");
    }
    for (const ContextTable& table : tables) {
      forward.Assign(heldout.known.size());
      reverse.Assign(heldout.known.size());
      table.Gather(heldout, forward, reverse);
      scorer.Score(table.order(), forward, reverse, baseline.scores);
      if (!options.max_order && IsFlat(baseline, table.order())) return baseline;
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

std::string DescribeAll(const MarkovBaseline& baseline) {
  return fmt::format("every Markov model fitted (orders 0…{})", baseline.MaxOrder());
}

std::string OrderWarning(const MarkovBaseline& baseline) {
  const MarkovScore& best = baseline.Best();
  if (best.order == 0 || best.order < baseline.MaxOrder()) return {};
  return fmt::format("the best order, {}, is the largest fitted: a higher one may be better{}",
                     best.order,
                     best.order < kMaxMarkovOrder
                         ? "; `cistron baseline` without --max-order goes on until none is"
                         : "");
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
  for (int k = 0; k <= baseline.MaxOrder(); ++k) {
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
  if (const std::string warning = OrderWarning(baseline); !warning.empty()) {
    text += fmt::format("warning: {}\n", warning);
  }
  return text;
}

}  // namespace cistron::train
