// Communication among ranks: one interface for every transport.
//
// A communicator is a group of ranks numbered 0 … size() − 1; every rank holds one object of its
// own and calls it from one thread at a time. Transports: one rank (self.h), ranks that are threads
// of one process (inproc.h), processes of Open MPI (mpi/mpi.h). Why it is so:
// docs/decisions/0017-communication.md.
//
// Order. The operations of a communicator run in the order in which its rank called them, one after
// another; every rank must call the same collectives in the same order. Send never waits for its
// receiver; everything else may wait for other ranks.
//
// Reductions are deterministic: every element is combined in the order of the ranks, 0 … size() −
// 1, from the left. Sums of bf16 accumulate in fp32 and are rounded once at the end; f32 in fp32,
// f64 in fp64; i64 wraps. Max and min are NaN where any rank's value is. So the bits are the same
// on every rank, from run to run and for every transport, and do not depend on sizes or timing.
//
// Tensors are contiguous. `…Async` starts the operation and returns: its tensors must not be
// changed (inputs) or read (outputs) before Work::Wait; counts are copied. Nothing is padded, rows
// beyond the sum of the counts are neither read nor written, and counts and tensors may be empty.
//
// Errors. Arguments that can never work throw kInvalidArgument on the rank that gave them. A rank
// that waits longer than Options::limit throws kIo with its number, the operation, its
// place in the sequence, the ranks that it waited for and the last operation that finished; so do
// collectives that do not match (Options::checked), naming both sides. Such an error ends the run
// of every rank: what that means says the transport. A communicator that has thrown kIo throws it
// again at every call.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "cistron/comm/operation.h"
#include "cistron/comm/work.h"
#include "cistron/tensor/tensor.h"

namespace cistron::comm {

struct Options {
  // The watchdog: how long a rank waits for others inside an operation.
  std::chrono::milliseconds limit{600'000};
  // Ranks compare kind, dtype, counts and place in the sequence before each collective, for one
  // more round of small messages. Without it, ranks that do not match wait until the limit, or find
  // out by the length of a message.
  bool checked = false;
};

// Hears where a rank waits for others, in the thread that called.
class Observer {
 public:
  virtual ~Observer() = default;
  // An operation that blocks its caller is about to begin; on streams, what follows comes after it.
  // Both names are in static storage.
  virtual void Begin(std::string_view operation, std::string_view transport) = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // What messages call it: "world", or the name that Split was given.
  virtual const std::string& name() const = 0;
  // "self", "inproc", "mpi".
  virtual std::string_view transport() const = 0;

  // t[i] = t of rank 0 [i] ∘ t of rank 1 [i] ∘ …, on every rank. Equal shapes and dtypes (f32, f64,
  // bf16, i64).
  void AllReduce(const Tensor& t, ReduceOp reduce = ReduceOp::kSum);
  [[nodiscard]] Work AllReduceAsync(const Tensor& t, ReduceOp reduce = ReduceOp::kSum);

  // output of rank r = the reduction over ranks of elements [offset(r), offset(r) + counts[r]) of
  // `input`, where offset(r) is the sum of the counts before; without counts, of equal parts.
  // `input` has as many elements as the counts together, `output` counts[rank()]; it may be that
  // part of `input`. Counts are the same on every rank and may be zero.
  void ReduceScatter(const Tensor& input, const Tensor& output, ReduceOp reduce = ReduceOp::kSum,
                     std::span<const std::int64_t> counts = {});
  [[nodiscard]] Work ReduceScatterAsync(const Tensor& input, const Tensor& output,
                                        ReduceOp reduce = ReduceOp::kSum,
                                        std::span<const std::int64_t> counts = {});

  // The reverse: elements [offset(r), offset(r) + counts[r]) of `output` = `input` of rank r. Any
  // dtype. `input` may be that part of `output`.
  void AllGather(const Tensor& input, const Tensor& output,
                 std::span<const std::int64_t> counts = {});
  [[nodiscard]] Work AllGatherAsync(const Tensor& input, const Tensor& output,
                                    std::span<const std::int64_t> counts = {});

  // Rows are slices of the first dimension; all ranks have rows of one shape and dtype, any dtype.
  // `input` holds send_counts[0] rows for rank 0, then send_counts[1] for rank 1, …; `output` gets
  // recv_counts[0] rows from rank 0, …. Both may have more rows than that, and do not overlap.
  // recv_counts[s] of rank r must be send_counts[r] of rank s. Counts are in host memory.
  void AllToAll(const Tensor& input, std::span<const std::int64_t> send_counts,
                const Tensor& output, std::span<const std::int64_t> recv_counts);
  [[nodiscard]] Work AllToAllAsync(const Tensor& input, std::span<const std::int64_t> send_counts,
                                   const Tensor& output, std::span<const std::int64_t> recv_counts);

  // t of every rank = t of rank `root`. Any dtype.
  void Broadcast(const Tensor& t, int root);
  [[nodiscard]] Work BroadcastAsync(const Tensor& t, int root);

  // Returns when every rank has called it.
  void Barrier();

  // From one rank to another, in the order of the calls; any dtype, equal byte counts. Send copies
  // the tensor and returns without waiting for the receiver.
  void Send(const Tensor& t, int to);
  [[nodiscard]] Work SendAsync(const Tensor& t, int to);
  void Recv(const Tensor& t, int from);
  [[nodiscard]] Work RecvAsync(const Tensor& t, int from);

  // A communicator of the ranks that give the same color, numbered by key, and by rank here where
  // keys are equal. Collective; nothing (nullptr) for those whose color is negative. Its name is
  // `name`, or that of this one and the color. It has the options of this one, and may outlive it.
  // One Split at a time on a rank, whatever the communicator.
  virtual std::unique_ptr<Communicator> Split(int color, int key, std::string name = {}) = 0;

  // From now on `observer`, which outlives its being set, hears of the operations of this
  // communicator that are not started with …Async; of those of its Splits it does not. Null:
  // nobody.
  void SetObserver(Observer* observer) { observer_ = observer; }

 protected:
  Communicator() = default;

  // Carries out an operation whose arguments have been checked: at once, or in the background.
  virtual void Run(Operation operation) = 0;
  virtual Work Start(Operation operation) = 0;

 private:
  void RunObserved(Operation operation);
  Operation MakeAllReduce(const Tensor& t, ReduceOp reduce) const;
  Operation MakeReduceScatter(const Tensor& input, const Tensor& output, ReduceOp reduce,
                              std::span<const std::int64_t> counts) const;
  Operation MakeAllGather(const Tensor& input, const Tensor& output,
                          std::span<const std::int64_t> counts) const;
  Operation MakeAllToAll(const Tensor& input, std::span<const std::int64_t> send_counts,
                         const Tensor& output, std::span<const std::int64_t> recv_counts) const;
  Operation MakeBroadcast(const Tensor& t, int root) const;
  Operation MakePointToPoint(OpKind kind, const Tensor& t, int peer) const;

  Observer* observer_ = nullptr;
};

}  // namespace cistron::comm
