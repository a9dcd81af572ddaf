// What one rank does in expert_exchange_test.cc: mpirun -np N expert_exchange_rank_test [alone]
//
// Rows that kernels write into other ranks' memory against rows that the hosts count and NCCL
// carries: the same bits, in every routing that has made such exchanges fail; and what overflow
// does.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <string_view>
#include <thread>

#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/parallel/exchange_plan.h"
#include "cistron/parallel/expert_parallel_dispatcher.h"
#include "cistron/testing/random.h"

namespace cistron::parallel {
namespace {

comm::Communicator* g_world = nullptr;  // tests of GoogleTest take no arguments
Device g_device;

constexpr std::int64_t kExperts = 12, kTopK = 2, kTokens = 200;

// Which expert a slot of a rank has, −1 for none; two slots of a token have different ones.
struct Routing {
  const char* name;
  std::function<int(int rank, std::int64_t token, std::int64_t slot)> expert;
};

std::vector<Routing> Routings() {
  const auto hash = [](std::int64_t rank, std::int64_t token) {
    return static_cast<int>((rank * 7919 + token * 104729 + token * token * 31) % 1009);
  };
  const int last = kExperts - 2;
  return {
      {"even", [](int r, std::int64_t t,
                  std::int64_t k) { return static_cast<int>((t + r + k * 5) % kExperts); }},
      {"random",
       [hash](int r, std::int64_t t, std::int64_t k) {
         return static_cast<int>((hash(r, t) + k * (1 + hash(r, t + 1) % 11)) % kExperts);
       }},
      {"all on the first rank",
       [](int, std::int64_t, std::int64_t k) { return static_cast<int>(k); }},
      {"all on the last rank",
       [last](int, std::int64_t, std::int64_t k) { return last + static_cast<int>(k); }},
      {"nobody routes", [](int, std::int64_t, std::int64_t) { return -1; }},
      {"only the first rank routes",
       [](int r, std::int64_t t, std::int64_t k) {
         return r > 0 ? -1 : static_cast<int>((t + k) % kExperts);
       }},
      {"one token",
       [](int r, std::int64_t t, std::int64_t k) {
         return t != 17 || r + 1 != g_world->size() ? -1 : static_cast<int>(3 + 4 * k);
       }},
      {"ragged, and masked tokens",
       [hash](int r, std::int64_t t, std::int64_t k) {
         if (t % 5 == 0) return -1;
         return t % 3 == 0 ? static_cast<int>(k * 11) : (hash(r, t) % 4 + static_cast<int>(k) * 5);
       }},
  };
}

Tensor Experts(const ops::Context& ctx, const Routing& routing) {
  const Tensor experts = Tensor::Empty({kTokens, kTopK}, DType::kI32);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t k = 0; k < kTopK; ++k) {
      experts.data<std::int32_t>()[t * kTopK + k] = routing.expert(g_world->rank(), t, k);
    }
  }
  return ctx.Place(experts);
}

// The first `rows` rows.
::testing::AssertionResult SameBits(const Tensor& got, const Tensor& expected, std::int64_t rows) {
  if (rows == 0) return ::testing::AssertionSuccess();
  const Tensor a = got.Slice(0, 0, rows).ToHost(), b = expected.Slice(0, 0, rows).ToHost();
  if (a.dtype() != b.dtype() || !(a.shape() == b.shape())) {
    return ::testing::AssertionFailure() << Describe(a) << " is not " << Describe(b);
  }
  if (std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.bytes())) == 0) {
    return ::testing::AssertionSuccess();
  }
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double x = ElementAsDouble(a, i), y = ElementAsDouble(b, i);
    if (x != y) {
      return ::testing::AssertionFailure() << "element " << i << " is " << x << ", expected " << y;
    }
  }
  return ::testing::AssertionFailure() << "bits differ";
}

// New memory of the ranks holds 0xff: what lies behind the rows must not have been written.
void ExpectUntouched(const Tensor& t, std::int64_t begin) {
  if (begin == t.dim(0)) return;
  const Tensor tail = t.Slice(0, begin, t.dim(0) - begin).ToHost();
  const auto* bytes = static_cast<const unsigned char*>(tail.raw());
  for (std::int64_t i = 0; i < tail.bytes(); ++i) ASSERT_EQ(bytes[i], 0xff) << "byte " << i;
}

