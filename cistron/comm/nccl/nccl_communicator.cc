#include "cistron/comm/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "cistron/comm/nccl/library.h"
#include "cistron/comm/nccl/reduce_ranks.h"
#include "cistron/comm/nccl/watchdog.h"
#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::comm::nccl {
namespace {

// Parts of an all-reduce begin at multiples of what a link moves at once.
constexpr std::int64_t kAlign = 16;

std::byte* Bytes(const Tensor& t) {
  return static_cast<std::byte*>(t.raw());
}

std::int64_t ElementBytes(const Operation& op) {
  return static_cast<std::int64_t>(SizeOf(op.signature.dtype));
}

const Tensor& Either(const Operation& op) {
  return op.input ? op.input : op.output;
}

bool ByHost(const Operation& op) {
  return op.signature.kind == OpKind::kBarrier || OnHost(Either(op));
}

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kF32: return ncclFloat32;
    case DType::kF64: return ncclFloat64;
    case DType::kBF16: return ncclBfloat16;
    case DType::kI64: return ncclInt64;
    default: break;
  }
  CISTRON_THROW(kUnsupported, "nccl: {} cannot be reduced", Name(dtype));
}

// What all communicators of a rank share.
struct Shared {
  Shared(Device where, const ConnectOptions& o)
      : device(where), options(o), watchdog(where.index, o.communicator.limit, o.on_failure) {}
  const Device device;
  const ConnectOptions options;
  Watchdog watchdog;
};

// An operation on a stream beside the main one, and the tensors that it uses, which were given out
// in the order of the main stream and so must not be freed before that has waited.
class StreamWork final : public Work::State {
 public:
  StreamWork(Device device, std::shared_ptr<EventHandle> ended, std::vector<Tensor> kept)
      : device_(device), ended_(std::move(ended)), kept_(std::move(kept)) {}
  ~StreamWork() override {
    if (!kept_.empty()) cudaStreamWaitEvent(Main(), ended_->get(), 0);
  }
  void Wait() override {
    if (kept_.empty()) return;
    cuda::Check(cudaStreamWaitEvent(Main(), ended_->get(), 0), "cudaStreamWaitEvent");
    kept_.clear();
  }
  bool Done() override { return true; }

 private:
  cudaStream_t Main() const {
    return static_cast<cudaStream_t>(cuda::MainStream(device_.index).handle);
  }
  Device device_;
  std::shared_ptr<EventHandle> ended_;
  std::vector<Tensor> kept_;
};

// A device tensor that comes by host memory.
class HostReceive final : public Work::State {
 public:
  HostReceive(Work work, Tensor host, Tensor output)
      : work_(std::move(work)), host_(std::move(host)), output_(std::move(output)) {}
  void Wait() override {
    work_.Wait();
    if (output_) CopyTo(host_, output_);
    output_ = {};
  }
  bool Done() override { return work_.Done(); }

 private:
  Work work_;
  Tensor host_, output_;
};

class NcclCommunicator final : public Communicator {
 public:
  // `own` holds `control`, or is null where somebody else does.
  NcclCommunicator(Communicator& control, std::unique_ptr<Communicator> own,
                   std::shared_ptr<Shared> shared)
      : own_control_(std::move(own)),
        control_(control),
        shared_(std::move(shared)),
        subject_(
            shared_->watchdog.Add(fmt::format("comm: rank {} of {} in '{}' (nccl)", control.rank(),
                                              control.size(), control.name()))) {}
  ~NcclCommunicator() override {
    shared_->watchdog.Remove(*subject_);
    // An exception of this rank alone: the others may never come to what was queued.
    const bool failing = std::uncaught_exceptions() > exceptions_;
    if (comm_ != nullptr) {
      if (failing) {
        Nccl().CommAbort(comm_);
      } else {
        cudaStreamSynchronize(Main());
        if (side_ != nullptr) cudaStreamSynchronize(side_);
        Nccl().CommDestroy(comm_);
      }
    }
    if (side_ != nullptr) cudaStreamDestroy(side_);
  }

