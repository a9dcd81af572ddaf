// Markov models fitted and scored on the split of a corpus.
#pragma once

#include "cistron/data/corpus.h"
#include "cistron/train/markov.h"

namespace cistron::train {

MarkovBaseline FitMarkovBaseline(const data::Corpus& corpus, const MarkovOptions& options = {});

}  // namespace cistron::train
