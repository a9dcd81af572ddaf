// The kernels of an exchange with all ranks on one GPU: what they do where rows do not fit and
// where a rank does not come. Nothing says that kernels of one GPU run at the same time, so ranks
// take turns, and before a rank's turn the host writes what those that come later would have
// written. (Ranks at the same time need a GPU each: expert_exchange_test.)
#include "cistron/parallel/cuda/row_exchange_kernel.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::parallel::exchange_kernels {
namespace {

using cuda::Check;

constexpr int kTwo = 2, kExperts = 4, kLocal = 2, kRows = 6, kWidth = 8;  // floats of a row
constexpr Word kNoLimit = 600'000'000'000;  // of a kernel that must not wait

// Memory of the GPU that the host looks at between kernels.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::size_t n, T value) : n_(n) {
    Check(cudaMalloc(&data_, n * sizeof(T)), "cudaMalloc");
    Set(std::vector<T>(n, value));
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* get() const { return data_; }
  void Set(const std::vector<T>& values) const {
    Check(cudaMemcpy(data_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> All() const {
    std::vector<T> values(n_);
    Check(cudaMemcpy(values.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }
  T operator[](std::size_t i) const { return All()[i]; }

 private:
  T* data_ = nullptr;
  std::size_t n_;
};

struct Rank {
  OnDevice<Word> control{static_cast<std::size_t>(Control::Words(kTwo, kExperts)), 0};
  OnDevice<double> flag{1, 0};
  OnDevice<std::int64_t> needed{1, 0};
  OnDevice<std::int32_t> waits_for{kRanks, 0};
  OnDevice<std::int64_t> sent{kExperts, 0};  // rows for each expert
  OnDevice<std::int64_t> counts{kTwo * kExperts, -7}, sizes{kLocal, -7};
  OnDevice<std::int64_t> out_begins{kExperts + 1, -7}, out_places{kExperts, -7};
  OnDevice<std::int64_t> back_begins{kLocal * kTwo + 1, -7}, back_places{kLocal * kTwo, -7};
  // This rank's rows, those that came to its experts, and those that came back.
  OnDevice<float> own{kRows * kWidth, 1}, received{2 * kRows * kWidth, kPoison},
      returned{kRows * kWidth, kPoison}, values{2 * kRows, 1}, values_returned{kRows, kPoison};
  OnDevice<std::int32_t> slots{kRows, 0};

  static constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  Rank() {
    std::vector<std::int32_t> order(kRows);
    std::iota(order.begin(), order.end(), 0);
    slots.Set(order);
  }
};

class RowExchangeKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::Devices().empty()) GTEST_SKIP() << "no GPU";
    ranks_.resize(kTwo);
    for (auto& r : ranks_) r = std::make_unique<Rank>();
  }

  WaitArgs Waits(int rank, Word limit) const {
    WaitArgs a{};
    a.rank = rank;
    a.ranks = kTwo;
    a.experts = kExperts;
    for (int r = 0; r < kTwo; ++r) a.control[r] = At(r).control.get();
    a.status = {At(rank).flag.get(), At(rank).needed.get()};
    a.waits_for = At(rank).waits_for.get();
    a.limit_ns = limit;
    return a;
  }
  // All that ranks after this one would have told it of the exchange that it is about to make.
  void OthersCome(int rank) const {
    std::vector<Word> control = At(rank).control.All();
    for (int r = rank + 1; r < kTwo; ++r) {
      const std::vector<std::int64_t> counts = At(r).sent.All();
      const auto of = [&](int at) -> Word& { return control[static_cast<std::size_t>(at + r)]; };
      of(Control::kEntered) = of(Control::kLeft) = control[0] + 1;
      for (int e = 0; e < kExperts; ++e) {
        control[static_cast<std::size_t>(Control::kCounts + r * kExperts + e)] =
            static_cast<Word>(counts[static_cast<std::size_t>(e)]);
      }
    }
    At(rank).control.Set(control);
  }
  static void Exchange(const EnterArgs& enter, const PushArgs& push) {
    enter_kernel<<<1, kWaitThreads>>>(enter);
    push_kernel<uint4><<<2, kPushThreads>>>(push);
    leave_kernel<<<1, kWaitThreads>>>(enter);
    Check(cudaGetLastError(), "launch");
  }
  // Rows to experts, as RowExchange::Out.
  void Out(int rank, std::int64_t capacity, Word limit = kNoLimit) const {
    const Rank& own = At(rank);
    EnterArgs a{};
    static_cast<WaitArgs&>(a) = Waits(rank, limit);
    a.split_sizes = own.sent.get();
    a.capacity = capacity;
    a.counts = own.counts.get();
    a.local_sizes = own.sizes.get();
    a.out_begins = own.out_begins.get();
    a.out_places = own.out_places.get();
    a.back_begins = own.back_begins.get();
    a.back_places = own.back_places.get();
    PushArgs p = Push(rank, own.own.get(), own.out_begins, own.out_places, kExperts);
    p.slot_of_row = own.slots.get();
    p.runs_of_rank = kLocal;
    for (int r = 0; r < kTwo; ++r) p.to[r] = Bytes(At(r).received.get());
    Exchange(a, p);
  }
  // Rows back, as RowExchange::Back.
  void Back(int rank) const {
    const Rank& own = At(rank);
    EnterArgs a{};
    static_cast<WaitArgs&>(a) = Waits(rank, kNoLimit);
    PushArgs p = Push(rank, own.received.get(), own.back_begins, own.back_places, kLocal * kTwo);
    for (int r = 0; r < kTwo; ++r) {
      p.to[r] = Bytes(At(r).returned.get());
      p.values_to[r] = At(r).values_returned.get();
    }
    p.values = own.values.get();
    p.own_rows = Bytes(own.returned.get());
    p.own_values = own.values_returned.get();
    p.own = kRows;
    Exchange(a, p);
  }
  // One exchange of all ranks there, one back.
  void ThereAndBack(std::int64_t capacity) const {
    for (int r = 0; r < kTwo; ++r) {
      OthersCome(r);
      Out(r, capacity);
    }
    for (int r = 0; r < kTwo; ++r) {
      OthersCome(r);
      Back(r);
    }
    Wait();
  }
  void Route(int rank, const std::vector<std::int64_t>& rows) const { At(rank).sent.Set(rows); }
  // The next step.
  void ResetStatus(int rank) const {
    At(rank).flag.Set({0});
    At(rank).needed.Set({0});
  }
  static void Wait() { Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
  Rank& At(int rank) const { return *ranks_[static_cast<std::size_t>(rank)]; }

 private:
  static std::byte* Bytes(float* p) { return reinterpret_cast<std::byte*>(p); }
  PushArgs Push(int rank, float* from, const OnDevice<std::int64_t>& begins,
                const OnDevice<std::int64_t>& places, int runs) const {
    PushArgs p{};
    p.from = Bytes(from);
    p.stride = p.width = kWidth * sizeof(float);
    p.top_k = 1;
    p.begins = begins.get();
    p.places = places.get();
    p.runs = runs;
    p.ranks = kTwo;
    p.status = At(rank).flag.get();
    return p;
  }
  std::vector<std::unique_ptr<Rank>> ranks_;
};

const std::vector<float> kOnes(kRows*kWidth, 1), kZeros(kRows*kWidth, 0);

TEST_F(RowExchangeKernels, BringRowsToExpertsAndBack) {
  Route(0, {2, 1, 0, 3});
  Route(1, {0, 0, 2, 4});
  for (int step = 0; step < 3; ++step) {
    ThereAndBack(2 * kRows);
    for (int r = 0; r < kTwo; ++r) {
      EXPECT_EQ(At(r).flag[0], 0);
      EXPECT_EQ(At(r).returned.All(), kOnes);
    }
    EXPECT_EQ(At(0).sizes.All(), (std::vector<std::int64_t>{2, 1}));
    EXPECT_EQ(At(1).sizes.All(), (std::vector<std::int64_t>{2, 7}));
    EXPECT_EQ(At(1).received[9 * kWidth - 1], 1);
    EXPECT_TRUE(std::isnan(At(1).received[9 * kWidth]));
  }
}

// A model that goes on with NaN would look as one that has diverged.
TEST_F(RowExchangeKernels, RowsThatDoNotFitComeBackAsZeros) {
  Route(0, {2, 1, 0, 3});
  Route(1, {0, 0, 2, 4});
  ThereAndBack(8);
  for (int r = 0; r < kTwo; ++r) {
    SCOPED_TRACE(r);
    EXPECT_TRUE(std::isinf(At(r).flag[0]));
    EXPECT_EQ(At(r).needed[0], 9);
    EXPECT_EQ(At(r).sizes.All(), (std::vector<std::int64_t>{0, 0}));
    EXPECT_EQ(At(r).returned.All(), kZeros);
    EXPECT_EQ(At(r).values_returned.All(), std::vector<float>(kRows, 0));
    EXPECT_TRUE(std::isnan(At(r).received[0]));
  }
  // The step is made again.
  for (int r = 0; r < kTwo; ++r) ResetStatus(r);
  ThereAndBack(9);
  for (int r = 0; r < kTwo; ++r) EXPECT_EQ(At(r).returned.All(), kOnes);
}

// Kernels that would wait have a limit of minutes here, over which the test would be ended.
TEST_F(RowExchangeKernels, ARankThatWaitedInVainWaitsForNothingMore) {
  Route(0, {2, 1, 0, 3});
  Route(1, {0, 0, 2, 4});
  Out(0, 2 * kRows, 20'000'000);
  for (int step = 0; step < 3; ++step) {
    Back(0);
    Wait();
    EXPECT_TRUE(std::isnan(At(0).flag[0]));
    EXPECT_EQ(At(0).needed[0], -1);
    EXPECT_EQ(At(0).waits_for[1], 1);
    EXPECT_EQ(At(0).sizes.All(), (std::vector<std::int64_t>{0, 0}));
    EXPECT_EQ(At(0).returned.All(), kZeros);
    EXPECT_TRUE(std::isnan(At(1).received[0])) << "pushed all the same";
    // The next step, queued before the host has looked.
    ResetStatus(0);
    Out(0, 2 * kRows);
  }
  // The other one, too late, learns of it at once.
  Out(1, 2 * kRows);
  Back(1);
  Wait();
  EXPECT_TRUE(std::isnan(At(1).flag[0]));
  EXPECT_EQ(At(1).needed[0], -1);
  EXPECT_EQ(At(1).returned.All(), kZeros);
  EXPECT_TRUE(std::isnan(At(0).received[0]));
}

}  // namespace
}  // namespace cistron::parallel::exchange_kernels