  int rank() const override { return control_.rank(); }
  int size() const override { return control_.size(); }
  const std::string& name() const override { return control_.name(); }
  std::string_view transport() const override { return "nccl"; }

  void Watch(const std::string& text, const std::function<void()>& queue,
             const std::function<std::string()>& why);

  std::unique_ptr<Communicator> Split(int color, int key, std::string name) override {
    std::unique_ptr<Communicator> child = control_.Split(color, key, std::move(name));
    if (!child) return nullptr;
    Communicator& control = *child;
    return std::make_unique<NcclCommunicator>(control, std::move(child), shared_);
  }

 protected:
  void Run(Operation op) override;
  Work Start(Operation op) override;

 private:
  cudaStream_t Main() const {
    return static_cast<cudaStream_t>(cuda::MainStream(shared_->device.index).handle);
  }
  std::size_t Peers() const { return static_cast<std::size_t>(size()); }
  Work ByControl(const Operation& op);
  void CheckPlace(const Operation& op) const;
  void CheckSameOperation(const Operation& op);
  void Connect();
  bool AddsHere(const Operation& op) const;
  std::int64_t ScratchBytes(const Operation& op) const;
  Tensor Scratch(const Operation& op) const;
  Tensor SideScratch(const Operation& op);
  std::shared_ptr<EventHandle> Queue(const Operation& op, cudaStream_t stream,
                                     const Tensor& scratch);
  void Carry(const Operation& op, cudaStream_t stream, const Tensor& scratch);
  void CarryAllReduce(const Operation& op, cudaStream_t stream, const Tensor& scratch);
  void CarryReduceScatter(const Operation& op, cudaStream_t stream, const Tensor& scratch);
  void CarryRows(const Operation& op, cudaStream_t stream);

  const std::unique_ptr<Communicator> own_control_;
  Communicator& control_;
  const std::shared_ptr<Shared> shared_;
  const std::shared_ptr<Watchdog::Subject> subject_;
  const int exceptions_ = std::uncaught_exceptions();
  ncclComm_t comm_ = nullptr;
  cudaStream_t side_ = nullptr;              // of operations that are started
  std::shared_ptr<EventHandle> side_ended_;  // the last of them
  Tensor side_scratch_;                      // of all of them, which run one after the other
  std::int64_t sequence_ = 0;
};

// Bytes between this rank and another, in one group of NCCL.
class Group {
 public:
  Group(ncclComm_t comm, cudaStream_t stream) : comm_(comm), stream_(stream) {
    Check(Nccl().GroupStart(), "ncclGroupStart");
  }
  void Send(const std::byte* data, std::int64_t bytes, int to) {
    if (bytes == 0) return;
    Check(Nccl().Send(data, static_cast<std::size_t>(bytes), ncclUint8, to, comm_, stream_),
          "ncclSend");
  }
  void Recv(std::byte* data, std::int64_t bytes, int from) {
    if (bytes == 0) return;
    Check(Nccl().Recv(data, static_cast<std::size_t>(bytes), ncclUint8, from, comm_, stream_),
          "ncclRecv");
  }
  void End() { Check(Nccl().GroupEnd(), "ncclGroupEnd"); }

 private:
  ncclComm_t comm_;
  cudaStream_t stream_;
};

void NcclCommunicator::Run(Operation op) {
  if (ByHost(op) || !IsCollective(op.signature.kind)) return ByControl(op).Wait();
  CheckPlace(op);
  // A blocking call comes after what was started.
  if (side_ended_) {
    cuda::Check(cudaStreamWaitEvent(Main(), side_ended_->get(), 0), "cudaStreamWaitEvent");
    side_ended_ = nullptr;
  }
  Queue(op, Main(), Scratch(op));
}

