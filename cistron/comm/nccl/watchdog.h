// Threads that notice operations of several ranks that fail or do not end.
//
// The time of an operation counts from the last moment at which the device was known not to have
// reached it: hosts queue steps ahead, and what the device computes before is no waiting. Where the
// driver answers no question, nothing new is known, and time goes on.
//
// One asks the driver which have ended; another counts the time and asks it nothing, because a
// question may wait behind another thread's call that waits for the device. (Seen with driver 580:
// while a thread copies from the device, cudaEventDestroy in another waits. So events are not
// freed, but used again.)
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::comm::nccl {

// An event of the driver, without timing, of the one GPU of the process. The driver's events are
// kept as long as the process.
class EventHandle {
 public:
  EventHandle();
  // What was queued on `stream` until now.
  static std::shared_ptr<EventHandle> Recorded(cudaStream_t stream);
  ~EventHandle();
  EventHandle(const EventHandle&) = delete;
  EventHandle& operator=(const EventHandle&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  struct Operation {
    std::string text;
    std::shared_ptr<EventHandle> reached;  // before it on its stream; null once it has been
    Clock::time_point began;
    std::shared_ptr<EventHandle> ended;  // null until it is queued
    std::function<std::string()> why;    // for whom it waits; may be null
  };
  // What is known of one communicator.
  class Subject {
   public:
    // `who`: how messages begin. The communicator of NCCL is told once there is one.
    explicit Subject(std::string who) : who_(std::move(who)) {}

   private:
    friend class Watchdog;
    const std::string who_;
    ncclComm_t comm_ = nullptr;
    std::deque<Operation> operations_;  // in the order of the calls
    std::string last_finished_ = "none";
    std::string failure_;  // of the device or of NCCL
  };

  // `device`: where the operations run. The thread begins with the first operation.
  Watchdog(int device, std::chrono::milliseconds limit,
           std::function<void(const Error&)> on_failure)
      : device_(device), limit_(limit), on_failure_(std::move(on_failure)) {}
  ~Watchdog();

  std::shared_ptr<Subject> Add(std::string who);
  void SetComm(Subject& subject, ncclComm_t comm);
  // An operation is about to be queued, behind `reached` on its stream; it has been, and `ended`
  // follows it.
  void Begin(Subject& subject, std::string text, std::shared_ptr<EventHandle> reached,
             std::function<std::string()> why = {});
  void Queued(Subject& subject, std::shared_ptr<EventHandle> ended);
  // The subject's communicator is about to be destroyed.
  void Remove(Subject& subject);

 private:
  void AskDriver();
  void CountTime();
  // Asks about the oldest operation of a subject, without the lock while the driver answers; false
  // where it has not ended.
  bool AskAbout(Subject& subject, std::unique_lock<std::mutex>& lock);
  // The message of a failure; empty where there is none. Under the lock.
  std::string Look(const Subject& subject) const;

  const int device_;
  const std::chrono::milliseconds limit_;
  const std::function<void(const Error&)> on_failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Subject>> subjects_;
  bool stop_ = false, asking_ = false;
  std::thread asks_, counts_;
};

}  // namespace cistron::comm::nccl