std::int64_t Sum(const Tensor& counts) {
  const Tensor host = counts.ToHost();
  std::int64_t sum = 0;
  for (const std::int64_t n : host.span<std::int64_t>()) sum += n;
  return sum;
}

struct Inputs {
  Tensor x, probs, dy, experts;
  Inputs(const ops::Context& ctx, DType dtype, std::int64_t width, const Routing& routing) {
    const auto name = [](const char* of) { return fmt::format("{}{}", of, g_world->rank()); };
    x = ctx.Place(testing::Normal({kTokens, width}, dtype, name("x")));
    dy = ctx.Place(testing::Normal({kTokens, width}, dtype, name("dy")));
    probs = ctx.Place(testing::Uniform({kTokens, kTopK}, DType::kF32, name("p"), 0, 1));
    experts = Experts(ctx, routing);
  }
};

// All that a dispatcher does with a layer's rows, "computed" by returning them as they are.
struct Outputs {
  nn::TokenDispatcher::Dispatched d;
  Tensor y, drows, dx, dprobs;
  Outputs(const ops::Context& ctx, nn::TokenDispatcher& dispatcher, const Inputs& in) {
    d = dispatcher.Dispatch(ctx, in.x, in.experts, in.probs, {});
    y = dispatcher.Combine(ctx, *d.state, d.rows.data);
    drows = dispatcher.CombineBackward(ctx, *d.state, in.dy);
    dx = ctx.Empty(in.x.shape(), in.x.dtype());
    dprobs = ctx.Empty(in.probs.shape(), in.probs.dtype());
    dispatcher.DispatchBackward(ctx, *d.state, drows, d.probs, ops::Write(dx), ops::Write(dprobs));
  }
};

void Compare(const Outputs& got, const Outputs& expected, bool fresh) {
  EXPECT_TRUE(
      SameBits(got.d.rows.split_sizes, expected.d.rows.split_sizes, got.d.rows.split_sizes.dim(0)));
  const std::int64_t rows = Sum(expected.d.rows.split_sizes);
  EXPECT_TRUE(SameBits(got.d.rows.data, expected.d.rows.data, rows)) << "rows";
  EXPECT_TRUE(SameBits(got.d.probs, expected.d.probs, rows)) << "probs";
  EXPECT_TRUE(SameBits(got.y, expected.y, kTokens)) << "y";
  EXPECT_TRUE(SameBits(got.drows, expected.drows, rows)) << "drows";
  EXPECT_TRUE(SameBits(got.dx, expected.dx, kTokens)) << "dx";
  EXPECT_TRUE(SameBits(got.dprobs, expected.dprobs, kTokens)) << "dprobs";
  if (!fresh) return;
  ExpectUntouched(got.d.rows.data, rows);
  ExpectUntouched(got.d.probs, rows);
}

// Rows of 16-byte pieces, of 4-byte ones and of single elements.
struct Form {
  DType dtype;
  std::int64_t width;
};

TEST(ExpertExchange, GivesTheBitsThatTheHostsCountsGive) {
  const ops::Context ctx(g_device);
  const Mesh mesh(*g_world, 1, g_world->size(), kExperts);
  ExpertParallelDispatcher by_host(mesh, ctx, kExperts, false);
  for (const Form& form : {Form{DType::kBF16, 64}, {DType::kF32, 5}, {DType::kBF16, 33}}) {
    for (const Routing& routing : Routings()) {
      SCOPED_TRACE(fmt::format("{} of {}, {}", form.width, Name(form.dtype), routing.name));
      // Room for all rows of all ranks; the memory of each is new.
      PeerDispatcher peers(mesh, ctx, kExperts, g_world->size(), 60);
      const Inputs in(ctx, form.dtype, form.width, routing);
      const Outputs expected(ctx, by_host, in);
      // Buffers that were used before, as in every step but the first.
      for (int step = 0; step < 3; ++step) {
        SCOPED_TRACE(step);
        const Outputs got(ctx, peers, in);
        Compare(got, expected, step == 0);
      }
      EXPECT_EQ(peers.status().item(), 0);
    }
  }
}

