#include "cistron/ops/instruction_set.h"

#include <hwy/targets.h>
#include <oneapi/dnnl/dnnl.h>

#include <mutex>

#include "cistron/base/env.h"
#include "cistron/base/error.h"

namespace cistron::ops {
namespace {

void Apply(const std::string& name) {
  if (name == "avx512") {
    CISTRON_CHECK(hwy::SupportedTargets() & HWY_AVX3,
                  "CISTRON_ISA=avx512, but this processor has no AVX-512; unset it");
    return;
  }
  CISTRON_CHECK(name == "avx2", "CISTRON_ISA={} is no known instruction set; use avx2 or avx512",
                name);
  CISTRON_CHECK(hwy::SupportedTargets() & HWY_AVX2,
                "CISTRON_ISA=avx2, but this processor has no AVX2; unset it");
  hwy::DisableTargets(HWY_AVX3 | HWY_AVX3_DL);
  // oneDNN takes a limit only before its first call; DNNL_MAX_CPU_ISA set outside counts as well.
  CISTRON_CHECK(dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2) == dnnl_success ||
                    dnnl_get_effective_cpu_isa() <= dnnl_cpu_isa_avx2,
                "CISTRON_ISA=avx2 came too late: oneDNN was used before the first Context");
}

}  // namespace

void LimitInstructionSet() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (const auto name = GetEnv("CISTRON_ISA")) Apply(*name);
  });
}

std::string InstructionSetInUse() {
  LimitInstructionSet();
  const auto targets = hwy::SupportedTargets();
  if (targets & HWY_AVX3) return "avx512";
  return targets & HWY_AVX2 ? "avx2" : "baseline";
}

}  // namespace cistron::ops
