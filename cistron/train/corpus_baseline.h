// Markov models fitted and scored on the split of a corpus.
#pragma once

#include <string>

#include "cistron/data/corpus.h"
#include "cistron/train/markov.h"

namespace cistron::train {

// "Markov models here are of four bases, for dna and rna, not for protein"; empty for dna and rna.
std::string WhyNoMarkovBaseline(data::Alphabet alphabet);

MarkovBaseline FitMarkovBaseline(const data::Corpus& corpus, const MarkovOptions& options = {});

}  // namespace cistron::train