// Layers forward, then backward, each with another routing: as many dispatches are alive as there
// are layers, and a rank may be far ahead of another.
TEST(ExpertExchange, KeepsTheRowsOfEveryLayer) {
  const ops::Context ctx(g_device);
  const Mesh mesh(*g_world, 1, g_world->size(), kExperts);
  ExpertParallelDispatcher by_host(mesh, ctx, kExperts, false);
  PeerDispatcher peers(mesh, ctx, kExperts, g_world->size(), 60);
  std::vector<Inputs> inputs;
  for (const Routing& routing : Routings()) inputs.emplace_back(ctx, DType::kBF16, 64, routing);
  for (int step = 0; step < 3; ++step) {
    std::vector<Outputs> got, expected;
    for (const Inputs& in : inputs) got.emplace_back(ctx, peers, in);
    for (const Inputs& in : inputs) expected.emplace_back(ctx, by_host, in);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      SCOPED_TRACE(fmt::format("step {}, layer {}", step, i));
      Compare(got[i], expected[i], false);
    }
  }
}

TEST(ExpertExchange, SaysWhatDoesNotFitAndFitsOnceItHasGrown) {
  const ops::Context ctx(g_device);
  const std::int64_t ranks = g_world->size();
  const Mesh mesh(*g_world, 1, ranks, kExperts);
  ExpertParallelDispatcher by_host(mesh, ctx, kExperts, false);
  PeerDispatcher peers(mesh, ctx, kExperts, 1.25, 60);
  const std::vector<Routing> routings = Routings();
  const Inputs even(ctx, DType::kBF16, 64, routings[0]),
      all_on_one(ctx, DType::kBF16, 64, routings[2]);
  { const Outputs fits(ctx, peers, even); }
  EXPECT_EQ(peers.status().item(), 0);
  {
    const Outputs overflows(ctx, peers, all_on_one);
    EXPECT_TRUE(std::isinf(peers.status().item()));
    EXPECT_EQ(peers.needed().item(), static_cast<double>(kTokens * kTopK * ranks));
    EXPECT_EQ(Sum(overflows.d.rows.split_sizes), 0);
    // New memory is NaN: the step must not go on with it, and look as one that has diverged.
    for (const Tensor& t : {overflows.y, overflows.dx, overflows.dprobs}) {
      EXPECT_TRUE(SameBits(t, Tensor::Zeros(t.shape(), t.dtype()), kTokens)) << Describe(t);
    }
    // Until the step is made again nothing moves, whatever would fit.
    const Outputs later(ctx, peers, even);
    EXPECT_EQ(Sum(later.d.rows.split_sizes), 0);
  }
  peers.Grow(static_cast<std::int64_t>(peers.needed().item()));
  EXPECT_EQ(peers.status().item(), 0);
  const Outputs got(ctx, peers, all_on_one), expected(ctx, by_host, all_on_one);
  EXPECT_EQ(peers.status().item(), 0);
  Compare(got, expected, true);
}

// Rank 1 never comes to the second dispatch; the kernel of rank 0 waits for it.
int LeaveAlone() {
  const ops::Context ctx(g_device);
  const Mesh mesh(*g_world, 1, g_world->size(), kExperts);
  PeerDispatcher peers(mesh, ctx, kExperts, 2, 60);
  const Inputs in(ctx, DType::kBF16, 64, Routings()[0]);
  for (int step = 0; step < 2; ++step) {
    const Outputs out(ctx, peers, in);
    out.dx.ToHost();
    if (g_world->rank() == 1) std::this_thread::sleep_for(std::chrono::minutes(2));
  }
  return 0;
}

int Main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(catch_exceptions, false);  // an exception ends all ranks
  return comm::mpi::RunRank([&](comm::Communicator& control) {
    g_device = comm::nccl::DeviceOfRank(control);
    comm::nccl::ConnectOptions options;
    options.communicator.limit = std::chrono::seconds(argc > 1 ? 20 : 600);
    const auto world = comm::nccl::Connect(control, g_device, options);
    g_world = world.get();
    const std::string why = comm::nccl::WhyNoPeers(*world, g_device);
    if (!why.empty()) {
      fmt::print("not run: {}\n", why);
      return 0;
    }
    if (argc > 1 && std::string_view(argv[1]) == "alone") return LeaveAlone();
    return RUN_ALL_TESTS();
  });
}

}  // namespace
}  // namespace cistron::parallel

int main(int argc, char** argv) {
  return cistron::parallel::Main(argc, argv);
}
