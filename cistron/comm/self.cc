#include "cistron/comm/self.h"

#include "cistron/base/error.h"
#include "cistron/comm/host_communicator.h"

namespace cistron::comm {
namespace {

// Nobody to talk to.
class SelfTransport final : public Transport {
 public:
  std::string_view name() const override { return "self"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int WorldRank(int) const override { return 0; }
  void Exchange(Channel, std::span<const ConstMessage> sends,
                std::span<const Message> receives) override {
    CISTRON_INVARIANT(sends.empty() && receives.empty(), "comm: one rank sends to others");
  }
  void Post(Channel, const ConstMessage&) override {
    CISTRON_THROW(kInternal, "comm: one rank sends to others");
  }
  void EndOthers(const std::string&) noexcept override {}
  std::unique_ptr<Transport> Subgroup(std::span<const int>, std::int64_t) override {
    return std::make_unique<SelfTransport>();
  }
};

}  // namespace

std::unique_ptr<Communicator> MakeSelf() {
  return std::make_unique<HostCommunicator>(std::make_unique<SelfTransport>(), Options{});
}

}  // namespace cistron::comm
