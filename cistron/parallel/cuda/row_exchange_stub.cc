// A build without CUDA: nobody makes one.
#include "cistron/parallel/row_exchange.h"

#include "cistron/base/error.h"

namespace cistron::parallel {

struct RowExchange::Beside {};
RowExchange::RowExchange(comm::Communicator& group, const ops::Context& ctx,
                         std::int64_t num_experts, double limit_s)
    : group_(group), num_experts_(num_experts), limit_s_(limit_s) {
  CISTRON_THROW(kUnsupported, "row exchange: this build knows no device {}; configure with {}",
                ToString(ctx.device()), "-DCISTRON_CUDA=ON");
}
RowExchange::~RowExchange() = default;
Tensor RowExchange::Empty(const Shape&, DType) {
  return {};
}
RowExchange::Plan RowExchange::NewPlan(const ops::Context&) const {
  return {};
}
Tensor RowExchange::status() const {
  return {};
}
Tensor RowExchange::needed() const {
  return {};
}
std::string RowExchange::WaitsFor() const {
  return {};
}
void RowExchange::Reset() {}
void RowExchange::Out(const ops::Context&, const Tensor&, const Plan&, const Tensor&, const Tensor&,
                      std::int64_t, const Tensor&, const Tensor&, const Tensor&) {}
std::function<void()> RowExchange::BackBeside(const ops::Context&, const Plan&, const Tensor&,
                                              const Tensor&, const Tensor&, const Tensor&) {
  return {};
}
void RowExchange::Back(const ops::Context&, const Plan&, const Tensor&, const Tensor&,
                       const Tensor&, const Tensor&) {}

}  // namespace cistron::parallel
