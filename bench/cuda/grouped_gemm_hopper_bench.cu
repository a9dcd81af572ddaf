// Checks the Hopper grouped product against a plain f32 kernel, then times it. Needs no other part
// of the build but base: see docs/performance-notes.md for the line that compiles it.
//
//   grouped_gemm_hopper_bench            checks, then timings
//   grouped_gemm_hopper_bench check      checks only; exit status 1 when one fails
//   grouped_gemm_hopper_bench time [SHAPE [KIND]]   timings only, of one shape or kind (0, 1, …)
//
// Built as a shared library it also gives grouped_gemm_hopper_bench.py its entry point, so that a
// peer is timed on the same data in the same process.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cistron/ops/grouped_gemm/grouped_gemm_hopper.h"

using cistron::DType;
using cistron::ops::GroupedGemmKind;
using cistron::ops::internal::HopperGroupedGemm;
using cistron::ops::internal::HopperGroupedGemmWorkspace;

namespace {

void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(2);
}

template <class T>
struct Buffer {
  explicit Buffer(std::size_t count) : size(count) {
    Check(cudaMalloc(&data, std::max<std::size_t>(1, count) * sizeof(T)));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  T* data = nullptr;
  std::size_t size;
};

// For one launch at a time; poisoned, as a launch must not count on what is there.
void* Workspace() {
  static void* const workspace = [] {
    void* p = nullptr;
    const auto bytes = static_cast<std::size_t>(HopperGroupedGemmWorkspace(HopperGroupedGemm{}));
    Check(cudaMalloc(&p, bytes));
    Check(cudaMemset(p, 0xFF, bytes));
    return p;
  }();
  return workspace;
}

// ---- data ----

__device__ float RandomNormal(std::uint64_t i, std::uint64_t seed) {
  std::uint64_t z = i + seed * 0x9E3779B97F4A7C15ull;
  float sum = 0;
  for (int part = 0; part < 2; ++part) {
    z += 0x9E3779B97F4A7C15ull;
    std::uint64_t h = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    h ^= h >> 31;
    sum += static_cast<float>(h >> 40) * 0x1p-24f + static_cast<float>(h & 0xFFFFFF) * 0x1p-24f;
  }
  return (sum - 2) * 1.7320508f;  // four uniforms: mean 0, variance 1
}

__global__ void FillRandom(__nv_bfloat16* p, std::size_t n, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    p[i] = __float2bfloat16(RandomNormal(i, seed));
  }
}

// ---- the reference ----

struct Problem {
  GroupedGemmKind kind;
  bool f32, accumulate;
  int groups;
  std::int64_t max_rows, n, k;
};

// One thread a result: the sum in f32 and the sum of magnitudes, for the bound.
__global__ void Reference(Problem p, const std::int64_t* begins, const __nv_bfloat16* a,
                          const __nv_bfloat16* b, float* sum, float* magnitude) {
  const bool wgrad = p.kind == GroupedGemmKind::kWgrad;
  const std::int64_t rows = wgrad ? p.groups * p.n : p.max_rows;
  const std::int64_t cols = p.kind == GroupedGemmKind::kForward ? p.n : p.k;
  const std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (i >= rows * cols) return;
  const std::int64_t row = i / cols;
  const std::int64_t col = i % cols;
  float s = 0;
  float m = 0;
  const auto add = [&](__nv_bfloat16 x, __nv_bfloat16 y) {
    const float product = __bfloat162float(x) * __bfloat162float(y);
    s += product;
    m += fabsf(product);
  };
  if (wgrad) {
    const std::int64_t group = row / p.n;
    for (std::int64_t t = begins[group]; t < begins[group + 1]; ++t) {
      add(a[t * p.n + row % p.n], b[t * p.k + col]);
    }
  } else if (row < begins[p.groups]) {
    int group = 0;
    while (row >= begins[group + 1]) ++group;
    const __nv_bfloat16* w = b + group * p.n * p.k;
    if (p.kind == GroupedGemmKind::kForward) {
      for (std::int64_t d = 0; d < p.k; ++d) add(a[row * p.k + d], w[col * p.k + d]);
    } else {
      for (std::int64_t d = 0; d < p.n; ++d) add(a[row * p.n + d], w[d * p.k + col]);
    }
  }
  sum[i] = s;
  magnitude[i] = m;
}

// ---- checks ----

struct Case {
  const char* name;
  std::vector<std::int64_t> counts;
  std::int64_t n, k;
  std::int64_t rows_beyond = 0;
  bool nan_groups = false;  // every odd group's rows are NaN
};

