// What every op is told about where and how to run.
#pragma once

#include <memory>
#include <string>

#include "cistron/ops/op_recorder.h"
#include "cistron/tensor/tensor.h"

namespace cistron::ops {

// Passed to every op. Cheap to copy. Threads are those of base/threads.h.
class Context {
 public:
  // A CPU context. Reads CISTRON_IMPL once, "ref" or "attention=ref,gemm=cpu"; wrong names throw.
  Context();
  // A context of any device: its main stream and its allocator. Throws kUnsupported when there is
  // no such device or this build cannot use it.
  explicit Context(Device device);
  // Of a device that need not be there: it answers which implementations would run, and runs none.
  static Context ForQuestions(Device device);

  Device device() const { return stream_.device; }
  const Stream& stream() const { return stream_; }
  Allocator& allocator() const { return *allocator_; }

  // Uninitialised tensors on the context's device, freed in stream order.
  Tensor Empty(const Shape& shape, DType dtype) const {
    return Tensor::Empty(shape, dtype, *allocator_);
  }
  Tensor Zeros(const Shape& shape, DType dtype) const {
    return Tensor::Zeros(shape, dtype, *allocator_);
  }

  // `t` where this context's kernels and allocator have their memory: itself, or a copy.
  Tensor Place(const Tensor& t) const { return t.To(allocator_->device()); }

  // Name of the implementation asked for by the user for an op; empty when the library chooses.
  std::string PreferredImpl(std::string_view op) const;
  // A copy of this context that prefers `choice`, in the syntax of CISTRON_IMPL.
  Context WithImpl(std::string_view choice) const;
  // Whether an op must run the first implementation of its list, unless the user asked for another:
  // what would be slower in silence is an error then (implementation.h).
  bool strict() const { return strict_; }
  Context WithStrict(bool strict = true) const;
  // A copy of this context that takes memory from `allocator`, which must outlive it and its
  // tensors.
  Context WithAllocator(Allocator& allocator) const;
  // A copy of this context whose ops `recorder` hears of; it must outlive the copy. Null: nobody.
  Context WithRecorder(OpRecorder* recorder) const;
  OpRecorder* recorder() const { return recorder_; }

 private:
  Stream stream_;
  Allocator* allocator_;
  std::shared_ptr<const std::string> impl_choice_;
  bool strict_ = false;
  OpRecorder* recorder_ = nullptr;
};

// How an op leaves its result in an output tensor.
enum class WriteMode {
  kWrite,       // every element is assigned; what was there is not read
  kAccumulate,  // added to what is there
};

// A typed output: a tensor and the mode in which it is written.
struct Output {
  Tensor tensor;
  WriteMode mode = WriteMode::kWrite;

  explicit operator bool() const { return static_cast<bool>(tensor); }
};
inline Output Write(Tensor t) {
  return {std::move(t), WriteMode::kWrite};
}
inline Output Accumulate(Tensor t) {
  return {std::move(t), WriteMode::kAccumulate};
}

}  // namespace cistron::ops
