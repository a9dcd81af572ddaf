// Through CUPTI's activity interface. Nothing is linked: a program that never traces does not need
// the library.
#include "cistron/tensor/kernel_trace.h"

#include <cupti.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <mutex>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::cuda {
namespace {

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};

// The functions that are used, or why there are none.
struct Cupti {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next = nullptr;
  decltype(&cuptiGetTimestamp) now = nullptr;
  std::string why_not;
};

Cupti Load() {
  Cupti cupti;
  const std::string name = fmt::format("libcupti.so.{}", CUDART_VERSION / 1000);
  void* library = dlopen(name.c_str(), RTLD_NOW);
  if (library == nullptr) {
    const char* why = dlerror();
    cupti.why_not = fmt::format(
        "CUPTI is not here ({}); it comes with the CUDA toolkit, or with the Python wheel "
        "nvidia-cuda-cupti, whose folder lib belongs into LD_LIBRARY_PATH",
        why == nullptr ? name : why);
    return cupti;
  }
  const auto find = [&](const char* function, auto& to) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(library, function));
    if (to == nullptr) cupti.why_not = fmt::format("{} has no {}", name, function);
  };
  find("cuptiActivityRegisterCallbacks", cupti.register_callbacks);
  find("cuptiActivityEnable", cupti.enable);
  find("cuptiActivityDisable", cupti.disable);
  find("cuptiActivityFlushAll", cupti.flush);
  find("cuptiActivityGetNextRecord", cupti.next);
  find("cuptiGetTimestamp", cupti.now);
  return cupti;
}
const Cupti& Library() {
  static const Cupti cupti = Load();
  return cupti;
}

// CUPTI hands buffers over on a thread of its own, to functions that know no object.
struct Notes {
  std::mutex mutex;
  std::vector<Activity> activities;
};
Notes& Noted() {
  static auto* notes = new Notes();
  return *notes;
}

void CUPTIAPI GiveBuffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most_records) {
  *bytes = std::size_t{8} << 20;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *bytes));
  if (*buffer == nullptr) *bytes = 0;
  *most_records = 0;  // as many as fit
}

// All kinds of kKinds hold their times in fields of the same names.
template <class Record>
Activity TimesOf(const CUpti_Activity* record) {
  const auto* r = reinterpret_cast<const Record*>(record);
  return {r->start, r->end};
}

void CUPTIAPI TakeBuffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t,
                         std::size_t valid) {
  const std::lock_guard lock(Noted().mutex);
  CUpti_Activity* record = nullptr;
  while (valid > 0 && Library().next(buffer, valid, &record) == CUPTI_SUCCESS) {
    switch (record->kind) {
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        Noted().activities.push_back(TimesOf<CUpti_ActivityKernel9>(record));
        break;
      case CUPTI_ACTIVITY_KIND_MEMCPY:
        Noted().activities.push_back(TimesOf<CUpti_ActivityMemcpy6>(record));
        break;
      case CUPTI_ACTIVITY_KIND_MEMSET:
        Noted().activities.push_back(TimesOf<CUpti_ActivityMemset4>(record));
        break;
      default: break;
    }
  }
  std::free(buffer);
}

void CheckCupti(CUptiResult result, const char* call) {
  CISTRON_CHECK(result == CUPTI_SUCCESS, "kernel trace: {} fails with CUPTI's error {}", call,
                static_cast<int>(result));
}

}  // namespace

std::string KernelTrace::WhyNot() {
  return Library().why_not;
}

KernelTrace::KernelTrace() {
  if (!WhyNot().empty()) CISTRON_THROW(kUnsupported, "kernel trace: {}", WhyNot());
  CheckCupti(Library().register_callbacks(GiveBuffer, TakeBuffer),
             "cuptiActivityRegisterCallbacks");
  for (const CUpti_ActivityKind kind : kKinds) {
    const CUptiResult result = Library().enable(kind);
    if (result != CUPTI_SUCCESS) {
      CISTRON_THROW(kUnsupported,
                    "kernel trace: CUPTI refuses with error {}: is there a GPU and its driver?",
                    static_cast<int>(result));
    }
    on_ = true;
  }
}

KernelTrace::~KernelTrace() {
  if (!on_) return;
  for (const CUpti_ActivityKind kind : kKinds) Library().disable(kind);
  Library().flush(0);
  const std::lock_guard lock(Noted().mutex);
  Noted().activities.clear();
}

void KernelTrace::Restart(Device device) {
  Synchronize(device);
  // Not by a flush: the device would wait for new buffers.
  CheckCupti(Library().now(&begin_ns_), "cuptiGetTimestamp");
}

DeviceTime KernelTrace::Read(Device device) {
  Synchronize(device);
  CheckCupti(Library().flush(0), "cuptiActivityFlushAll");
  const std::lock_guard lock(Noted().mutex);
  std::vector<Activity> activities = std::exchange(Noted().activities, {});
  std::erase_if(activities, [&](const Activity& a) { return a.begin_ns < begin_ns_; });
  return TimeOf(std::move(activities));
}

}  // namespace cistron::cuda
