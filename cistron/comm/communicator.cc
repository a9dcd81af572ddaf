// Arguments of collectives become checked operations.
#include "cistron/comm/communicator.h"

#include <fmt/ranges.h>

#include <utility>

#include "cistron/base/error.h"
#include "cistron/comm/reduce.h"

namespace cistron::comm {
namespace {

void CheckTensor(OpKind kind, std::string_view which, const Tensor& t) {
  CISTRON_CHECK(t, "{}: {} is not given", Name(kind), which);
  CISTRON_CHECK(t.IsContiguous(), "{}: {}, {}, is not contiguous; pass a Clone() or a whole tensor",
                Name(kind), which, Describe(t));
}

void CheckReduction(OpKind kind, const Tensor& t) {
  CISTRON_CHECK(CanReduce(t.dtype()),
                "{}: {} cannot be reduced; f32, f64, bf16 and i64 can. Convert it first",
                Name(kind), Describe(t));
}

void CheckSameDType(OpKind kind, const Tensor& input, const Tensor& output) {
  CISTRON_CHECK(input.dtype() == output.dtype(), "{}: input is {} and output is {}", Name(kind),
                Describe(input), Describe(output));
}

// Sum of counts, one for each rank.
std::int64_t CheckedSum(OpKind kind, std::string_view which, std::span<const std::int64_t> counts,
                        int ranks) {
  CISTRON_CHECK(counts.size() == static_cast<std::size_t>(ranks),
                "{}: {} {} are given, but the communicator has {} ranks", Name(kind), counts.size(),
                which, ranks);
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    CISTRON_CHECK(count >= 0, "{}: {} [{}] hold a negative number", Name(kind), which,
                  fmt::join(counts, ", "));
    CISTRON_CHECK(!__builtin_add_overflow(sum, count, &sum), "{}: {} sum to more than 2^63 - 1",
                  Name(kind), which);
  }
  return sum;
}

// Counts as given, or equal parts of `whole` where none are.
std::vector<std::int64_t> PartCounts(OpKind kind, const Tensor& whole,
                                     std::span<const std::int64_t> counts, int ranks) {
  if (counts.empty()) {
    CISTRON_CHECK(whole.numel() % ranks == 0,
                  "{}: {} cannot be cut in equal parts for {} ranks; give counts", Name(kind),
                  Describe(whole), ranks);
    return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), whole.numel() / ranks);
  }
  const std::int64_t sum = CheckedSum(kind, "counts", counts, ranks);
  CISTRON_CHECK(sum == whole.numel(), "{}: counts sum to {}, but {} has {} elements", Name(kind),
                sum, Describe(whole), whole.numel());
  return {counts.begin(), counts.end()};
}

std::int64_t RowElements(OpKind kind, std::string_view which, const Tensor& t) {
  CISTRON_CHECK(t.rank() >= 1, "{}: {} is a scalar; rows are slices of the first dimension",
                Name(kind), which);
  std::int64_t elements = 1;
  for (int i = 1; i < t.rank(); ++i) elements *= t.dim(i);
  return elements;
}

bool Overlap(const Tensor& a, const Tensor& b) {
  const char* first = static_cast<const char*>(a.raw());
  const char* second = static_cast<const char*>(b.raw());
  return a.bytes() > 0 && b.bytes() > 0 && first < second + b.bytes() && second < first + a.bytes();
}

// The part of a gather or scatter that belongs to a rank is apart from the whole, or that very
// part.
void CheckPart(OpKind kind, const Tensor& part, const Tensor& whole,
               std::span<const std::int64_t> counts, int rank) {
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];
  CISTRON_CHECK(part.numel() == own,
                "{}: the part of rank {} is {}, {} elements, but its count is {}", Name(kind), rank,
                Describe(part), part.numel(), own);
  if (!Overlap(part, whole)) return;
  std::int64_t offset = 0;
  for (int r = 0; r < rank; ++r) offset += counts[static_cast<std::size_t>(r)];
  const char* place = static_cast<const char*>(whole.raw()) +
                      offset * static_cast<std::int64_t>(SizeOf(whole.dtype()));
  CISTRON_CHECK(part.raw() == place,
                "{}: input and output overlap, and not at the part of rank {} (element {})",
                Name(kind), rank, offset);
}