Work NcclCommunicator::Start(Operation op) {
  if (ByHost(op) || !IsCollective(op.signature.kind)) return ByControl(op);
  CheckPlace(op);
  if (side_ == nullptr) {
    // Others wait for these kernels: they get a multiprocessor before those of the main stream.
    int least = 0, greatest = 0;
    cuda::Check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                "cudaDeviceGetStreamPriorityRange");
    cuda::Check(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest),
                "cudaStreamCreate");
  }
  const Tensor scratch = SideScratch(op);
  // After the scratch memory was given out: what used it before is queued on the main stream.
  const EventHandle given;
  cuda::Check(cudaEventRecord(given.get(), Main()), "cudaEventRecord");
  cuda::Check(cudaStreamWaitEvent(side_, given.get(), 0), "cudaStreamWaitEvent");
  side_ended_ = Queue(op, side_, scratch);
  return Work(std::make_shared<StreamWork>(shared_->device, side_ended_,
                                           std::vector<Tensor>{op.input, op.output}));
}

Work NcclCommunicator::ByControl(const Operation& op) {
  const Signature& s = op.signature;
  switch (s.kind) {
    case OpKind::kAllReduce: return control_.AllReduceAsync(op.input, s.reduce);
    case OpKind::kReduceScatter:
      return control_.ReduceScatterAsync(op.input, op.output, s.reduce, op.to);
    case OpKind::kAllGather: return control_.AllGatherAsync(op.input, op.output, op.from);
    case OpKind::kAllToAll: return control_.AllToAllAsync(op.input, op.to, op.output, op.from);
    case OpKind::kBroadcast: return control_.BroadcastAsync(op.input, s.peer);
    case OpKind::kBarrier: control_.Barrier(); return {};
    case OpKind::kSend: return control_.SendAsync(op.input.ToHost(), s.peer);
    case OpKind::kRecv: break;
  }
  if (OnHost(op.output)) return control_.RecvAsync(op.output, s.peer);
  const Tensor host = Tensor::Empty(op.output.shape(), op.output.dtype());
  return Work(std::make_shared<HostReceive>(control_.RecvAsync(host, s.peer), host, op.output));
}

void NcclCommunicator::CheckPlace(const Operation& op) const {
  for (const Tensor* t : {&op.input, &op.output}) {
    CISTRON_CHECK(t->device() == shared_->device, "{}: {} is on {}, and this rank's GPU is {}",
                  Name(op.signature.kind), cistron::Describe(*t), ToString(t->device()),
                  ToString(shared_->device));
  }
}

// Ranks tell each other over the control communicator what they call.
void NcclCommunicator::CheckSameOperation(const Operation& op) {
  const std::int64_t n = size();
  // Signature, place in the sequence, counts to and from every rank.
  const std::int64_t words = sizeof(Signature) / 8 + 1 + 2 * n;
  const Tensor own = Tensor::Zeros({words}, DType::kI64);
  const Tensor all = Tensor::Empty({n, words}, DType::kI64);
  std::int64_t* at = own.data<std::int64_t>();
  std::memcpy(at, &op.signature, sizeof(Signature));
  at += sizeof(Signature) / 8;
  *at++ = sequence_;
  std::copy(op.to.begin(), op.to.end(), at);
  std::copy(op.from.begin(), op.from.end(), at + n);
  control_.AllGather(own, all);
  // Every rank sees the same table and finds the same pair: all of them throw.
  const auto row = [&](std::int64_t r) { return all.data<std::int64_t>() + r * words; };
  const std::int64_t counts = sizeof(Signature) / 8 + 1;
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t s = 0; s < r; ++s) {
      Signature a, b;
      std::memcpy(static_cast<void*>(&a), row(s), sizeof(Signature));
      std::memcpy(static_cast<void*>(&b), row(r), sizeof(Signature));
      const std::int64_t a_sequence = row(s)[counts - 1], b_sequence = row(r)[counts - 1];
      if (!(a == b) || a_sequence != b_sequence) {
        CISTRON_THROW(kIo,
                      "comm: in '{}' rank {} calls {} as operation {}, which does not match rank "
                      "{}, which calls {} as operation {}",
                      name(), s, comm::Describe(a), a_sequence, r, comm::Describe(b), b_sequence);
      }
      const std::int64_t a_to = row(s)[counts + r], b_from = row(r)[counts + n + s];
      const std::int64_t b_to = row(r)[counts + s], a_from = row(s)[counts + n + r];
      if (a_to != b_from || b_to != a_from) {
        CISTRON_THROW(
            kIo,
            "comm: in '{}' counts of {} (operation {}) do not match: rank {} sends {} and "
            "expects {}, rank {} expects {} and sends {}",
            name(), comm::Describe(a), a_sequence, s, a_to, a_from, r, b_from, b_to);
      }
    }
  }
}

