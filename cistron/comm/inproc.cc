// A mailbox a rank. A message is a pointer into the sender's memory, from which the receiver
// copies; short ones, and those of Post, are copied at once.
#include "cistron/comm/inproc.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/comm/host_communicator.h"

namespace cistron::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Copying these costs less than waking their sender.
constexpr std::int64_t kCopiedBytes = 4096;

struct Packet {
  int sender = 0;
  Channel channel = Channel::kCollective;
  const std::byte* data = nullptr;  // in `copy`, or in the sender's memory: then it waits
  std::int64_t bytes = 0;
  std::vector<std::byte> copy;

  bool borrowed() const { return copy.empty() && bytes > 0; }
};

// What one member of a group sleeps on.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::list<Packet> packets;  // to this member, in the order of arrival
  std::set<int> borrowers;    // members that have yet to copy a message of this one

  void Wake() {
    // Whoever tests what has changed and then sleeps does both under the lock.
    { std::lock_guard lock(mutex); }
    changed.notify_all();
  }
};

struct Group {
  explicit Group(std::vector<int> world_ranks)
      : members(std::move(world_ranks)), mailboxes(members.size()) {}
  Mailbox& mailbox(int member) { return mailboxes[static_cast<std::size_t>(member)]; }

  const std::vector<int> members;  // their ranks in the world
  std::vector<Mailbox> mailboxes;
};

// What all ranks of a run share.
class World {
 public:
  World(int ranks, const Options& options, const MessageObserver& observer)
      : options_(options), observer_(observer), left_(static_cast<std::size_t>(ranks)) {}

  const Options& options() const { return options_; }
  void Observe(int from, int to, std::int64_t bytes) const {
    if (observer_) observer_(from, to, bytes);
  }

  // The group of these ranks and this context; its first member makes it.
  std::shared_ptr<Group> Join(const std::vector<int>& ranks, std::int64_t context) {
    std::lock_guard lock(mutex_);
    std::weak_ptr<Group>& entry = groups_[{context, ranks}];
    std::shared_ptr<Group> group = entry.lock();
    if (!group) entry = group = std::make_shared<Group>(ranks);
    return group;
  }

  bool failed() const { return failed_; }
  // The first failure counts: whether this one is.
  bool Fail(int rank, const std::string& message) {
    {
      std::lock_guard lock(mutex_);
      if (failed_) return failed_rank_ == rank;
      message_ = message;
      failed_rank_ = rank;
      failed_ = true;
    }
    WakeAll();
    return true;
  }
  [[noreturn]] void ThrowFailure() const {
    std::lock_guard lock(mutex_);
    throw Error(ErrorCode::kIo, fmt::format("comm: ended by rank {}: {}", failed_rank_, message_));
  }

  bool HasLeft(int rank) const { return left_[static_cast<std::size_t>(rank)]; }
  void Leave(int rank) {
    left_[static_cast<std::size_t>(rank)] = true;
    WakeAll();
  }

