// Where the time of steps goes, op by op.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cistron/ops/op_recorder.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::train {

// The time from the beginning of one op to that of the next, on a GPU in the order of its stream,
// belongs to the first: what runs between them, copies and gaps included, is counted with it.
class Profile final : public ops::OpRecorder {
 public:
  struct Row {
    std::string op, implementation;
    std::int64_t calls = 0;
    double ms = 0;
  };

  explicit Profile(Device device) : device_(device) {}

  // From now on ops count; End ends the last one and, on a GPU, waits for it.
  void Start() { started_ = true; }
  void End();
  void Begin(std::string_view op, std::string_view implementation) override;
  // "attention (cudnn)": the newest of all, whether it counts or not.
  std::string last_op() const;
  // Longest first.
  std::vector<Row> Rows() const;
  // "op  implementation  calls  ms  share", a line each.
  std::string Table() const;

 private:
  using Clock = std::chrono::steady_clock;
  void EndOp();
  Row& Find(std::string_view op, std::string_view implementation);

  Device device_;
  std::string_view last_op_ = "none", last_implementation_;  // names in static storage
  std::vector<Row> rows_;
  // Of a CPU: when the op in progress began. Of a GPU: the beginning of every op so far, read at
  // End.
  std::size_t current_ = 0;
  bool started_ = false, running_ = false;
  Clock::time_point begin_{};
  std::vector<std::pair<std::size_t, cuda::Event>> events_;
};

}  // namespace cistron::train
