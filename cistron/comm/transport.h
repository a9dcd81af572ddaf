// What carries bytes between the ranks of a host communicator. Collectives are written once, over
// Exchange (host_communicator.cc); a transport knows neither tensors nor operations.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cistron::comm {

// Bytes to a rank, or from it. Never to the rank itself, never empty.
struct ConstMessage {
  int peer = 0;
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};
struct Message {
  int peer = 0;
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

// Messages of collectives, and those of Send and Recv, do not mix.
enum class Channel : std::uint8_t { kCollective, kPointToPoint };

// Thrown when messages do not come: too late, of another length, from a rank that is gone. The
// communicator adds the operation, ends the other ranks and throws an Error.
struct TransportFailure {
  std::string what;  // "waited 1.0 s for rank 2"
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The number of a member in the whole run, for messages.
  virtual int WorldRank(int member) const = 0;

  // Sends and receives at the same time, at most one message from and to a peer; returns when all
  // have arrived and what was sent may be changed. Messages of a channel between two ranks arrive
  // in order. Sleeps while it waits. Throws TransportFailure after the limit of the options, and
  // Error where another rank has ended the run.
  virtual void Exchange(Channel channel, std::span<const ConstMessage> sends,
                        std::span<const Message> receives) = 0;
  // Sends a copy, without waiting for the receiver.
  virtual void Post(Channel channel, const ConstMessage& message) = 0;

  // Tells the other ranks of the run that this one ends it, and why; once, and does not throw.
  virtual void EndOthers(const std::string& message) noexcept = 0;

  // The same for some members, in the order of their new ranks; this rank is one of them. All of
  // them call it with one `context`, a number that no other group with any of these ranks has.
  virtual std::unique_ptr<Transport> Subgroup(std::span<const int> members,
                                              std::int64_t context) = 0;
};

}  // namespace cistron::comm
