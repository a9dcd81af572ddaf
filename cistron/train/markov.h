// Order-k Markov models of DNA: what a DNA model has to beat.
//
// Fitted by counting on the training part, scored in bits per base on the held-out part, for every
// order k from 0 to max_order in one go. With n(c, x) the times that base x follows the k bases c,
// and n(c) = Σ_x n(c, x):
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
#include <string>
#include <string_view>
#include <vector>

namespace cistron::train {

// Receives one stretch of a part; `continues`: it follows the one before without a gap.
using BaseVisitor = std::function<void(std::string_view bases, bool continues)>;
// Hands out a part from its start to its end; called once for every pass.
using BaseSource = std::function<void(const BaseVisitor&)>;

enum class MarkovSmoothing { kAdd, kInterpolated };

struct MarkovOptions {
  int max_order = 13;  // 0 … 15
  double add = 0.25;
  std::vector<double> priors = {4, 16, 64, 256};  // candidates for α_k
  // Memory of the count table; orders whose counts need more are counted in several passes.
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

  // The lowest bits per base. Throws kInvalidArgument when there are no scores.
  const MarkovScore& Best() const;
};

// Counts over `train`, scores over `heldout`. Memory: options.table_bytes and about 60 bytes a
// held-out base; time, with the default table: a pass over `train` for all orders up to 11, one for
// order 12, and 4^(k-12) for each order k above. Throws kInvalidArgument for bad options, kBadInput
// when a part holds no base.
MarkovBaseline FitMarkovBaseline(const BaseSource& train, const BaseSource& heldout,
                                 const MarkovOptions& options = {});

// A part that is already in memory.
BaseSource FromString(std::string_view bases);

// "both strands, interpolated, order 13 (prior 16)"
std::string Describe(const MarkovScore& score);
// A table for people: one line an order, one column a kind of model, the best marked.
std::string FormatTable(const MarkovBaseline& baseline);

// `baseline.json` of a run directory. Reading throws kNotFound or kBadInput with the path and
// field.
void WriteBaseline(const std::filesystem::path& path, const MarkovBaseline& baseline);
MarkovBaseline ReadBaseline(const std::filesystem::path& path);

}  // namespace cistron::train
