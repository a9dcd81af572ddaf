// What several ranks find out about each other before they train one model together.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cistron/comm/communicator.h"
#include "cistron/tensor/device.h"
#include "cistron/train/run_config.h"

namespace cistron::train {

// Ranks that were started with other configurations, or are other programs, would train nothing
// that means anything: parallel::SharedError (kBadInput) names the first such rank and the first
// line in which they differ. `program`: what it is, as text. Collective.
void CheckAlike(const LoadedConfig& loaded, const std::string& program, comm::Communicator& ranks);

// `data`: the corpus' fingerprint of each rank. Files of one name may differ between machines; rows
// that are not the same on all ranks would be trained on, and what is held out would not. Throws
// parallel::SharedError (kBadInput).
void CheckSameData(const std::vector<std::string>& data);

// How many of the ranks are on this machine, by its name. Collective.
std::int64_t RanksHere(comm::Communicator& ranks);

// Of ranks with a GPU each: `device` becomes this rank's, and the result moves tensors of it.
// Collective. Throws parallel::SharedError: kUnsupported for ranks that are threads, and what
// cuda::RequireDevice, comm::nccl::DeviceOfRank and Connect throw.
std::unique_ptr<comm::Communicator> ConnectDevices(comm::Communicator& ranks, Device& device,
                                                   std::chrono::seconds limit);

}  // namespace cistron::train
