#include "cistron/comm/nccl/testing/through_device.h"

#include <string>
#include <utility>

namespace cistron::comm::nccl {
namespace {

// Device copies of an operation's tensors. One that is part of the other stays so.
struct Copies {
  Copies(const Operation& op, Device device) {
    if (op.input) input = op.input.To(device);
    if (!op.output) return;
    output = op.output.raw() == op.input.raw() && op.output.bytes() == op.input.bytes()
                 ? input
                 : Part(op.output, op.input, input, device);
    if (op.input && output.raw() != input.raw()) {
      const Tensor part = Part(op.input, op.output, output, device);
      if (Inside(op.input, op.output)) input = part;
    }
  }

  Tensor input, output;

 private:
  static bool Inside(const Tensor& part, const Tensor& whole) {
    const char* p = static_cast<const char*>(part.raw());
    const char* w = static_cast<const char*>(whole.raw());
    return whole && part.bytes() > 0 && p >= w && p + part.bytes() <= w + whole.bytes();
  }
  static Tensor Part(const Tensor& part, const Tensor& whole, const Tensor& copy, Device device) {
    if (!Inside(part, whole)) return part.To(device);
    const auto offset =
        (static_cast<const char*>(part.raw()) - static_cast<const char*>(whole.raw())) /
        static_cast<std::ptrdiff_t>(SizeOf(part.dtype()));
    return copy.Reshape({copy.numel()}).Slice(0, offset, part.numel()).Reshape(part.shape());
  }
};

class CopyBack final : public Work::State {
 public:
  CopyBack(Work work, Tensor from, Tensor to)
      : work_(std::move(work)), from_(std::move(from)), to_(std::move(to)) {}
  void Wait() override {
    work_.Wait();
    if (to_) CopyTo(from_, to_);
    to_ = {};
  }
  bool Done() override { return work_.Done(); }

 private:
  Work work_;
  Tensor from_, to_;
};

class DeviceCopies final : public Communicator {
 public:
  DeviceCopies(Communicator& ranks, std::unique_ptr<Communicator> own, Device device)
      : own_(std::move(own)), ranks_(ranks), device_(device) {}

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  const std::string& name() const override { return ranks_.name(); }
  std::string_view transport() const override { return ranks_.transport(); }
  std::unique_ptr<Communicator> Split(int color, int key, std::string name) override {
    std::unique_ptr<Communicator> child = ranks_.Split(color, key, std::move(name));
    if (!child) return nullptr;
    Communicator& ranks = *child;
    return std::make_unique<DeviceCopies>(ranks, std::move(child), device_);
  }

 protected:
  void Run(Operation op) override {
    const Copies c(op, device_);
    const Signature& s = op.signature;
    switch (s.kind) {
      case OpKind::kAllReduce: ranks_.AllReduce(c.input, s.reduce); break;
      case OpKind::kReduceScatter: ranks_.ReduceScatter(c.input, c.output, s.reduce, op.to); break;
      case OpKind::kAllGather: ranks_.AllGather(c.input, c.output, op.from); break;
      case OpKind::kAllToAll: ranks_.AllToAll(c.input, op.to, c.output, op.from); break;
      case OpKind::kBroadcast: ranks_.Broadcast(c.input, s.peer); break;
      case OpKind::kBarrier: ranks_.Barrier(); break;
      case OpKind::kSend: ranks_.Send(c.input, s.peer); break;
      case OpKind::kRecv: ranks_.Recv(c.output, s.peer); break;
    }
    if (op.output) CopyTo(c.output, op.output);
  }
  Work Start(Operation op) override {
    const Copies c(op, device_);
    const Signature& s = op.signature;
    Work work;
    switch (s.kind) {
      case OpKind::kAllReduce: work = ranks_.AllReduceAsync(c.input, s.reduce); break;
      case OpKind::kReduceScatter:
        work = ranks_.ReduceScatterAsync(c.input, c.output, s.reduce, op.to);
        break;
      case OpKind::kAllGather: work = ranks_.AllGatherAsync(c.input, c.output, op.from); break;
      case OpKind::kAllToAll: work = ranks_.AllToAllAsync(c.input, op.to, c.output, op.from); break;
      case OpKind::kBroadcast: work = ranks_.BroadcastAsync(c.input, s.peer); break;
      case OpKind::kBarrier: break;
      case OpKind::kSend: work = ranks_.SendAsync(c.input, s.peer); break;
      case OpKind::kRecv: work = ranks_.RecvAsync(c.output, s.peer); break;
    }
    return Work(std::make_shared<CopyBack>(std::move(work), c.output, op.output));
  }

 private:
  std::unique_ptr<Communicator> own_;
  Communicator& ranks_;
  Device device_;
};

}  // namespace

std::unique_ptr<Communicator> ThroughDevice(Communicator& ranks, Device device) {
  return std::make_unique<DeviceCopies>(ranks, nullptr, device);
}

}  // namespace cistron::comm::nccl
