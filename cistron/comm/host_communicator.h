// The communicator of host memory: collectives over a transport, checks, watchdog messages.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cistron/comm/communicator.h"
#include "cistron/comm/transport.h"

namespace cistron::comm {

// An all-reduce whose ranks send everything to everybody takes one round instead of two; beyond so
// many bytes in all, the traffic costs more than the round.
inline constexpr std::int64_t kOneRoundBytes = std::int64_t{32} << 10;

class HostCommunicator final : public Communicator {
 public:
  // The communicator of all ranks. Its options are those that `transport` was made with.
  HostCommunicator(std::unique_ptr<Transport> transport, const Options& options,
                   std::string name = "world");

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  const std::string& name() const override { return name_; }
  std::string_view transport() const override { return transport_->name(); }
  std::unique_ptr<Communicator> Split(int color, int key, std::string name) override;

 protected:
  void Run(Operation operation) override;
  Work Start(Operation operation) override;

 private:
  // In the thread of the caller or of the queue, never in both at once.
  void Execute(const Operation& op);
  void Carry(const Operation& op);
  void CheckSameOperation(const Operation& op);
  void CarryAllReduce(const Operation& op);
  void CarryReduceScatter(const Operation& op);
  void CarryRows(const Operation& op);  // AllGather, AllToAll
  void CarryBroadcast(const Operation& op);
  void CarryBarrier();
  [[noreturn]] void Fail(const Operation& op, const std::string& what);
  std::byte* Scratch(std::int64_t bytes);

  const Options options_;
  const std::string name_;
  const std::unique_ptr<Transport> transport_;
  // Contexts that this rank has used, over all its communicators (Transport::Subgroup).
  std::shared_ptr<std::int64_t> next_context_ = std::make_shared<std::int64_t>(1);

  std::int64_t sequence_ = 0;  // of the last collective that began; Send and Recv do not count
  std::string last_finished_ = "none";
  Tensor scratch_;
  std::optional<Error> broken_;

  WorkQueue queue_;  // last: its thread uses the members above
};

}  // namespace cistron::comm
