#include "cistron/ops/context.h"

#include <array>
#include <mutex>
#include <optional>

#include "cistron/base/env.h"
#include "cistron/ops/instruction_set.h"
#include "cistron/ops/support_matrix.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::ops {

namespace {

// Read and checked once: a misspelt op would be ignored in silence otherwise. `device`: on which
// all that it names must be there; without one, anywhere.
std::shared_ptr<const std::string> ChoiceOfEnvironment(std::optional<DeviceType> device) {
  static const auto choice =
      std::make_shared<const std::string>(GetEnv("CISTRON_IMPL").value_or(""));
  static std::array<std::once_flag, 3> checked;
  std::call_once(checked[device ? 1 + static_cast<std::size_t>(*device) : 0],
                 [&] { CheckImplChoice(*choice, device); });
  return choice;
}

}  // namespace

Context::Context() : allocator_(&CpuAllocator()) {
  LimitInstructionSet();
  impl_choice_ = ChoiceOfEnvironment({});
}

Context::Context(Device device) : allocator_(&CpuAllocator()) {
  LimitInstructionSet();
  impl_choice_ = ChoiceOfEnvironment(device.type);
  if (device.type == DeviceType::kCpu) return;
  allocator_ = &cuda::DeviceAllocator(device.index);
  stream_ = cuda::MainStream(device.index);
}

Context Context::ForQuestions(Device device) {
  Context context;
  context.impl_choice_ = ChoiceOfEnvironment(device.type);
  context.stream_ = {device, nullptr};
  return context;
}

// The choice is a comma-separated list of `op=impl`; an entry without `=` names the implementation
// of every op that has no entry of its own.
std::string Context::PreferredImpl(std::string_view op) const {
  std::string_view rest = *impl_choice_;
  std::string_view general;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view entry = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) {
      general = entry;
    } else if (entry.substr(0, equals) == op) {
      return std::string(entry.substr(equals + 1));
    }
  }
  return std::string(general);
}

Context Context::WithImpl(std::string_view choice) const {
  Context copy = *this;
  copy.impl_choice_ = std::make_shared<const std::string>(choice);
  return copy;
}

Context Context::WithStrict(bool strict) const {
  Context copy = *this;
  copy.strict_ = strict;
  return copy;
}

Context Context::WithAllocator(Allocator& allocator) const {
  Context copy = *this;
  copy.allocator_ = &allocator;
  return copy;
}

Context Context::WithRecorder(OpRecorder* recorder) const {
  Context copy = *this;
  copy.recorder_ = recorder;
  return copy;
}

}  // namespace cistron::ops
