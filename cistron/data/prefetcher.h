// Reads the next batches while the present one trains.
#pragma once

#include <functional>
#include <memory>

#include "cistron/data/read_ahead.h"
#include "cistron/data/stream.h"

namespace cistron::data {

// A batch and the state of the stream after it.
struct FetchedBatch {
  GlobalBatch batch;
  StreamState state_after;
};

// A stream read by a thread of its own (read_ahead.h).
class Prefetcher {
 public:
  // As ReadAhead.
  Prefetcher(std::function<FetchedBatch()> read, std::int64_t steps, int depth = 2);
  // The batches of a stream.
  Prefetcher(std::unique_ptr<TrainingStream> stream, std::int64_t steps, int depth = 2);

  FetchedBatch Next() { return batches_.Next(); }

 private:
  ReadAhead<FetchedBatch> batches_;
};

}  // namespace cistron::data
