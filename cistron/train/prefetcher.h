// Reads the next batches while the present one trains.
#pragma once

#include <memory>

#include "cistron/data/stream.h"

namespace cistron::train {

// A batch and the state of the stream after it.
struct FetchedBatch {
  data::GlobalBatch batch;
  data::StreamState state_after;
};

// One thread that calls TrainingStream::Next. What the stream throws is rethrown by Next.
class Prefetcher {
 public:
  // Reads at most `steps` batches, at most `depth` ahead.
  Prefetcher(std::unique_ptr<data::TrainingStream> stream, std::int64_t steps, int depth = 2);
  ~Prefetcher();

  FetchedBatch Next();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cistron::train
