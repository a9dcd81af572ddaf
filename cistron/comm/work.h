// Handles of operations that were started and not waited for.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::comm {

// One operation in flight. Copies refer to the same operation. Dropping the handle does not cancel
// it: the operation keeps its tensors alive and finishes; what it threw is then thrown by the next
// call of its communicator.
class Work {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void Wait() = 0;
    virtual bool Done() = 0;
  };

  Work() = default;  // finished
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Until results may be read and inputs changed. Throws what the operation threw.
  void Wait() const {
    if (state_) state_->Wait();
  }
  // Whether Wait would return, or throw, at once.
  bool Done() const { return !state_ || state_->Done(); }

 private:
  std::shared_ptr<State> state_;
};

// Runs functions one after another in a thread of its own, which starts with the first of them.
// Errors go to the handle of their function; later functions run nonetheless.
class WorkQueue {
 public:
  WorkQueue() = default;
  // Runs what is left.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  Work Push(std::function<void()> function);
  // Until everything that was pushed has run.
  void Drain();

 private:
  class Item;
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Item>> items_;  // the first of them is running
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cistron::comm
