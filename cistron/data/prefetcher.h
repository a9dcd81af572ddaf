// Reads the next batches while the present one trains.
#pragma once

#include <functional>
#include <memory>

#include "cistron/data/stream.h"

namespace cistron::data {

// A batch and the state of the stream after it.
struct FetchedBatch {
  GlobalBatch batch;
  StreamState state_after;
};

// One thread that reads ahead. Batches come in the order in which they were read.
class Prefetcher {
 public:
  // Calls `read` at most `steps` times, at most `depth` ≥ 1 results ahead of Next; one call at a
  // time, all from a thread of its own.
  Prefetcher(std::function<FetchedBatch()> read, std::int64_t steps, int depth = 2);
  // The batches of a stream.
  Prefetcher(std::unique_ptr<TrainingStream> stream, std::int64_t steps, int depth = 2);
  // Waits for a read that is under way, and no longer.
  ~Prefetcher();

  // The next batch; waits for it. What `read` threw is thrown here, after the batches before it, at
  // every call. Throws kInvalidArgument when all `steps` batches were taken.
  FetchedBatch Next();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cistron::data