std::vector<std::int64_t> RandomCounts(int groups, int below, unsigned seed) {
  std::vector<std::int64_t> counts(groups);
  for (auto& c : counts) {
    seed = seed * 1664525u + 1013904223u;
    c = (seed >> 8) % static_cast<unsigned>(below);
  }
  return counts;
}

std::vector<Case> Cases() {
  std::vector<std::int64_t> many_small(512, 0);
  for (int g = 0; g < 512; ++g) many_small[g] = g % 7;
  return {
      {"one group", {128}, 256, 64},
      {"two tiles", {256}, 256, 128},
      {"0 1 7 33", {0, 1, 7, 33}, 264, 136, 5},
      {"0 1 7 33, NaN beside", {0, 1, 7, 33, 100, 64, 65, 63}, 264, 136, 5, true},
      {"all on one", {0, 0, 700, 0}, 512, 320, 60},
      {"all empty", {0, 0, 0}, 128, 128, 40},
      {"narrow", {40, 200}, 8, 8, 1},
      {"odd column tiles", {130, 385, 1, 0}, 776, 200, 130},
      {"random", RandomCounts(16, 500, 1), 768, 1032, 77},
      {"random, NaN beside", RandomCounts(16, 500, 2), 640, 520, 77, true},
      {"128 experts", RandomCounts(128, 300, 3), 384, 192, 3, true},
      {"512 experts", many_small, 136, 72, 9, true},
      {"deep", {300, 5000, 20}, 256, 4096, 0, true},
      {"many tiles", {3000, 2500, 1, 4096}, 2048, 512, 10},
  };
}

const char* KindName(GroupedGemmKind kind) {
  return kind == GroupedGemmKind::kForward ? "forward"
         : kind == GroupedGemmKind::kDgrad ? "dgrad"
                                           : "wgrad";
}

