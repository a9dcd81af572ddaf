// Makes the next items while the present one is used.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::data {

// One thread that reads ahead. Items come in the order in which they were read.
template <class T>
class ReadAhead {
 public:
  // Calls `read` at most `steps` times, at most `depth` ≥ 1 results ahead of Next; one call at a
  // time, all from a thread of its own. `who` begins messages.
  ReadAhead(std::function<T()> read, std::int64_t steps, int depth = 2,
            std::string_view who = "ReadAhead")
      : read_(std::move(read)), steps_(steps), depth_(static_cast<std::size_t>(depth)), who_(who) {
    CISTRON_CHECK(depth >= 1, "{}: {} batches ahead", who, depth);
    thread_ = std::thread([this] { Run(); });
  }
  // Waits for a read that is under way, and no longer.
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The next item; waits for it. What `read` threw is thrown here, after the items before it, at
  // every call. Throws kInvalidArgument when all `steps` items were taken.
  T Next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_ || !ready_.empty(); });
    if (ready_.empty()) {
      if (error_) std::rethrow_exception(error_);
      CISTRON_THROW(kInvalidArgument, "{}: all {} batches were taken", who_, steps_);
    }
    T item = std::move(ready_.front());
    ready_.pop_front();
    lock.unlock();
    changed_.notify_all();
    return item;
  }

 private:
  void Run() {
    std::exception_ptr thrown;
    try {
      for (std::int64_t i = 0; i < steps_; ++i) {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [this] { return stop_ || ready_.size() < depth_; });
          if (stop_) return;
        }
        T item = read_();
        {
          const std::lock_guard lock(mutex_);
          ready_.push_back(std::move(item));
        }
        changed_.notify_all();
      }
    } catch (...) {
      thrown = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      error_ = thrown;
      done_ = true;
    }
    changed_.notify_all();
  }

  std::function<T()> read_;
  std::int64_t steps_;
  std::size_t depth_;
  std::string who_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> ready_;
  std::exception_ptr error_;
  bool done_ = false;  // nothing more will be ready
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cistron::data