// The first rank makes an id, by which all of them find each other.
void NcclCommunicator::Connect() {
  if (comm_ != nullptr || size() == 1) return;
  ncclUniqueId id{};
  if (rank() == 0) Check(Nccl().GetUniqueId(&id), "ncclGetUniqueId");
  control_.Broadcast(Tensor::Borrow(&id, {static_cast<std::int64_t>(sizeof(id))}, DType::kU8), 0);
  cuda::Check(cudaSetDevice(shared_->device.index), "cudaSetDevice");
  Check(Nccl().CommInitRank(&comm_, size(), id, rank()), "ncclCommInitRank");
  shared_->watchdog.SetComm(*subject_, comm_);
}

std::shared_ptr<EventHandle> NcclCommunicator::Queue(const Operation& op, cudaStream_t stream,
                                                     const Tensor& scratch) {
  ++sequence_;
  if (size() > 1) {
    if (shared_->options.communicator.checked) CheckSameOperation(op);
    shared_->watchdog.Begin(
        *subject_, fmt::format("operation {}, {}", sequence_, comm::Describe(op.signature)),
        EventHandle::Recorded(stream));
    Connect();
  }
  Carry(op, stream, scratch);
  auto ended = EventHandle::Recorded(stream);
  if (size() > 1) shared_->watchdog.Queued(*subject_, ended);
  return ended;
}

void NcclCommunicator::Watch(const std::string& text, const std::function<void()>& queue,
                             const std::function<std::string()>& why) {
  ++sequence_;
  shared_->watchdog.Begin(*subject_, fmt::format("operation {}, {}", sequence_, text),
                          EventHandle::Recorded(Main()), why);
  queue();
  shared_->watchdog.Queued(*subject_, EventHandle::Recorded(Main()));
}

// Whether a reduction is added by reduce_ranks.h. NCCL keeps the order of the ranks where there are
// two, and has no reduce-scatter of unequal parts.
bool NcclCommunicator::AddsHere(const Operation& op) const {
  const ConnectOptions& options = shared_->options;
  const auto unequal = [](const std::vector<std::int64_t>& counts) {
    return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) != counts.end();
  };
  if (!IsReduction(op.signature.kind) || size() == 1) return false;
  if (options.own_sums || op.signature.reduce != ReduceOp::kSum || unequal(op.to)) return true;
  return options.rank_order && size() > 2;
}

std::int64_t NcclCommunicator::ScratchBytes(const Operation& op) const {
  if (!AddsHere(op)) return 0;
  const std::int64_t n = size();
  const std::int64_t own = op.signature.kind == OpKind::kReduceScatter
                               ? op.from[0] * ElementBytes(op)
                               : (op.input.bytes() + n - 1) / n + 2 * kAlign;
  // No less than a round's smallest part from each.
  return std::min(n * own, std::max(shared_->options.scratch_bytes, n * 2 * kAlign));
}

Tensor NcclCommunicator::Scratch(const Operation& op) const {
  const std::int64_t bytes = ScratchBytes(op);
  if (bytes == 0) return {};
  return Tensor::Empty({bytes}, DType::kU8, cuda::DeviceAllocator(shared_->device.index));
}

