#include "cistron/comm/nccl/watchdog.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cistron/comm/nccl/library.h"
#include "cistron/tensor/cuda/check.h"

namespace cistron::comm::nccl {
namespace {

// How often the threads look: seldom beside operations, often beside the time that a person waits.
constexpr std::chrono::milliseconds kPeriod{50};

// Events that nobody holds.
struct FreeEvents {
  std::mutex mutex;
  std::vector<cudaEvent_t> events;
};
FreeEvents& Free() {
  static FreeEvents& free = *new FreeEvents;  // handles may be in static storage
  return free;
}

}  // namespace

EventHandle::EventHandle() {
  {
    const std::lock_guard lock(Free().mutex);
    if (!Free().events.empty()) {
      event_ = Free().events.back();
      Free().events.pop_back();
      return;
    }
  }
  cuda::Check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}
std::shared_ptr<EventHandle> EventHandle::Recorded(cudaStream_t stream) {
  auto event = std::make_shared<EventHandle>();
  cuda::Check(cudaEventRecord(event->get(), stream), "cudaEventRecord");
  return event;
}
EventHandle::~EventHandle() {
  const std::lock_guard lock(Free().mutex);
  Free().events.push_back(event_);
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (asks_.joinable()) asks_.join();
  if (counts_.joinable()) counts_.join();
}

std::shared_ptr<Watchdog::Subject> Watchdog::Add(std::string who) {
  auto subject = std::make_shared<Subject>(std::move(who));
  const std::lock_guard lock(mutex_);
  subjects_.push_back(subject);
  return subject;
}

void Watchdog::SetComm(Subject& subject, ncclComm_t comm) {
  const std::lock_guard lock(mutex_);
  subject.comm_ = comm;
}

void Watchdog::Begin(Subject& subject, std::string text, std::shared_ptr<EventHandle> reached,
                     std::function<std::string()> why) {
  const std::lock_guard lock(mutex_);
  subject.operations_.push_back(
      {std::move(text), std::move(reached), Clock::now(), nullptr, std::move(why)});
  if (counts_.joinable()) return;
  asks_ = std::thread([this] { AskDriver(); });
  counts_ = std::thread([this] { CountTime(); });
}

void Watchdog::Queued(Subject& subject, std::shared_ptr<EventHandle> ended) {
  const std::lock_guard lock(mutex_);
  subject.operations_.back().ended = std::move(ended);
}

void Watchdog::Remove(Subject& subject) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !asking_; });  // its communicator may be asked about
  std::erase_if(subjects_, [&](const auto& s) { return s.get() == &subject; });
}

bool Watchdog::AskAbout(Subject& subject, std::unique_lock<std::mutex>& lock) {
  std::shared_ptr<EventHandle> ended, reached;
  if (!subject.operations_.empty()) {
    ended = subject.operations_.front().ended;
    reached = subject.operations_.front().reached;
  }
  const ncclComm_t comm = subject.comm_;
  asking_ = true;
  lock.unlock();
  const auto asked = Clock::now();
  const cudaError_t status = ended ? cudaEventQuery(ended->get()) : cudaErrorNotReady;
  const bool waits =
      status == cudaErrorNotReady && reached && cudaEventQuery(reached->get()) == cudaErrorNotReady;
  ncclResult_t result = ncclSuccess;
  if (status != cudaSuccess && comm != nullptr) Nccl().CommGetAsyncError(comm, &result);
  lock.lock();
  asking_ = false;
  changed_.notify_all();
  if (status == cudaSuccess) {
    Operation done = std::move(subject.operations_.front());
    subject.operations_.pop_front();
    subject.last_finished_ = std::move(done.text);
    // The next one may have been called long ago, and its own beginning is asked about next.
    if (!subject.operations_.empty()) {
      Operation& next = subject.operations_.front();
      next.began = std::max(next.began, asked);
    }
    // Freeing memory that `why` reads waits for a thread that waits for the device within the
    // driver.
    lock.unlock();
    done = {};
    ended.reset();
    reached.reset();
    lock.lock();
    return true;
  }
  if (reached && !subject.operations_.empty()) {
    Operation& oldest = subject.operations_.front();
    if (waits) {
      oldest.began = std::max(oldest.began, asked);
    } else {
      oldest.reached.reset();
    }
  }
  if (status != cudaErrorNotReady) {
    subject.failure_ = fmt::format("the device failed: {}", cudaGetErrorString(status));
  } else if (result != ncclSuccess && result != ncclInProgress) {
    subject.failure_ = fmt::format("NCCL reports: {}. {}", Nccl().GetErrorString(result),
                                   Nccl().GetLastError(comm));
  }
  return false;
}

void Watchdog::AskDriver() {
  cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, [this] { return stop_; })) {
    // Subjects may come and go while the driver is asked.
    const std::vector<std::shared_ptr<Subject>> subjects = subjects_;
    for (const auto& subject : subjects) {
      const auto here = [&] {
        return !stop_ && std::find(subjects_.begin(), subjects_.end(), subject) != subjects_.end();
      };
      while (here() && AskAbout(*subject, lock)) {
      }
    }
  }
}

std::string Watchdog::Look(const Subject& subject) const {
  std::string why = subject.failure_;
  if (subject.operations_.empty() && why.empty()) return {};
  if (why.empty()) {
    const Operation& oldest = subject.operations_.front();
    const auto waited = Clock::now() - oldest.began;
    if (waited < limit_) return {};
    why = fmt::format("not ended after {:.1f} s{}", std::chrono::duration<double>(waited).count(),
                      oldest.ended ? "" : ", while ranks were connected");
    const std::string more = oldest.why ? oldest.why() : std::string();
    if (!more.empty()) why += ", " + more;
  }
  return fmt::format(
      "{}: {}: {}; finished last: {}", subject.who_,
      subject.operations_.empty() ? "no operation" : subject.operations_.front().text, why,
      subject.last_finished_);
}

void Watchdog::CountTime() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, [this] { return stop_; })) {
    for (const auto& subject : subjects_) {
      const std::string failure = Look(*subject);
      if (failure.empty()) continue;
      lock.unlock();
      on_failure_(Error(ErrorCode::kIo, failure));
      return;
    }
  }
}

}  // namespace cistron::comm::nccl
