// Rows of experts among the ranks of an expert group, written by kernels into each other's memory.
//
// One exchange is three kernels on the main stream: Enter tells the others that this rank's buffer
// may be written to, with its counts where rows go out, and waits until all have said so; a push
// writes rows to their places with the other ranks (exchange_plan.h); Leave tells them that this is
// done, and waits until all have said so. Kernels that wait have one block, so that everything else
// finds room on the device; the host waits for nothing. Flags are numbers that only grow, kept on
// the device, written with release and read with acquire over the system (PTX ISA, "Memory
// Consistency Model"; the same scheme as NVSHMEM's put and signal).
//
// Rows that would not fit a receiver's buffer are seen by every rank in the counts: then nobody
// writes any, counts become 0 and rows that come back are 0, here and in every exchange that
// follows, and the status says how many rows were needed, until Reset. A rank that waited in vain
// does so once: no exchange after it waits or moves rows, on this rank or, once they notice, on the
// others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cistron/comm/nccl/peer_memory.h"
#include "cistron/ops/context.h"

namespace cistron::parallel {

class RowExchange {
 public:
  // What the counts of a dispatch say, on the device; i64.
  struct Plan {
    Tensor counts;       // [ranks, E] of all ranks
    Tensor split_sizes;  // [L] rows of each expert of this rank, of all ranks
    // Runs of rows out of here: those for expert e begin at begins[e], and with the expert's rank
    // at places[e]. [E + 1], [E]
    Tensor out_begins, out_places;
    // Runs of rows that came: number e·ranks + s, of expert e from rank s. [L·ranks + 1],
    // [L·ranks]
    Tensor back_begins, back_places;
  };

  // Collective. Ranks of `group` reach each other's memory (comm::nccl::WhyNoPeers). A kernel that
  // waits a tenth longer than `limit_s`, and a second, gives up: the status then says so. (The
  // group's own watch, which names what it waited for, comes first where both have one limit.)
  RowExchange(comm::Communicator& group, const ops::Context& ctx, std::int64_t num_experts,
              double limit_s);
  ~RowExchange();

  // Of the ranks' shared memory: every rank makes the same calls.
  Tensor Empty(const Shape& shape, DType dtype);
  AllocatorStats Stats() const { return memory_->Stats(); }

  // Sends rows out: rows[place] with the expert's rank = x[slot_of_row[r] / top_k], and where
  // `probs` [T, K] is given probs_out[place] = probs[slot_of_row[r]]. `rows` [capacity, H] and
  // `probs_out` [capacity] are Empty's. With `split_sizes` [E], this rank's counts, a plan is made
  // and its tensors filled; else it is that of an earlier call.
  void Out(const ops::Context& ctx, const Tensor& split_sizes, const Plan& plan, const Tensor& x,
           const Tensor& slot_of_row, std::int64_t top_k, const Tensor& probs, const Tensor& rows,
           const Tensor& probs_out);
  // Sends rows back, and where `values` [capacity] is given a number of each: returned [M, H] and
  // values_out [M] of the rank that sent a row, at the row's place in its map.
  void Back(const ops::Context& ctx, const Plan& plan, const Tensor& rows, const Tensor& values,
            const Tensor& returned, const Tensor& values_out);
  // The same beside what is queued on the main stream next, on few multiprocessors; no other
  // exchange before the main stream has been made to wait, which the function that is returned
  // does. Until then nobody may touch the tensors.
  std::function<void()> BackBeside(const ops::Context& ctx, const Plan& plan, const Tensor& rows,
                                   const Tensor& values, const Tensor& returned,
                                   const Tensor& values_out);
  // Tensors for a plan.
  Plan NewPlan(const ops::Context& ctx) const;

  // f64 []: 0; infinity since rows did not fit; NaN since a rank did not come. It is the device's.
  Tensor status() const;
  // i64 []: rows that the buffer which was too small should have had; 0: none was, −1: a rank did
  // not come in time, −2: ranks gave different buffers. It is the device's.
  Tensor needed() const;
  // "waits for rank 3" while a kernel does, and after one has in vain; else empty.
  std::string WaitsFor() const;
  // Forgets status and needed, in the order of the main stream.
  void Reset();

 private:
  struct Beside;
  void Enter(const ops::Context& ctx, const Tensor& split_sizes, const Plan& plan,
             const Tensor& buffer, std::int64_t capacity);
  void Leave(const Stream& stream);
  void Watched(const ops::Context& ctx, const char* what, const std::function<void()>& queue);

  comm::Communicator& group_;
  const std::int64_t num_experts_;
  const double limit_s_;
  std::unique_ptr<comm::nccl::PeerMemory> memory_;
  Tensor control_;             // Control of this rank, written by the others
  Tensor status_, waits_for_;  // on the device; of the host, one word a rank
  std::unique_ptr<Beside> beside_;
};

}  // namespace cistron::parallel
