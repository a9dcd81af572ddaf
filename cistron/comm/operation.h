// What one call of a communicator asks for, as transports, checks and messages see it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::comm {

enum class ReduceOp : std::uint8_t { kSum, kMax, kMin };

enum class OpKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kSend,
  kRecv,
};

// "sum", "all_reduce".
std::string_view Name(ReduceOp reduce);
std::string_view Name(OpKind kind);

// Whether all ranks take part: all kinds but Send and Recv.
bool IsCollective(OpKind kind);
// Whether values are combined, so that the ReduceOp has a meaning.
bool IsReduction(OpKind kind);

// The part of an operation that must be the same on every rank, but for the counts, which belong to
// pairs of ranks. Plain bytes without padding: it travels as it is.
struct Signature {
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  DType dtype = DType::kU8;
  std::uint8_t unused = 0;
  std::int32_t peer = -1;         // root of a Broadcast, other side of a Send or Recv; else -1
  std::int64_t elements = 0;      // of the whole tensor where ranks agree on it, else 0
  std::int64_t row_elements = 0;  // AllToAll: elements of a row; else 0

  friend bool operator==(const Signature&, const Signature&) = default;
};
static_assert(sizeof(Signature) == 24);

// "all_reduce sum of 8 f32", "broadcast of 3 i64 from rank 0", "barrier".
std::string Describe(const Signature& signature);

struct Operation {
  Signature signature;
  Tensor input, output;  // undefined where the kind has none; AllReduce and Broadcast: the same
  // What goes to and comes from each rank, in units: rows of an AllToAll, elements of a
  // ReduceScatter or AllGather. Empty for the other kinds.
  std::vector<std::int64_t> to, from;
  std::int64_t unit_bytes = 0;
};

}  // namespace cistron::comm
