#include "cistron/comm/mpi/mpi.h"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/comm/host_communicator.h"
#include "cistron/comm/mpi/job.h"

namespace cistron::comm::mpi {
namespace {

// A group of ranks of the world. Two tags each: messages of groups and channels do not mix. No
// communicators of MPI: to make one is a collective whose wait has no limit.
class MpiTransport final : public Transport {
 public:
  // `members` in the order of this group; one of them is this process.
  MpiTransport(std::shared_ptr<Job> job, std::vector<int> members, std::int64_t context)
      : job_(std::move(job)), members_(std::move(members)) {
    const auto own = std::find(members_.begin(), members_.end(), job_->rank());
    rank_ = static_cast<int>(own - members_.begin());
    const std::int64_t last_tag = 2 * context + 2;
    CISTRON_CHECK(last_tag <= job_->largest_tag(),
                  "mpi: communicator {} needs the tag {}, and the largest is {}; make fewer",
                  context, last_tag, job_->largest_tag());
    tag_ = static_cast<int>(2 * context + 1);
  }

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  int WorldRank(int member) const override { return members_[static_cast<std::size_t>(member)]; }

  void Exchange(Channel channel, std::span<const ConstMessage> sends,
                std::span<const Message> receives) override {
    std::vector<ConstMessage> out(sends.begin(), sends.end());
    std::vector<Message> in(receives.begin(), receives.end());
    for (ConstMessage& message : out) message.peer = WorldRank(message.peer);
    for (Message& message : in) message.peer = WorldRank(message.peer);
    job_->Exchange(Tag(channel), out, in);
  }
  void Post(Channel channel, const ConstMessage& message) override {
    job_->Post(Tag(channel), {WorldRank(message.peer), message.data, message.bytes});
  }
  void EndOthers(const std::string& message) noexcept override { job_->EndOthers(message); }

  std::unique_ptr<Transport> Subgroup(std::span<const int> members, std::int64_t context) override {
    std::vector<int> ranks;
    for (const int member : members) ranks.push_back(WorldRank(member));
    return std::make_unique<MpiTransport>(job_, std::move(ranks), context);
  }

 private:
  int Tag(Channel channel) const { return channel == Channel::kCollective ? tag_ : tag_ + 1; }

  const std::shared_ptr<Job> job_;
  const std::vector<int> members_;
  int rank_ = 0;
  int tag_ = 0;
};

}  // namespace

bool IsBuilt() {
  return true;
}

std::string Describe() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  const std::string version(text.data());
  return version.substr(0, version.find(','));  // the rest says who built it
}

int RunRank(const std::function<int(Communicator&)>& f, const RunOptions& options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  CISTRON_CHECK(options.largest_message >= 1 && options.largest_message <= kMost,
                "mpi: largest_message is {}, outside 1 … 2^30", options.largest_message);
  CISTRON_CHECK(options.communicator.limit.count() > 0,
                "mpi: a limit of {} ms; it must be positive", options.communicator.limit.count());
  const auto job = std::make_shared<Job>(options);
  std::vector<int> everyone(static_cast<std::size_t>(job->size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  int status = 0;
  try {
    HostCommunicator world(std::make_unique<MpiTransport>(job, everyone, 0), options.communicator);
    try {
      status = f(world);
      world.Barrier();  // nobody finalises while others still talk
      job->Finish();
    } catch (const std::exception& e) {
      // Before the communicator's destructor, whose queue may wait for others.
      job->Abort(e.what(), options.status_of ? options.status_of(e) : 1);
    }
  } catch (...) {
    job->Abort(fmt::format("rank {} threw what is no std::exception", job->rank()), 1);
  }
  return status;
}

}  // namespace cistron::comm::mpi