// As many bytes as Scratch's, so that rounds are the same, however many sums are under way.
Tensor NcclCommunicator::SideScratch(const Operation& op) {
  const std::int64_t bytes = ScratchBytes(op);
  if (bytes == 0) return {};
  if (!side_scratch_ || side_scratch_.bytes() < bytes) {
    // Memory is given out again in the order of the main stream, which must be behind its last use.
    if (side_ended_) {
      cuda::Check(cudaStreamWaitEvent(Main(), side_ended_->get(), 0), "cudaStreamWaitEvent");
    }
    side_scratch_ = {};
    side_scratch_ = Scratch(op);
  }
  return side_scratch_.Slice(0, 0, bytes);
}

void NcclCommunicator::Carry(const Operation& op, cudaStream_t stream, const Tensor& scratch) {
  switch (op.signature.kind) {
    case OpKind::kAllReduce: return CarryAllReduce(op, stream, scratch);
    case OpKind::kReduceScatter: return CarryReduceScatter(op, stream, scratch);
    case OpKind::kAllGather:
    case OpKind::kAllToAll: return CarryRows(op, stream);
    case OpKind::kBroadcast:
      if (size() == 1 || op.input.bytes() == 0) return;
      return Check(Nccl().Broadcast(op.input.raw(), op.output.raw(),
                                    static_cast<std::size_t>(op.input.bytes()), ncclUint8,
                                    op.signature.peer, comm_, stream),
                   "ncclBroadcast");
    default: break;
  }
  CISTRON_THROW(kInternal, "nccl: {} is no operation of a stream", Name(op.signature.kind));
}

void NcclCommunicator::CarryAllReduce(const Operation& op, cudaStream_t stream,
                                      const Tensor& scratch) {
  const std::int64_t n = size(), element = ElementBytes(op), total = op.signature.elements;
  if (n == 1 || total == 0) return;
  std::byte* data = Bytes(op.input);
  if (!AddsHere(op)) {
    return Check(Nccl().AllReduce(data, data, static_cast<std::size_t>(total),
                                  NcclType(op.signature.dtype), ncclSum, comm_, stream),
                 "ncclAllReduce");
  }
  // Rounds of a reduce-scatter and an all-gather over elements that fit the scratch memory. In
  // place: other ranks read the slices that are theirs, this rank writes its own, then the others'.
  const std::int64_t align = kAlign / element;
  const std::int64_t most = scratch.bytes() / (n * kAlign) * align;  // elements of a slice
  for (std::int64_t begin = 0; begin < total; begin += n * most) {
    const std::int64_t count = std::min(n * most, total - begin);
    const std::int64_t slice = ((count + n - 1) / n + align - 1) / align * align;
    const auto start = [&](std::int64_t r) {
      return (begin + std::min(count, r * slice)) * element;
    };
    const auto bytes = [&](std::int64_t r) { return start(r + 1) - start(r); };
    const std::int64_t own = bytes(rank());
    Group scatter(comm_, stream);
    for (int r = 0; r < n; ++r) {
      if (r == rank()) continue;
      scatter.Send(data + start(r), bytes(r), r);
      scatter.Recv(Bytes(scratch) + r * own, own, r);
    }
    scatter.End();
    ReduceRanks(op.signature.reduce, op.signature.dtype,
                {.own = data + start(rank()),
                 .received = Bytes(scratch),
                 .stride = own / element,
                 .rank = rank(),
                 .ranks = size()},
                own / element, data + start(rank()), stream);
    Group gather(comm_, stream);
    for (int r = 0; r < n; ++r) {
      if (r == rank()) continue;
      gather.Send(data + start(rank()), own, r);
      gather.Recv(data + start(r), bytes(r), r);
    }
    gather.End();
  }
}

