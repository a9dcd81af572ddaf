// The MPI of this process: messages between ranks of the world, and how a run ends.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/transport.h"

namespace cistron::comm::mpi {

// Initialises MPI. May be called by several threads; MPI sees one at a time.
class Job {
 public:
  explicit Job(const RunOptions& options);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int rank() const;
  int size() const;
  // Tags are 1 … largest_tag().
  int largest_tag() const;

  // As Transport::Exchange and Post. Peers are ranks of the world.
  void Exchange(int tag, std::span<const ConstMessage> sends, std::span<const Message> receives);
  void Post(int tag, const ConstMessage& message);

  // Tells the other ranks that this one ends the run. Waits a little for a rank with a lower number
  // that does so too. MPI is called only to abort from then on.
  void EndOthers(const std::string& message) noexcept;
  // Says why, unless another rank does, and ends every process.
  [[noreturn]] void Abort(const std::string& message, int status) noexcept;
  // The regular end, after the last message.
  void Finish();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace cistron::comm::mpi
