// Time of what ranks with a GPU each queue on their main streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "cistron/comm/communicator.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::bench {

// Milliseconds of one call of `function`, between events around as many as take some time: the
// slowest rank's, median of the repeats, on every rank. The first call, which connects, is not
// counted. All ranks call it together.
inline double SlowestRankMs(comm::Communicator& comm, Device device,
                            const std::function<void()>& function) {
  constexpr std::int64_t kRepeats = 7, kTogether = 10;
  const Tensor times = Tensor::Empty({kRepeats}, DType::kF64);
  for (std::int64_t i = -1; i < kRepeats; ++i) {
    comm.Barrier();
    cuda::Event begin(device), end(device);
    begin.Record();
    for (std::int64_t k = 0; k < kTogether; ++k) function();
    end.Record();
    const double ms = end.MillisecondsSince(begin);
    if (i >= 0) times.data<double>()[i] = ms / static_cast<double>(kTogether);
  }
  comm.AllReduce(times, comm::ReduceOp::kMax);
  const auto t = times.span<double>();
  std::nth_element(t.begin(), t.begin() + kRepeats / 2, t.end());
  return t[kRepeats / 2];
}

}  // namespace cistron::bench