void NcclCommunicator::CarryReduceScatter(const Operation& op, cudaStream_t stream,
                                          const Tensor& scratch) {
  const std::int64_t n = size(), element = ElementBytes(op);
  if (n == 1) return CarryRows(op, stream);
  if (!AddsHere(op)) {
    if (op.output.numel() == 0) return;
    return Check(Nccl().ReduceScatter(op.input.raw(), op.output.raw(),
                                      static_cast<std::size_t>(op.output.numel()),
                                      NcclType(op.signature.dtype), ncclSum, comm_, stream),
                 "ncclReduceScatter");
  }
  // Rounds have as many elements on every rank; those of short parts are empty at last.
  const std::int64_t longest = *std::max_element(op.to.begin(), op.to.end());
  const std::int64_t block =
      std::max(shared_->options.scratch_bytes, n * 2 * kAlign) / (n * element);
  for (std::int64_t begin = 0; begin < longest; begin += block) {
    const auto elements = [&](std::int64_t count) {
      return std::clamp<std::int64_t>(count - begin, 0, block);
    };
    const std::int64_t own = elements(op.from[0]) * element;
    const std::byte* part = Bytes(op.input);
    const std::byte* mine = nullptr;
    Group scatter(comm_, stream);
    for (int r = 0; r < n; ++r) {
      const std::int64_t count = op.to[static_cast<std::size_t>(r)];
      const std::byte* here = part + std::min(begin, count) * element;
      part += count * element;
      if (r == rank()) {
        mine = here;
        continue;
      }
      scatter.Send(here, elements(count) * element, r);
      scatter.Recv(Bytes(scratch) + r * own, own, r);
    }
    scatter.End();
    ReduceRanks(op.signature.reduce, op.signature.dtype,
                {.own = mine,
                 .received = Bytes(scratch),
                 .stride = own / element,
                 .rank = rank(),
                 .ranks = size()},
                own / element, Bytes(op.output) + begin * element, stream);
  }
}

// AllGather, AllToAll; of one rank ReduceScatter too.
void NcclCommunicator::CarryRows(const Operation& op, cudaStream_t stream) {
  const bool gathers = op.signature.kind == OpKind::kAllGather;
  const bool equal =
      std::adjacent_find(op.from.begin(), op.from.end(), std::not_equal_to<>()) == op.from.end();
  if (gathers && equal && size() > 1) {
    if (op.input.bytes() == 0) return;
    return Check(
        Nccl().AllGather(op.input.raw(), op.output.raw(),
                         static_cast<std::size_t>(op.input.bytes()), ncclUint8, comm_, stream),
        "ncclAllGather");
  }
  const std::byte* from = Bytes(op.input);
  std::byte* to = Bytes(op.output);
  std::optional<Group> group;
  if (size() > 1) group.emplace(comm_, stream);
  for (int r = 0; r < size(); ++r) {
    const std::int64_t sent = op.to[static_cast<std::size_t>(r)] * op.unit_bytes;
    const std::int64_t received = op.from[static_cast<std::size_t>(r)] * op.unit_bytes;
    if (r != rank()) {
      group->Send(from, sent, r);
      group->Recv(to, received, r);
    } else if (to != from && sent > 0) {
      cuda::Check(
          cudaMemcpyAsync(to, from, static_cast<std::size_t>(sent), cudaMemcpyDefault, stream),
          "cudaMemcpyAsync");
    }
    if (!gathers) from += sent;
    to += received;
  }
  if (group) group->End();
}

}  // namespace

void Watch(Communicator& group, const std::string& text, const std::function<void()>& queue,
           const std::function<std::string()>& why) {
  auto* nccl = dynamic_cast<NcclCommunicator*>(&group);
  CISTRON_CHECK(nccl != nullptr, "nccl: '{}' ({}) is no communicator of GPUs", group.name(),
                group.transport());
  nccl->Watch(text, queue, why);
}

std::unique_ptr<Communicator> MakeNcclCommunicator(Communicator& control, Device device,
                                                   const ConnectOptions& options) {
  return std::make_unique<NcclCommunicator>(control, nullptr,
                                            std::make_shared<Shared>(device, options));
}

}  // namespace cistron::comm::nccl