float FromBits(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Whether one case agrees, in every element; prints the worst when not.
bool CheckCase(const Case& c, GroupedGemmKind kind, bool f32, bool accumulate) {
  const int groups = static_cast<int>(c.counts.size());
  const std::int64_t sum = std::accumulate(c.counts.begin(), c.counts.end(), std::int64_t{0});
  const Problem p{kind, f32, accumulate, groups, sum + c.rows_beyond, c.n, c.k};
  const bool wgrad = kind == GroupedGemmKind::kWgrad;
  const std::int64_t a_cols = kind == GroupedGemmKind::kForward ? c.k : c.n;
  const std::int64_t cols = kind == GroupedGemmKind::kForward ? c.n : c.k;
  const std::size_t a_size = p.max_rows * a_cols;
  const std::size_t b_size = wgrad ? p.max_rows * c.k : groups * c.n * c.k;
  const std::size_t size = (wgrad ? groups * c.n : p.max_rows) * cols;
  Buffer<__nv_bfloat16> a(a_size), b(b_size);
  FillRandom<<<256, 256>>>(a.data, a_size, 11);
  FillRandom<<<256, 256>>>(b.data, b_size, 12);
  std::vector<std::int64_t> begins(groups + 1);
  for (int g = 0; g < groups; ++g) begins[g + 1] = begins[g] + c.counts[g];
  const auto poison = [&](std::int64_t from, std::int64_t to) {
    Check(cudaMemset(a.data + from * a_cols, 0xFF, (to - from) * a_cols * 2));
    if (wgrad) Check(cudaMemset(b.data + from * c.k, 0xFF, (to - from) * c.k * 2));
  };
  poison(sum, p.max_rows);
  for (int g = 1; c.nan_groups && g < groups; g += 2) poison(begins[g], begins[g + 1]);

  Buffer<std::int64_t> counts(groups), device_begins(groups + 1);
  Check(cudaMemcpy(counts.data, c.counts.data(), groups * 8, cudaMemcpyHostToDevice));
  Check(cudaMemcpy(device_begins.data, begins.data(), (groups + 1) * 8, cudaMemcpyHostToDevice));
  Buffer<float> expected(size), magnitude(size);
  Reference<<<static_cast<unsigned>((size + 255) / 256), 256>>>(
      p, device_begins.data, a.data, b.data, expected.data, magnitude.data);
  Check(cudaGetLastError());

  // Old values: in accumulation random, else a NaN that must be overwritten, or kept, bit for bit.
  const std::size_t element = f32 ? 4 : 2;
  const std::size_t guard = 512;
  std::vector<unsigned char> old(size * element + 2 * guard, 0xFF);
  if (accumulate) {
    for (std::size_t i = 0; i < size; ++i) {
      const float v = static_cast<float>(static_cast<int>(i * 2654435761u >> 20) - 2048) / 256;
      std::uint32_t bits;
      std::memcpy(&bits, &v, 4);
      bits &= 0xFFFF0000u;
      std::memcpy(
          &old[guard + i * element],
          f32 ? &bits : reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(&bits) + 2),
          element);
    }
  }
  Buffer<unsigned char> out(old.size());
  std::vector<unsigned char> runs[2];
  for (auto& run : runs) {
    Check(cudaMemcpy(out.data, old.data(), old.size(), cudaMemcpyHostToDevice));
    HopperGroupedGemm g;
    g.kind = kind;
    g.out_dtype = f32 ? DType::kF32 : DType::kBF16;
    g.accumulate = accumulate;
    g.groups = groups, g.max_rows = p.max_rows, g.n = c.n, g.k = c.k;
    g.a = a.data, g.b = b.data, g.c = out.data + guard;
    g.split_sizes = counts.data;
    g.workspace = Workspace();
    LaunchHopperGroupedGemm(g);
    Check(cudaDeviceSynchronize());
    run.resize(old.size());
    Check(cudaMemcpy(run.data(), out.data, old.size(), cudaMemcpyDeviceToHost));
  }
  std::vector<float> want(size), size_of(size);
  Check(cudaMemcpy(want.data(), expected.data, size * 4, cudaMemcpyDeviceToHost));
  Check(cudaMemcpy(size_of.data(), magnitude.data, size * 4, cudaMemcpyDeviceToHost));

  std::size_t wrong = 0, worst_at = 0;
  double worst = 0, worst_got = 0, worst_want = 0;
  const auto value = [&](const std::vector<unsigned char>& bytes, std::size_t i) {
    if (!f32) {
      std::uint16_t bits;
      std::memcpy(&bits, &bytes[guard + i * 2], 2);
      return FromBits(bits);
    }
    float v;
    std::memcpy(&v, &bytes[guard + i * 4], 4);
    return v;
  };
  for (std::size_t i = 0; i < size; ++i) {
    const bool untouched = wgrad ? accumulate && c.counts[i / cols / c.n] == 0
                                 : static_cast<std::int64_t>(i / cols) >= sum;
    if (untouched) {
      if (std::memcmp(&runs[0][guard + i * element], &old[guard + i * element], element) != 0) {
        if (wrong++ == 0) worst_at = i, worst_got = value(runs[0], i), worst_want = value(old, i);
      }
      continue;
    }
    const double before = accumulate ? value(old, i) : 0.0;
    const double exact = before + want[i];
    const double got = value(runs[0], i);
    const double bound =
        0x1p-17 * (size_of[i] + std::fabs(before)) + (f32 ? 0x1p-23 : 0x1p-8) * std::fabs(exact);
    const double error = std::fabs(got - exact);
    const bool agrees = std::isnan(exact) ? std::isnan(got) : error <= bound;
    if (!agrees && (wrong++ == 0 || error > worst)) {
      worst = error, worst_at = i, worst_got = got, worst_want = exact;
    }
  }
  bool guards = true;
  for (std::size_t i = 0; i < guard; ++i) {
    guards &= runs[0][i] == 0xFF && runs[0][runs[0].size() - 1 - i] == 0xFF;
  }
  const bool same = runs[0] == runs[1];
  if (wrong == 0 && same && guards) return true;
  std::printf("FAIL %-22s %-7s %s %s: %zu of %zu wrong, at row %zu col %zu got %g want %g;%s%s\n",
              c.name, KindName(kind), f32 ? "f32" : "bf16", accumulate ? "accumulate" : "write",
              wrong, size, worst_at / cols, worst_at % cols, worst_got, worst_want,
              same ? "" : " runs differ", guards ? "" : " wrote outside");
  return false;
}

int CheckAll() {
  int failed = 0, run = 0;
  for (const Case& c : Cases()) {
    for (const auto kind :
         {GroupedGemmKind::kForward, GroupedGemmKind::kDgrad, GroupedGemmKind::kWgrad}) {
      for (const bool f32 : {false, true}) {
        for (const bool accumulate : {false, true}) {
          failed += CheckCase(c, kind, f32, accumulate) ? 0 : 1;
          ++run;
        }
      }
    }
  }
  std::printf("%d of %d checks failed\n", failed, run);
  return failed;
}

