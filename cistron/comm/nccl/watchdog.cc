#include "cistron/comm/nccl/watchdog.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cistron/comm/nccl/library.h"
#include "cistron/tensor/cuda/check.h"

namespace cistron::comm::nccl {
namespace {

// How often the thread looks: seldom beside operations, often beside the time that a person waits.
constexpr std::chrono::milliseconds kPeriod{50};

}  // namespace

EventHandle::EventHandle() {
  cuda::Check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}
EventHandle::~EventHandle() {
  cudaEventDestroy(event_);
}

Watchdog::~Watchdog() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
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

void Watchdog::Begin(Subject& subject, std::string text) {
  const std::lock_guard lock(mutex_);
  subject.operations_.push_back({std::move(text), Clock::now(), nullptr});
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
}

void Watchdog::Queued(Subject& subject, std::shared_ptr<EventHandle> ended) {
  const std::lock_guard lock(mutex_);
  subject.operations_.back().ended = std::move(ended);
}

void Watchdog::Remove(Subject& subject) {
  const std::lock_guard lock(mutex_);
  std::erase_if(subjects_, [&](const auto& s) { return s.get() == &subject; });
}

std::string Watchdog::Look(Subject& subject) {
  std::string why;
  while (!subject.operations_.empty() && subject.operations_.front().ended) {
    const cudaError_t status = cudaEventQuery(subject.operations_.front().ended->get());
    if (status == cudaErrorNotReady) break;
    if (status != cudaSuccess) {
      why = fmt::format("the device failed: {}", cudaGetErrorString(status));
      break;
    }
    subject.last_finished_ = std::move(subject.operations_.front().text);
    subject.operations_.pop_front();
  }
  if (why.empty() && subject.comm_ != nullptr) {
    ncclResult_t result = ncclSuccess;
    Nccl().CommGetAsyncError(subject.comm_, &result);
    if (result != ncclSuccess && result != ncclInProgress) {
      why = fmt::format("NCCL reports: {}. {}", Nccl().GetErrorString(result),
                        Nccl().GetLastError(subject.comm_));
    }
  }
  if (subject.operations_.empty() && why.empty()) return {};
  const std::string text =
      subject.operations_.empty() ? "no operation" : subject.operations_.front().text;
  if (why.empty()) {
    const auto waited = Clock::now() - subject.operations_.front().began;
    if (waited < limit_) return {};
    why = fmt::format("not ended after {:.1f} s{}", std::chrono::duration<double>(waited).count(),
                      subject.operations_.front().ended ? "" : ", while ranks were connected");
  }
  return fmt::format("{}: {}: {}; finished last: {}", subject.who_, text, why,
                     subject.last_finished_);
}

void Watchdog::Loop() {
  cudaSetDevice(device_);
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
