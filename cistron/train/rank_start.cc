#include "cistron/train/rank_start.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <sstream>

#include "cistron/base/error.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/parallel/agreement.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::train {
namespace {

// "'seed: 1' and 'seed: 2'": the first lines that are not equal.
std::string FirstDifference(const std::string& a, const std::string& b) {
  std::istringstream lines_a(a), lines_b(b);
  std::string line_a, line_b;
  do {
    line_a.clear();
    line_b.clear();
    std::getline(lines_a, line_a);
    std::getline(lines_b, line_b);
  } while (line_a == line_b && (lines_a || lines_b));
  return fmt::format("'{}' and '{}'", line_a, line_b);
}

}  // namespace

void CheckAlike(const LoadedConfig& loaded, const std::string& program, comm::Communicator& ranks) {
  if (ranks.size() == 1) return;
  const std::string mine = fmt::format("{}\n{}", program, ToYaml(loaded.config));
  const std::vector<std::string> all = parallel::FromAll(ranks, [&] { return mine; });
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw parallel::SharedError(
        ErrorCode::kBadInput,
        fmt::format("rank {} was started with another configuration or program than rank 0; they "
                    "differ first in {}",
                    r, FirstDifference(all[0], all[r])));
  }
}

void CheckSameData(const std::vector<std::string>& data) {
  for (std::size_t r = 1; r < data.size(); ++r) {
    if (data[r] == data[0]) continue;
    throw parallel::SharedError(
        ErrorCode::kBadInput,
        fmt::format(
            "rank {} reads other data than rank 0: files of data.train or data.heldout have "
            "the same names and differ; give all machines the same files",
            r));
  }
}

std::int64_t RanksHere(comm::Communicator& ranks) {
  std::array<char, HOST_NAME_MAX + 1> name{};
  const std::string mine = gethostname(name.data(), HOST_NAME_MAX) == 0 ? name.data() : "";
  const std::vector<std::string> all = parallel::FromAll(ranks, [&] { return mine; });
  return std::count(all.begin(), all.end(), mine);
}

std::unique_ptr<comm::Communicator> ConnectDevices(comm::Communicator& ranks, Device& device,
                                                   std::chrono::seconds limit) {
  if (ranks.transport() == "inproc") {
    throw parallel::SharedError(
        ErrorCode::kUnsupported,
        fmt::format(
            "device=cuda: ranks on GPUs are processes, not threads of one; start the run "
            "with `cistron launch -n {0} train …` or `mpirun -np {0} cistron train …`, in a "
            "build with Open MPI",
            ranks.size()));
  }
  const auto require = [&](int index) {
    parallel::FromAll(ranks, [&] {
      cuda::RequireDevice(index);
      return std::string();
    });
  };
  require(0);  // without any GPU how many there are for how many ranks is beside the point
  device = comm::nccl::DeviceOfRank(ranks);
  require(device.index);
  return comm::nccl::Connect(ranks, device, {.communicator = {.limit = limit}});
}

}  // namespace cistron::train
