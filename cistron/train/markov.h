// Order-k Markov models of DNA: what a DNA model has to beat.
//
// Fitted by counting on the training part, scored in bits per base on the held-out part, for every
// order k from 0 up, until higher orders gain nothing. With n(c, x) the times that base x follows
// the k bases c, and n(c) = Σ_x n(c, x):
//
//   add            p_k(x | c) = (n(c, x) + a) / (n(c) + 4a)                       a = 1/4
//   interpolated   p_k(x | c) = (n(c, x) + α_k · p_{k-1}(x | c')) / (n(c) + α_k)  c' = c without
//   its oldest base
//                  p_{-1} = 1/4
//
// "Both strands" counts the reverse complement of the training part too. α_k is, order after order,
// the prior of a short list that scores best *on the held-out part*: that favours the baseline,
// never the model beside it.
//
// Every A, C, G, T (or U) of the held-out part is scored, forward strand, sums in fp64. A base with
// fewer than k known bases before it (start of a held-out region, after another letter) is scored
// with the longest context it has. Nothing is carried over from the training part into the first
// contexts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cistron::train {

// Receives one stretch of a part; `continues`: it follows the one before without a gap.
using BaseVisitor = std::function<void(std::string_view bases, bool continues)>;
// Hands out a part from its start to its end; called once for every pass.
using BaseSource = std::function<void(const BaseVisitor&)>;

enum class MarkovSmoothing { kAdd, kInterpolated };

inline constexpr int kMaxMarkovOrder = 31;
// A gain that four decimals do not show.
inline constexpr double kFlatBits = 5e-5;

struct MarkovOptions {
  // The largest order, 0 … kMaxMarkovOrder. Absent: orders are added until the last three together
  // gain less than kFlatBits over the best before them, but not before they are three longer than
  // the words that the training part can hold all of (log4 of its bases, both strands): repeats,
  // which high orders live on, show only beyond that.
  std::optional<int> max_order;
  double add = 0.25;
  std::vector<double> priors = {4, 16, 64, 256};  // candidates for α_k
  // Memory of the counts of one pass over the training part; at least one order is counted.
  std::int64_t table_bytes = std::int64_t{256} << 20;
};

struct MarkovScore {
  int order = 0;
  bool both_strands = true;
  MarkovSmoothing smoothing = MarkovSmoothing::kAdd;
  double prior = 0;          // α_k; 0 for kAdd
  double bits_per_base = 0;  // on the held-out part
};

struct MarkovBaseline {
  std::int64_t train_bases = 0;    // A, C, G, T of one strand
  std::int64_t heldout_bases = 0;  // scored
  std::vector<MarkovScore> scores;

  // The lowest bits per base; of models closer than kFlatBits, the lowest order. Throws
  // kInvalidArgument when there are no scores.
  const MarkovScore& Best() const;
  // The largest order fitted; -1 when there are no scores.
  int MaxOrder() const;
};

// Counts over `train`, scores over `heldout`. Only contexts that the held-out part holds are
// counted, so memory does not grow with the order: about 60 bytes a held-out base, and the larger
// of options.table_bytes and 50 bytes a held-out base. Time: a few passes over `train`, two
// look-ups a base for every order whose contexts the held-out part mostly holds. Throws
// kInvalidArgument for bad options, kBadInput when a part holds no base.
MarkovBaseline FitMarkovBaseline(const BaseSource& train, const BaseSource& heldout,
                                 const MarkovOptions& options = {});

// A part that is already in memory.
BaseSource FromString(std::string_view bases);

// "both strands, interpolated, order 13 (prior 16)"
std::string Describe(const MarkovScore& score);
// "every Markov model fitted (orders 0…21)"
std::string DescribeAll(const MarkovBaseline& baseline);
// A sentence when the best order is the largest fitted, so that a higher one may be better; else
// empty.
std::string OrderWarning(const MarkovBaseline& baseline);
// A table for people: one line an order, one column a kind of model, the best marked.
std::string FormatTable(const MarkovBaseline& baseline);

// `baseline.json` of a run directory. Reading throws kNotFound or kBadInput with the path and
// field.
void WriteBaseline(const std::filesystem::path& path, const MarkovBaseline& baseline);
MarkovBaseline ReadBaseline(const std::filesystem::path& path);

}  // namespace cistron::train