 private:
  void WakeAll() {
    std::vector<std::shared_ptr<Group>> groups;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [key, group] : groups_) {
        if (auto live = group.lock()) groups.push_back(std::move(live));
      }
    }
    for (const auto& group : groups) {
      for (Mailbox& mailbox : group->mailboxes) mailbox.Wake();
    }
  }

  const Options options_;
  const MessageObserver observer_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::int64_t, std::vector<int>>, std::weak_ptr<Group>> groups_;
  std::string message_;
  int failed_rank_ = -1;
  std::atomic<bool> failed_{false};
  std::vector<std::atomic<bool>> left_;
};

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank) {}

  std::string_view name() const override { return "inproc"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->members.size()); }
  int WorldRank(int member) const override {
    return group_->members[static_cast<std::size_t>(member)];
  }

  void Exchange(Channel channel, std::span<const ConstMessage> sends,
                std::span<const Message> receives) override {
    if (world_->failed()) world_->ThrowFailure();
    for (const ConstMessage& send : sends) Deliver(channel, send, send.bytes <= kCopiedBytes);
    try {
      Receive(channel, receives);
    } catch (...) {
      TakeBack();
      throw;
    }
  }

  void Post(Channel channel, const ConstMessage& message) override {
    if (world_->failed()) world_->ThrowFailure();
    Deliver(channel, message, true);
  }

  void EndOthers(const std::string& message) noexcept override {
    world_->Fail(WorldRank(rank_), message);
  }

  std::unique_ptr<Transport> Subgroup(std::span<const int> members, std::int64_t context) override {
    std::vector<int> ranks;
    int own = -1;
    for (const int member : members) {
      if (member == rank_) own = static_cast<int>(ranks.size());
      ranks.push_back(WorldRank(member));
    }
    return std::make_unique<InprocTransport>(world_, world_->Join(ranks, context), own);
  }

 private:
  Mailbox& own() { return group_->mailbox(rank_); }

  void Deliver(Channel channel, const ConstMessage& send, bool copy) {
    world_->Observe(WorldRank(rank_), WorldRank(send.peer), send.bytes);
    Packet packet{rank_, channel, send.data, send.bytes, {}};
    if (copy) {
      packet.copy.assign(send.data, send.data + send.bytes);
      packet.data = packet.copy.data();  // stays where it is when the packet moves
    }
    if (packet.borrowed()) {
      std::lock_guard lock(own().mutex);
      own().borrowers.insert(send.peer);
    }
    Mailbox& theirs = group_->mailbox(send.peer);
    {
      std::lock_guard lock(theirs.mutex);
      theirs.packets.push_back(std::move(packet));
    }
    theirs.changed.notify_all();
  }

  // Until all messages are here and all that were lent are copied.
  void Receive(Channel channel, std::span<const Message> receives) {
    const auto deadline = Clock::now() + world_->options().limit;
    std::map<int, const Message*> missing;
    for (const Message& receive : receives) missing[receive.peer] = &receive;

    std::unique_lock lock(own().mutex);
    for (;;) {
      std::vector<std::pair<const Message*, Packet>> taken;
      for (auto it = own().packets.begin(); it != own().packets.end();) {
        const auto found = missing.find(it->sender);
        if (it->channel != channel || found == missing.end()) {
          ++it;
          continue;
        }
        taken.emplace_back(found->second, std::move(*it));
        missing.erase(found);
        it = own().packets.erase(it);
      }
      if (!taken.empty()) {
        lock.unlock();
        CopyOut(taken);
        lock.lock();
        continue;
      }
      std::set<int> awaited = own().borrowers;
      for (const auto& [peer, message] : missing) awaited.insert(peer);
      if (awaited.empty()) return;
      if (world_->failed()) world_->ThrowFailure();
      std::vector<int> left;
      for (const int peer : awaited) {
        if (world_->HasLeft(WorldRank(peer))) left.push_back(peer);
      }
      if (!left.empty()) throw TransportFailure{RankList(left) + " returned and takes no part"};
      if (Clock::now() >= deadline) {
        const double seconds = std::chrono::duration<double>(world_->options().limit).count();
        throw TransportFailure{fmt::format("waited {:.1f} s for {}", seconds,
                                           RankList({awaited.begin(), awaited.end()}))};
      }
      own().changed.wait_until(lock, deadline);
    }
  }

  // Releases every sender before it complains about one.
  void CopyOut(std::span<const std::pair<const Message*, Packet>> taken) {
    std::string complaint;
    for (const auto& [message, packet] : taken) {
      if (packet.bytes != message->bytes) {
        complaint = fmt::format("rank {} sent {} bytes where this rank expects {}",
                                WorldRank(packet.sender), packet.bytes, message->bytes);
      } else if (packet.bytes > 0) {
        std::memcpy(message->data, packet.data, static_cast<std::size_t>(packet.bytes));
      }
      if (!packet.borrowed()) continue;
      Mailbox& sender = group_->mailbox(packet.sender);
      {
        std::lock_guard lock(sender.mutex);
        sender.borrowers.erase(rank_);
      }
      sender.changed.notify_all();
    }
    if (!complaint.empty()) throw TransportFailure{complaint};
  }

  // After a failure nobody may read this rank's memory any more: what was lent and not yet taken is
  // removed, and copies that have begun are waited for.
  void TakeBack() {
    std::unique_lock lock(own().mutex);
    const std::set<int> borrowers = own().borrowers;
    lock.unlock();
    for (const int peer : borrowers) {
      Mailbox& theirs = group_->mailbox(peer);
      std::size_t removed = 0;
      {
        std::lock_guard their_lock(theirs.mutex);
        removed = theirs.packets.remove_if(
            [this](const Packet& p) { return p.sender == rank_ && p.borrowed(); });
      }
      if (removed == 0) continue;
      std::lock_guard own_lock(own().mutex);
      own().borrowers.erase(peer);
    }
    lock.lock();
    own().changed.wait(lock, [this] { return own().borrowers.empty(); });
  }

  // "rank 2", "ranks 1, 3": as the world numbers them.
  std::string RankList(std::vector<int> members) const {
    for (int& member : members) member = WorldRank(member);
    return fmt::format("rank{} {}", members.size() == 1 ? "" : "s", fmt::join(members, ", "));
  }

  const std::shared_ptr<World> world_;
  const std::shared_ptr<Group> group_;
  const int rank_;
};

}  // namespace

void RunRanks(int ranks, const std::function<void(Communicator&)>& f, const Options& options,
              const MessageObserver& observer) {
  CISTRON_CHECK(ranks >= 1 && ranks <= kMostThreads, "RunRanks: {} ranks, outside 1…{}", ranks,
                kMostThreads);
  CISTRON_CHECK(options.limit.count() > 0, "RunRanks: a limit of {} ms; it must be positive",
                options.limit.count());
  const auto world = std::make_shared<World>(ranks, options, observer);
  std::vector<int> everyone(static_cast<std::size_t>(ranks));
  std::iota(everyone.begin(), everyone.end(), 0);
  const std::shared_ptr<Group> group = world->Join(everyone, 0);
  const int threads = NumThreads(), threads_each = std::max(1, threads / ranks);

  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    try {
      SetNumThreads(threads_each);  // OpenMP's number belongs to a thread
      HostCommunicator communicator(std::make_unique<InprocTransport>(world, group, rank), options);
      try {
        f(communicator);
      } catch (const std::exception& e) {
        // Before the communicator's destructor, whose queue may wait for others.
        const bool is_first = world->Fail(rank, e.what());
        std::lock_guard lock(mutex);
        if (is_first && !first) first = std::current_exception();
      }
    } catch (...) {
      world->Fail(rank, "an exception that is no std::exception");
      std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    world->Leave(rank);
  };
  std::vector<std::thread> rank_threads;
  try {
    for (int r = 0; r < ranks; ++r) rank_threads.emplace_back(run, r);
  } catch (const std::system_error& e) {
    world->Fail(static_cast<int>(rank_threads.size()),
                fmt::format("no thread could be started for it ({}); ask for fewer ranks than {}",
                            e.what(), ranks));
  }
  for (std::thread& thread : rank_threads) thread.join();
  SetNumThreads(threads);  // a number of the whole process
  if (first) std::rethrow_exception(first);
  if (world->failed()) world->ThrowFailure();  // f kept the error to itself
}

}  // namespace cistron::comm
