// The communicator of one rank: every collective is a copy at most.
#pragma once

#include <memory>

#include "cistron/comm/communicator.h"

namespace cistron::comm {

std::unique_ptr<Communicator> MakeSelf();

}  // namespace cistron::comm
