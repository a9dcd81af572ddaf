// Where the time of steps goes, op by op. Ops are ranges for tracing tools too (tensor/trace.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cistron/ops/op_work.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::train {

// The time from the beginning of one op to that of the next, on a GPU in the order of its stream,
// belongs to the first: what runs between them, copies and gaps included, is counted with it.
// What a machine can do at most, measured.
struct Roofline {
  double flops = 0;        // a second, of products in the model's dtype
  double bytes_per_s = 0;  // read and written
};
Roofline MeasureRoofline(const ops::Context& ctx, DType dtype);

class Profile final : public ops::WorkRecorder {
 public:
  struct Row {
    std::string op, implementation;
    std::int64_t calls = 0;
    double ms = 0;
    double flops = 0, bytes = 0;  // 0: not said
  };

  explicit Profile(Device device) : device_(device) {}
  ~Profile() override;

  // From now on ops count; End ends the last one and, on a GPU, waits for it.
  void Start() { started_ = true; }
  void End();
  void Announce(const ops::OpWork& work) override { next_ = work; }
  void Add(const ops::OpWork& work) override;
  void Begin(std::string_view op, std::string_view implementation) override;
  bool Times() const override { return started_; }
  // "attention (cudnn)": the newest of all, whether it counts or not.
  std::string last_op() const;
  // Longest first.
  std::vector<Row> Rows() const;
  // A line a row: calls and ms of a step, TFLOP/s or GB/s, whichever is nearer to what the machine
  // can do, which part of that, and the share of the step. `steps`: that counted. `whole_ms`: of
  // them all, by the clock; 0: the sum of the rows.
  std::string Table(const Roofline& peak, std::int64_t steps = 1, double whole_ms = 0) const;

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
  ops::OpWork next_;
  std::uint64_t range_ = 0;  // of a tracing tool
  bool started_ = false, running_ = false;
  Clock::time_point begin_{};
  std::vector<std::pair<std::size_t, cuda::Event>> events_;
};

}  // namespace cistron::train
