#include "cistron/data/prefetcher.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::data {

struct Prefetcher::State {
  std::function<FetchedBatch()> read;
  std::int64_t steps;
  std::size_t depth;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<FetchedBatch> ready;
  std::exception_ptr error;
  bool done = false;  // nothing more will be ready
  bool stop = false;
  std::thread thread;

  void ReadAhead() {
    std::exception_ptr thrown;
    try {
      for (std::int64_t i = 0; i < steps; ++i) {
        {
          std::unique_lock lock(mutex);
          changed.wait(lock, [this] { return stop || ready.size() < depth; });
          if (stop) return;
        }
        FetchedBatch fetched = read();
        {
          const std::lock_guard lock(mutex);
          ready.push_back(std::move(fetched));
        }
        changed.notify_all();
      }
    } catch (...) {
      thrown = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex);
      error = thrown;
      done = true;
    }
    changed.notify_all();
  }
};

Prefetcher::Prefetcher(std::function<FetchedBatch()> read, std::int64_t steps, int depth)
    : state_(std::make_unique<State>()) {
  CISTRON_CHECK(depth >= 1, "Prefetcher: {} batches ahead", depth);
  state_->read = std::move(read);
  state_->steps = steps;
  state_->depth = static_cast<std::size_t>(depth);
  state_->thread = std::thread([state = state_.get()] { state->ReadAhead(); });
}

Prefetcher::Prefetcher(std::unique_ptr<TrainingStream> stream, std::int64_t steps, int depth)
    : Prefetcher(
          [stream = std::shared_ptr<TrainingStream>(std::move(stream))] {
            FetchedBatch fetched;
            fetched.batch = stream->Next();
            fetched.state_after = stream->state();
            return fetched;
          },
          steps, depth) {}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_all();
  state_->thread.join();
}

FetchedBatch Prefetcher::Next() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done || !state_->ready.empty(); });
  if (state_->ready.empty()) {
    if (state_->error) std::rethrow_exception(state_->error);
    CISTRON_THROW(kInvalidArgument, "Prefetcher: all {} batches were taken", state_->steps);
  }
  FetchedBatch fetched = std::move(state_->ready.front());
  state_->ready.pop_front();
  lock.unlock();
  state_->changed.notify_all();
  return fetched;
}

}  // namespace cistron::data
