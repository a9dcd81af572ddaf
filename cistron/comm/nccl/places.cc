#include "cistron/comm/nccl/places.h"

#include "cistron/base/error.h"

namespace cistron::comm::nccl {

int DeviceIndex(std::span<const Place> all, int rank) {
  for (const Place& place : all) {
    int neighbours = 0;
    for (const Place& other : all) neighbours += other.machine == place.machine ? 1 : 0;
    // Equal numbers on every rank: all throw.
    if (place.visible == 1 || neighbours <= place.visible) continue;
    CISTRON_THROW(kUnsupported,
                  "nccl: {} has {} GPUs for its {} ranks; start at most one rank a GPU",
                  place.machine.data(), place.visible, neighbours);
  }
  const auto own = static_cast<std::size_t>(rank);
  // Launchers may show every rank its own GPU alone.
  if (all[own].visible == 1) return 0;
  int before = 0;
  for (const Place& other : all.first(own)) before += other.machine == all[own].machine ? 1 : 0;
  return before;
}

void CheckOneRankAGpu(std::span<const Place> all) {
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (all[a].gpu != all[b].gpu) continue;
      CISTRON_THROW(kBadInput,
                    "nccl: ranks {} and {} are both on one GPU of {} (cuda:{} and cuda:{}); NCCL "
                    "needs a GPU for each rank: start fewer ranks, or show each its own",
                    b, a, all[a].machine.data(), all[b].index, all[a].index);
    }
  }
}

}  // namespace cistron::comm::nccl
