#include "cistron/data/prefetcher.h"

#include <utility>

namespace cistron::data {

Prefetcher::Prefetcher(std::function<FetchedBatch()> read, std::int64_t steps, int depth)
    : batches_(std::move(read), steps, depth, "Prefetcher") {}

Prefetcher::Prefetcher(std::unique_ptr<TrainingStream> stream, std::int64_t steps, int depth)
    : Prefetcher(
          [stream = std::shared_ptr<TrainingStream>(std::move(stream))] {
            FetchedBatch fetched;
            fetched.batch = stream->Next();
            fetched.state_after = stream->state();
            return fetched;
          },
          steps, depth) {}

}  // namespace cistron::data
