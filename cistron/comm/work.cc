#include "cistron/comm/work.h"

#include <string>

namespace cistron::comm {

// The error is kept as a value: an exception_ptr shared by two threads has its reference count
// inside the runtime library, where ThreadSanitizer does not see it.
class WorkQueue::Item final : public Work::State {
 public:
  explicit Item(std::function<void()> function) : function_(std::move(function)) {}

  void Run() {
    std::optional<Error> error;
    try {
      function_();
    } catch (const Error& e) {
      error = e;
    } catch (const std::exception& e) {
      error = Error(ErrorCode::kInternal, e.what());
    }
    function_ = nullptr;  // lets go of the tensors
    std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    changed_.notify_all();
  }
  void Wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (error_) throw Error(*error_);
  }
  bool Done() override {
    std::lock_guard lock(mutex_);
    return done_;
  }

 private:
  std::function<void()> function_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::optional<Error> error_;
};

WorkQueue::~WorkQueue() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Work WorkQueue::Push(std::function<void()> function) {
  auto item = std::make_shared<Item>(std::move(function));
  {
    std::lock_guard lock(mutex_);
    items_.push_back(item);
    if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  }
  changed_.notify_all();
  return Work(std::move(item));
}

void WorkQueue::Drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty(); });
}

void WorkQueue::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !items_.empty(); });
    if (items_.empty()) return;
    const std::shared_ptr<Item> item = items_.front();
    lock.unlock();
    item->Run();
    lock.lock();
    items_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace cistron::comm