// ---- timings ----

void Time(int groups, std::int64_t group_rows, std::int64_t n, std::int64_t k, GroupedGemmKind kind,
          bool f32, double seconds) {
  const bool wgrad = kind == GroupedGemmKind::kWgrad;
  const std::int64_t rows = groups * group_rows;
  const std::size_t a_size = rows * (kind == GroupedGemmKind::kForward ? k : n);
  const std::size_t b_size = wgrad ? rows * k : groups * n * k;
  const std::size_t c_size =
      wgrad ? groups * n * k : rows * (kind == GroupedGemmKind::kForward ? n : k);
  Buffer<__nv_bfloat16> a(a_size), b(b_size);
  Buffer<unsigned char> c(c_size * (f32 ? 4 : 2));
  FillRandom<<<1024, 256>>>(a.data, a_size, 1);
  FillRandom<<<1024, 256>>>(b.data, b_size, 2);
  Buffer<std::int64_t> counts(groups);
  const std::vector<std::int64_t> even(groups, group_rows);
  Check(cudaMemcpy(counts.data, even.data(), groups * 8, cudaMemcpyHostToDevice));
  HopperGroupedGemm g;
  g.kind = kind, g.out_dtype = f32 ? DType::kF32 : DType::kBF16;
  g.groups = groups, g.max_rows = rows, g.n = n, g.k = k;
  g.a = a.data, g.b = b.data, g.c = c.data, g.split_sizes = counts.data, g.workspace = Workspace();
  cudaEvent_t start, stop;
  Check(cudaEventCreate(&start));
  Check(cudaEventCreate(&stop));
  const auto run = [&](int times) {
    Check(cudaEventRecord(start));
    for (int i = 0; i < times; ++i) LaunchHopperGroupedGemm(g);
    Check(cudaEventRecord(stop));
    Check(cudaEventSynchronize(stop));
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, start, stop));
    return ms / times;
  };
  run(3);
  const float ms = run(1 + static_cast<int>(seconds * 1e3 / run(3)));
  std::printf("%3d x %4ld, N %5ld, K %5ld %-7s %-4s %7.1f TFLOP/s\n", groups, group_rows, n, k,
              KindName(kind), f32 ? "f32" : "bf16", 2e-9 * rows * n * k / ms);
  std::fflush(stdout);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
}

}  // namespace

// For grouped_gemm_hopper_bench.py. 0, or 1 after printing why not.
extern "C" int HopperGroupedGemmRun(int kind, int f32, int accumulate, std::int64_t groups,
                                    std::int64_t max_rows, std::int64_t n, std::int64_t k,
                                    const void* a, const void* b, void* c,
                                    const std::int64_t* split_sizes, void* stream) {
  HopperGroupedGemm g;
  g.kind = static_cast<GroupedGemmKind>(kind);
  g.out_dtype = f32 ? DType::kF32 : DType::kBF16;
  g.accumulate = accumulate != 0;
  g.groups = groups, g.max_rows = max_rows, g.n = n, g.k = k;
  g.a = a, g.b = b, g.c = c, g.split_sizes = split_sizes, g.stream = stream,
  g.workspace = Workspace();
  try {
    LaunchHopperGroupedGemm(g);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const int failed = mode == "time" ? 0 : CheckAll();
  if (failed != 0 || mode == "check") return failed != 0;
  const int only_shape = argc > 2 ? std::atoi(argv[2]) : -1;
  const int only_kind = argc > 3 ? std::atoi(argv[3]) : -1;
  struct Shape {
    int groups;
    std::int64_t rows, n, k;
  };
  const Shape shapes[] = {{8, 2048, 28672, 4096},
                          {8, 2048, 4096, 14336},
                          {128, 1024, 1536, 2048},
                          {128, 1024, 2048, 768}};
  for (int i = 0; i < 4; ++i) {
    const Shape& s = shapes[i];
    for (const auto kind :
         {GroupedGemmKind::kForward, GroupedGemmKind::kDgrad, GroupedGemmKind::kWgrad}) {
      if (only_shape >= 0 && only_shape != i) continue;
      if (only_kind >= 0 && only_kind != static_cast<int>(kind)) continue;
      Time(s.groups, s.rows, s.n, s.k, kind, false, 0.6);
      if (kind == GroupedGemmKind::kWgrad) Time(s.groups, s.rows, s.n, s.k, kind, true, 0.6);
    }
  }
  return 0;
}
