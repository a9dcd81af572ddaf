#include "cistron/train/prefetcher.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "cistron/base/error.h"

namespace cistron::train {

struct Prefetcher::State {
  std::unique_ptr<data::TrainingStream> stream;
  std::int64_t steps;
  std::size_t depth;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<FetchedBatch> ready;
  std::exception_ptr error;
  bool stop = false;
  std::thread thread;

  void Read() {
    for (std::int64_t i = 0; i < steps; ++i) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return stop || ready.size() < depth; });
        if (stop) return;
      }
      try {
        FetchedBatch fetched;
        fetched.batch = stream->Next();
        fetched.state_after = stream->state();
        const std::lock_guard lock(mutex);
        ready.push_back(std::move(fetched));
      } catch (...) {
        const std::lock_guard lock(mutex);
        error = std::current_exception();
        changed.notify_all();
        return;
      }
      changed.notify_all();
    }
  }
};

Prefetcher::Prefetcher(std::unique_ptr<data::TrainingStream> stream, std::int64_t steps, int depth)
    : state_(std::make_unique<State>()) {
  state_->stream = std::move(stream);
  state_->steps = steps;
  state_->depth = static_cast<std::size_t>(depth);
  state_->thread = std::thread([state = state_.get()] { state->Read(); });
}

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
  state_->changed.wait(lock, [this] { return state_->error || !state_->ready.empty(); });
  if (state_->ready.empty()) std::rethrow_exception(state_->error);
  FetchedBatch fetched = std::move(state_->ready.front());
  state_->ready.pop_front();
  state_->changed.notify_all();
  return fetched;
}

}  // namespace cistron::train
