#include "cistron/train/corpus_baseline.h"

#include <fmt/format.h>

namespace cistron::train {
namespace {

BaseSource SourceOf(const data::Corpus& corpus, data::Part part) {
  return [&corpus, part](const BaseVisitor& visit) {
    corpus.ForEachChunk(part, [&visit](std::string_view bases, bool starts_segment) {
      visit(bases, !starts_segment);
    });
  };
}

}  // namespace

std::string WhyNoMarkovBaseline(data::Alphabet alphabet) {
  if (data::AlphabetSize(alphabet) == 4) return {};
  return fmt::format("Markov models here are of four bases, for dna and rna, not for {}",
                     data::AlphabetName(alphabet));
}

MarkovBaseline FitMarkovBaseline(const data::Corpus& corpus, const MarkovOptions& options) {
  return FitMarkovBaseline(SourceOf(corpus, data::Part::kTrain),
                           SourceOf(corpus, data::Part::kHeldout), options);
}

}  // namespace cistron::train
