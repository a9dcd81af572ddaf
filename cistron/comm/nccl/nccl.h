// Ranks with a GPU each: NCCL moves device memory, another communicator moves the rest.
//
// What Connect returns takes tensors of its device and of the host. Host tensors, barriers and
// splits go by the control communicator. Device tensors go by NCCL, on streams: a call that waits
// (AllReduce) is queued on the device's main stream, as an op is; one that is started
// (AllReduceAsync) runs on a stream of the communicator's own after what the main stream had been
// given by then, and Work::Wait makes the main stream, not the host, wait for it. So Wait and Done
// return at once. Send and Recv of device tensors, which no step needs, go through host memory.
//
// Reductions are in the order of the ranks, as communicator.h promises. NCCL promises less: for the
// same ranks, links and sizes it adds in the same order in every run and gives every rank the same
// bits, but that order is a ring's or a tree's, other for other parts of a tensor, and its maximum
// may lose a NaN. With two ranks there is one order, so NCCL adds; with more, slices go to the rank
// that adds them, in order and in fp32 for bf16, and come back: as many bytes as NCCL's ring moves.
//
// Errors. NCCL's own, those of the device, and operations that have not ended after Options::limit
// (counted from when the device reaches them) are found by a thread that watches; it names rank,
// operation, place and the operation that finished last, and calls ConnectOptions::on_failure:
// nobody can wake a stream that waits for another GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cistron/base/error.h"
#include "cistron/comm/communicator.h"
#include "cistron/tensor/device.h"

namespace cistron::comm::nccl {

// Whether this build has the transport. The library itself is loaded when ranks connect.
bool IsBuilt();
// "NCCL 2.28.9", or why there is none.
std::string Describe();

// Enough for the full speed of the links.
inline constexpr std::int64_t kSumScratchBytes = std::int64_t{256} << 20;

struct ConnectOptions {
  Options communicator{};
  // Sums in the order of the ranks; else in NCCL's, where NCCL has the operation.
  bool rank_order = true;
  // Leaves NCCL no sum at all, not even one of two ranks: for tests.
  bool own_sums = false;
  // Memory that a reduction which is not NCCL's takes at once; it makes rounds where it needs more.
  // Those that are started share one such memory, as large as the largest of them has needed.
  std::int64_t scratch_bytes = kSumScratchBytes;
  // Called once, in the thread that watches. Without it the message is written to standard error
  // and the process ends with status 1, whereupon mpirun or srun ends the others.
  std::function<void(const Error&)> on_failure{};
};

// The GPU of this rank: the one numbered as the rank is among those of its machine, or the only one
// that it sees. Collective. Throws kUnsupported where the machine has none for every rank.
Device DeviceOfRank(Communicator& control);

// The communicator of the ranks of `control`, each with its own GPU; ids travel over `control`,
// which moves host memory and outlives the result. NCCL connects the ranks of a group when they
// first use it. Collective. Throws kUnsupported where the transport is not built or NCCL cannot be
// loaded, and kBadInput, naming them, where two ranks have one GPU, which NCCL does not do.
std::unique_ptr<Communicator> Connect(Communicator& control, Device device,
                                      const ConnectOptions& options = {});

// Runs `queue`, which queues device work on the main stream in which the ranks of `group`, one of
// Connect's or a split of it, wait for each other: the thread that watches knows it as an operation
// of the group, called `text`. `why` is asked, by that thread, for whom the work waits when it has
// not ended in time; it may return nothing.
void Watch(Communicator& group, const std::string& text, const std::function<void()>& queue,
           const std::function<std::string()>& why = {});

}  // namespace cistron::comm::nccl