void CheckRank(OpKind kind, std::string_view which, int rank, int ranks) {
  CISTRON_CHECK(rank >= 0 && rank < ranks, "{}: {} is {}, but ranks are 0 … {}", Name(kind), which,
                rank, ranks - 1);
}

}  // namespace

Operation Communicator::MakeAllReduce(const Tensor& t, ReduceOp reduce) const {
  constexpr OpKind kKind = OpKind::kAllReduce;
  CheckTensor(kKind, "the tensor", t);
  CheckReduction(kKind, t);
  Operation op;
  op.signature = {.kind = kKind, .reduce = reduce, .dtype = t.dtype(), .elements = t.numel()};
  op.input = op.output = t;
  return op;
}

Operation Communicator::MakeReduceScatter(const Tensor& input, const Tensor& output,
                                          ReduceOp reduce,
                                          std::span<const std::int64_t> counts) const {
  constexpr OpKind kKind = OpKind::kReduceScatter;
  CheckTensor(kKind, "input", input);
  CheckTensor(kKind, "output", output);
  CheckSameDType(kKind, input, output);
  CheckReduction(kKind, input);
  Operation op;
  op.to = PartCounts(kKind, input, counts, size());
  CheckPart(kKind, output, input, op.to, rank());
  op.from.assign(op.to.size(), output.numel());
  op.unit_bytes = static_cast<std::int64_t>(SizeOf(input.dtype()));
  op.signature = {
      .kind = kKind, .reduce = reduce, .dtype = input.dtype(), .elements = input.numel()};
  op.input = input;
  op.output = output;
  return op;
}

Operation Communicator::MakeAllGather(const Tensor& input, const Tensor& output,
                                      std::span<const std::int64_t> counts) const {
  constexpr OpKind kKind = OpKind::kAllGather;
  CheckTensor(kKind, "input", input);
  CheckTensor(kKind, "output", output);
  CheckSameDType(kKind, input, output);
  Operation op;
  op.from = PartCounts(kKind, output, counts, size());
  CheckPart(kKind, input, output, op.from, rank());
  op.to.assign(op.from.size(), input.numel());
  op.unit_bytes = static_cast<std::int64_t>(SizeOf(input.dtype()));
  op.signature = {.kind = kKind, .dtype = input.dtype(), .elements = output.numel()};
  op.input = input;
  op.output = output;
  return op;
}

Operation Communicator::MakeAllToAll(const Tensor& input, std::span<const std::int64_t> send_counts,
                                     const Tensor& output,
                                     std::span<const std::int64_t> recv_counts) const {
  constexpr OpKind kKind = OpKind::kAllToAll;
  CheckTensor(kKind, "input", input);
  CheckTensor(kKind, "output", output);
  CheckSameDType(kKind, input, output);
  const std::int64_t row = RowElements(kKind, "input", input);
  CISTRON_CHECK(row == RowElements(kKind, "output", output),
                "{}: rows of input, {}, and output, {}, differ", Name(kKind), Describe(input),
                Describe(output));
  const std::int64_t sent = CheckedSum(kKind, "send_counts", send_counts, size());
  const std::int64_t received = CheckedSum(kKind, "recv_counts", recv_counts, size());
  CISTRON_CHECK(sent <= input.dim(0), "{}: send_counts sum to {} rows, but input is {}",
                Name(kKind), sent, Describe(input));
  CISTRON_CHECK(received <= output.dim(0), "{}: recv_counts sum to {} rows, but output is {}",
                Name(kKind), received, Describe(output));
  const std::size_t self = static_cast<std::size_t>(rank());
  CISTRON_CHECK(send_counts[self] == recv_counts[self],
                "{}: rank {} sends itself {} rows and expects {}", Name(kKind), rank(),
                send_counts[self], recv_counts[self]);
  CISTRON_CHECK(!Overlap(input, output), "{}: input and output overlap", Name(kKind));
  Operation op;
  op.to.assign(send_counts.begin(), send_counts.end());
  op.from.assign(recv_counts.begin(), recv_counts.end());
  op.unit_bytes = row * static_cast<std::int64_t>(SizeOf(input.dtype()));
  op.signature = {.kind = kKind, .dtype = input.dtype(), .row_elements = row};
  op.input = input;
  op.output = output;
  return op;
}

Operation Communicator::MakeBroadcast(const Tensor& t, int root) const {
  constexpr OpKind kKind = OpKind::kBroadcast;
  CheckTensor(kKind, "the tensor", t);
  CheckRank(kKind, "root", root, size());
  Operation op;
  op.signature = {.kind = kKind, .dtype = t.dtype(), .peer = root, .elements = t.numel()};
  op.input = op.output = t;
  return op;
}

Operation Communicator::MakePointToPoint(OpKind kind, const Tensor& t, int peer) const {
  CheckTensor(kind, "the tensor", t);
  CheckRank(kind, "the other rank", peer, size());
  CISTRON_CHECK(peer != rank(), "{}: rank {} is this rank; copy instead", Name(kind), peer);
  Operation op;
  op.signature = {.kind = kind, .dtype = t.dtype(), .peer = peer, .elements = t.numel()};
  (kind == OpKind::kSend ? op.input : op.output) = t;
  return op;
}

void Communicator::RunObserved(Operation operation) {
  if (observer_ != nullptr) observer_->Begin(Name(operation.signature.kind), transport());
  Run(std::move(operation));
}

void Communicator::AllReduce(const Tensor& t, ReduceOp reduce) {
  RunObserved(MakeAllReduce(t, reduce));
}
Work Communicator::AllReduceAsync(const Tensor& t, ReduceOp reduce) {
  return Start(MakeAllReduce(t, reduce));
}

void Communicator::ReduceScatter(const Tensor& input, const Tensor& output, ReduceOp reduce,
                                 std::span<const std::int64_t> counts) {
  RunObserved(MakeReduceScatter(input, output, reduce, counts));
}
Work Communicator::ReduceScatterAsync(const Tensor& input, const Tensor& output, ReduceOp reduce,
                                      std::span<const std::int64_t> counts) {
  return Start(MakeReduceScatter(input, output, reduce, counts));
}

void Communicator::AllGather(const Tensor& input, const Tensor& output,
                             std::span<const std::int64_t> counts) {
  RunObserved(MakeAllGather(input, output, counts));
}
Work Communicator::AllGatherAsync(const Tensor& input, const Tensor& output,
                                  std::span<const std::int64_t> counts) {
  return Start(MakeAllGather(input, output, counts));
}

void Communicator::AllToAll(const Tensor& input, std::span<const std::int64_t> send_counts,
                            const Tensor& output, std::span<const std::int64_t> recv_counts) {
  RunObserved(MakeAllToAll(input, send_counts, output, recv_counts));
}
Work Communicator::AllToAllAsync(const Tensor& input, std::span<const std::int64_t> send_counts,
                                 const Tensor& output, std::span<const std::int64_t> recv_counts) {
  return Start(MakeAllToAll(input, send_counts, output, recv_counts));
}

void Communicator::Broadcast(const Tensor& t, int root) {
  RunObserved(MakeBroadcast(t, root));
}
Work Communicator::BroadcastAsync(const Tensor& t, int root) {
  return Start(MakeBroadcast(t, root));
}

void Communicator::Barrier() {
  RunObserved(Operation{});
}

void Communicator::Send(const Tensor& t, int to) {
  RunObserved(MakePointToPoint(OpKind::kSend, t, to));
}
Work Communicator::SendAsync(const Tensor& t, int to) {
  return Start(MakePointToPoint(OpKind::kSend, t, to));
}
void Communicator::Recv(const Tensor& t, int from) {
  RunObserved(MakePointToPoint(OpKind::kRecv, t, from));
}
Work Communicator::RecvAsync(const Tensor& t, int from) {
  return Start(MakePointToPoint(OpKind::kRecv, t, from));
}

}  // namespace cistron::comm
