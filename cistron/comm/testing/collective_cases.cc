// Expected values are closed forms of (rank, element): small integers, exact in every dtype, or
// values whose sum depends on the order in which it is taken.
#include "cistron/comm/testing/collective_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <thread>

#include "cistron/base/philox.h"
#include "cistron/check/compare.h"
#include "cistron/testing/poison.h"

namespace cistron::comm {
namespace {

using testing::Agrees;

constexpr std::array kReducible = {DType::kF32, DType::kF64, DType::kBF16, DType::kI64};
constexpr std::array kMovable = {DType::kF32, DType::kBF16, DType::kE4M3, DType::kI64, DType::kU8};

// f(i) as a tensor of a dtype. The values are exact there.
template <class F>
Tensor Fill(const Shape& shape, DType dtype, F f) {
  Tensor wide = Tensor::Empty(shape, DType::kF64);
  std::span<double> values = wide.span<double>();
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<double>(f(static_cast<std::int64_t>(i)));
  return ConvertTo(wide, dtype);
}

// Of rank r at element i: 0 … 12, other at every rank and place.
std::int64_t Value(int r, std::int64_t i) {
  return (3 * r + i) % 13;
}

std::string About(const Communicator& comm, std::string_view what, std::int64_t n, DType dtype) {
  return fmt::format("{} of {} {} on {} {} ranks", what, n, Name(dtype), comm.size(),
                     comm.transport());
}

// Empty, one element, fewer than ranks, one round, several rounds of the two-round algorithm, and
// (f32) more than it takes at once.
constexpr std::array<std::int64_t, 6> kSizes = {0, 1, 3, 1000, 40'000, (1 << 20) + 77};

void AllReduce(Communicator& comm) {
  for (const DType dtype : kReducible) {
    for (const std::int64_t n : kSizes) {
      if (n > 100'000 && dtype != DType::kF32) continue;  // f32 alone crosses the border with it
      for (const ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        Tensor t = Fill({n}, dtype, [&](std::int64_t i) { return Value(comm.rank(), i); });
        comm.AllReduce(t, reduce);
        const Tensor expected = Fill({n}, dtype, [&](std::int64_t i) {
          std::int64_t result = Value(0, i);
          for (int r = 1; r < comm.size(); ++r) {
            const std::int64_t v = Value(r, i);
            result = reduce == ReduceOp::kSum   ? result + v
                     : reduce == ReduceOp::kMax ? std::max(result, v)
                                                : std::min(result, v);
          }
          return result;
        });
        EXPECT_TRUE(
            Agrees(check::CompareBitwise(About(comm, Name(reduce), n, dtype), t, expected)));
      }
    }
  }
}

// Rank 0 gives 2^30, rank 1 one, rank 2 −2^30, others 1/4: from the left the one is lost, in every
// other order it is not. In bf16 the one is lost in fp32 too, as is the quarter beside it.
void SumsAreTakenInRankOrder(Communicator& comm) {
  const std::array<double, 5> gives = {0x1p30, 1.0, -0x1p30, 0.25, 0.25};
  const std::array<double, 5> sums = {0x1p30, 0x1p30, 0.0, 0.25, 0.5};
  if (comm.size() > 5) GTEST_SKIP() << "made for at most 5 ranks";
  const double own = gives[static_cast<std::size_t>(comm.rank())];
  const double sum = sums[static_cast<std::size_t>(comm.size() - 1)];
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t n : kSizes) {
      Tensor t = Fill({n}, dtype, [&](std::int64_t) { return own; });
      comm.AllReduce(t);
      const Tensor expected = Fill({n}, dtype, [&](std::int64_t) { return sum; });
      EXPECT_TRUE(Agrees(check::CompareBitwise(About(comm, "rank order", n, dtype), t, expected)));
    }
    Tensor whole = Fill({comm.size(), 7}, dtype, [&](std::int64_t) { return own; });
    Tensor part = Tensor::Empty({7}, dtype);
    comm.ReduceScatter(whole, part);
    const Tensor expected = Fill({7}, dtype, [&](std::int64_t) { return sum; });
    EXPECT_TRUE(Agrees(check::CompareBitwise("reduce_scatter in rank order", part, expected)));
  }
}

// 1 + n·2^-8: every partial sum rounded to bf16 would stay at 1; summed in fp32 it is rounded once.
void BF16IsRoundedOnce(Communicator& comm) {
  Tensor t =
      Fill({5000}, DType::kBF16, [&](std::int64_t) { return comm.rank() == 0 ? 1 : 0x1p-8; });
  comm.AllReduce(t);
  const bf16 sum(1.0f + static_cast<float>(comm.size() - 1) * 0x1p-8f);
  for (const bf16 value : t.span<bf16>()) {
    ASSERT_EQ(value.bits, sum.bits) << comm.size() << " ranks";
  }
}

void NaNPropagates(Communicator& comm) {
  for (const ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
      for (int bad = 0; bad < comm.size(); ++bad) {
        Tensor t = Fill({3}, dtype, [&](std::int64_t i) {
          return i == 1 && comm.rank() == bad ? std::numeric_limits<double>::quiet_NaN() : 1.0;
        });
        comm.AllReduce(t, reduce);
        const double rest = reduce == ReduceOp::kSum ? comm.size() : 1;
        EXPECT_EQ(ElementAsDouble(t, 0), rest);
        EXPECT_TRUE(std::isnan(ElementAsDouble(t, 1))) << Name(reduce) << " " << Name(dtype);
        EXPECT_EQ(ElementAsDouble(t, 2), rest);
      }
    }
  }
}

// Counts of elements or rows a rank: uneven, with empty ranks; with none at all; all on one.
std::vector<std::vector<std::int64_t>> CountLists(int ranks) {
  const std::size_t n = static_cast<std::size_t>(ranks);
  std::vector<std::int64_t> uneven(n), none(n, 0), one(n, 0), large(n);
  for (std::size_t r = 0; r < n; ++r) {
    uneven[r] = static_cast<std::int64_t>(r % 2 == 0 ? 3 * r : 5 * r + 1);
    large[r] = static_cast<std::int64_t>(250'000 + 1000 * r);
  }
  one.back() = 9;
  return {uneven, none, one, large};
}

std::int64_t Sum(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

void ReduceScatterAndAllGather(Communicator& comm) {
  const std::size_t self = static_cast<std::size_t>(comm.rank());
  for (const auto& counts : CountLists(comm.size())) {
    const std::int64_t total = Sum(counts);
    const std::int64_t offset = Sum(std::span(counts).first(self));
    for (const DType dtype : kReducible) {
      if (total > 100'000 && dtype != DType::kF64) continue;
      const auto sum = [&](std::int64_t i) {
        std::int64_t s = 0;
        for (int r = 0; r < comm.size(); ++r) s += Value(r, i);
        return s;
      };
      const Tensor input =
          Fill({total}, dtype, [&](std::int64_t i) { return Value(comm.rank(), i); });
      const Tensor expected =
          Fill({counts[self]}, dtype, [&](std::int64_t i) { return sum(offset + i); });
      const Tensor before = input.Clone();
      Tensor output = Tensor::Empty({counts[self]}, dtype);
      FillPoison(output);
      comm.ReduceScatter(input, output, ReduceOp::kSum, counts);
      EXPECT_TRUE(Agrees(check::CompareBitwise("reduce_scatter", output, expected)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("its input", input, before)));
      // In place: the part of this rank; then the whole from it.
      const Tensor part = input.Slice(0, offset, counts[self]);
      comm.ReduceScatter(input, part, ReduceOp::kSum, counts);
      EXPECT_TRUE(Agrees(check::CompareBitwise("reduce_scatter in place", part, expected)));
      comm.AllGather(part, input, counts);
      const Tensor all = Fill({total}, dtype, sum);
      EXPECT_TRUE(Agrees(check::CompareBitwise("all_gather in place", input, all)));
    }
    for (const DType dtype : kMovable) {
      Tensor input = Fill({counts[self]}, dtype, [&](std::int64_t i) { return (offset + i) % 16; });
      Tensor output = Tensor::Empty({total}, dtype);
      comm.AllGather(input, output, counts);
      const Tensor expected = Fill({total}, dtype, [](std::int64_t i) { return i % 16; });
      EXPECT_TRUE(Agrees(check::CompareBitwise("all_gather", output, expected)));
    }
  }
  // Equal parts without counts; shapes need not be flat.
  Tensor input = Fill({2, 3}, DType::kF32, [&](std::int64_t i) { return 6 * comm.rank() + i; });
  Tensor output = Tensor::Empty({comm.size(), 2, 3}, DType::kF32);
  comm.AllGather(input, output);
  const Tensor expected = Fill({comm.size(), 2, 3}, DType::kF32, [](std::int64_t i) { return i; });
  EXPECT_TRUE(Agrees(check::CompareBitwise("all_gather of equal parts", output, expected)));
}

// Rows from rank s to rank d: some pairs have none, some ranks send or receive none at all.
std::int64_t PairRows(int pattern, int s, int d) {
  switch (pattern) {
    case 0: return (s + 2 * d) % 4;
    case 1: return 0;
    case 2: return d == 0 ? s + 1 : 0;     // all to rank 0
    case 3: return s == 0 ? 2 * d : 0;     // all from rank 0
    default: return s == d ? 3 : 700 + s;  // longer than what is copied at once
  }
}

void AllToAll(Communicator& comm) {
  const int self = comm.rank(), n = comm.size();
  for (const DType dtype : kMovable) {
    for (int pattern = 0; pattern < 5; ++pattern) {
      for (const std::int64_t width : {1, 5, 0}) {
        std::vector<std::int64_t> send, recv;
        for (int r = 0; r < n; ++r) {
          send.push_back(PairRows(pattern, self, r));
          recv.push_back(PairRows(pattern, r, self));
        }
        // Element j of row k from s to d.
        const auto value = [](int s, int d, std::int64_t k, std::int64_t j) {
          return (s + 3 * d + 5 * k + j) % 16;
        };
        const auto rows = [&](bool out) {
          std::vector<double> values;
          for (int r = 0; r < n; ++r) {
            const std::int64_t count = (out ? send : recv)[static_cast<std::size_t>(r)];
            for (std::int64_t k = 0; k < count; ++k) {
              for (std::int64_t j = 0; j < width; ++j) {
                values.push_back(
                    static_cast<double>(out ? value(self, r, k, j) : value(r, self, k, j)));
              }
            }
          }
          const Shape shape{Sum(out ? send : recv), width};
          return ConvertTo(Tensor::FromSpan<double>(shape, values), dtype);
        };
        // Padded: rows beyond the counts are poison that nobody may read or write.
        const testing::PaddedTensor input = testing::Pad(rows(true), 2);
        const testing::PaddedTensor output = testing::MakePadded({Sum(recv), width}, dtype, 3);
        comm.AllToAll(input.whole, send, output.whole, recv);
        EXPECT_TRUE(Agrees(check::CompareBitwise(
            fmt::format("all_to_all pattern {} width {} {}", pattern, width, Name(dtype)),
            output.used, rows(false))));
        EXPECT_TRUE(testing::IsPoisoned(output.tail));
      }
    }
  }
}

void Broadcast(Communicator& comm) {
  for (const DType dtype : kMovable) {
    for (const std::int64_t n : {0, 1, 5000}) {
      for (int root = 0; root < comm.size(); ++root) {
        Tensor t = Tensor::Empty({n}, dtype);
        FillPoison(t);
        const Tensor expected = Fill({n}, dtype, [&](std::int64_t i) { return (i + root) % 16; });
        if (comm.rank() == root) CopyTo(expected, t);
        comm.Broadcast(t, root);
        EXPECT_TRUE(Agrees(check::CompareBitwise("broadcast", t, expected)));
      }
    }
  }
}

// Before the barrier, ranks send to rank 0 in any order; a barrier lets none through before the
// last came, so the message "after" of any rank cannot overtake.
void BarrierAndPointToPoint(Communicator& comm) {
  const int n = comm.size(), next = (comm.rank() + 1) % n, before = (comm.rank() + n - 1) % n;
  for (int repeat = 0; repeat < 3; ++repeat) comm.Barrier();
  if (n == 1) return;
  for (const std::int64_t count : {0, 3, 3000}) {
    // All send before anybody receives; two messages keep their order, around a collective.
    const Tensor first =
        Fill({count}, DType::kF32, [&](std::int64_t i) { return comm.rank() + i; });
    const Tensor second = Fill({count}, DType::kI64, [&](std::int64_t i) { return -i; });
    comm.Send(first, next);
    comm.Send(second, next);
    comm.Barrier();
    Tensor got = Tensor::Empty({count}, DType::kF32), more = Tensor::Empty({count}, DType::kI64);
    comm.Recv(got, before);
    comm.Recv(more, before);
    EXPECT_TRUE(Agrees(check::CompareBitwise(
        "the first message", got,
        Fill({count}, DType::kF32, [&](std::int64_t i) { return before + i; }))));
    EXPECT_TRUE(Agrees(check::CompareBitwise("the second", more, second)));
  }
}

void AsyncOperationsRunInOrder(Communicator& comm) {
  const std::int64_t n = 20'000;
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int k = 0; k < 10; ++k) {
    tensors.push_back(Fill({n}, DType::kF32, [&](std::int64_t) { return comm.rank() + k; }));
    works.push_back(comm.AllReduceAsync(tensors.back()));
  }
  const std::int64_t ranks = comm.size();
  // A blocking call comes after what was started.
  comm.Barrier();
  for (const Work& work : works) EXPECT_TRUE(work.Done());
  // Waited for in any order, more than once, or not at all.
  for (std::size_t k = works.size(); k-- > 1;) {
    works[k].Wait();
    works[k].Wait();
    const std::int64_t sum = ranks * (ranks - 1) / 2 + ranks * static_cast<std::int64_t>(k);
    EXPECT_TRUE(Agrees(check::CompareBitwise(
        "async", tensors[k], Fill({n}, DType::kF32, [&](std::int64_t) { return sum; }))));
  }
  Tensor part = Fill({4}, DType::kI64, [&](std::int64_t i) { return comm.rank() + i; });
  Tensor whole = Tensor::Empty({ranks, 4}, DType::kI64);
  Tensor back = Tensor::Empty({4}, DType::kI64);
  const Work gather = comm.AllGatherAsync(part, whole);
  gather.Wait();
  const Work scatter = comm.ReduceScatterAsync(whole, back);
  const Work broadcast = comm.BroadcastAsync(part, 0);
  scatter.Wait();
  broadcast.Wait();
  EXPECT_EQ(back.span<std::int64_t>()[1], ranks * (comm.rank() + 1));
  EXPECT_EQ(part.span<std::int64_t>()[3], 3);
  EXPECT_TRUE(Work().Done());
}

// Values whose sums round, random delays: the same bits in every repeat, on every rank.
void SameBitsInEveryRepeat(Communicator& comm) {
  const RandomStream values(11, fmt::format("rank {}", comm.rank()));
  const RandomStream delays(12, fmt::format("rank {}", comm.rank()));
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t n : {100, 30'000}) {
      const Tensor input = Fill({n}, DType::kF64, [&](std::int64_t i) {
        return static_cast<double>(
            static_cast<float>(bf16(values.Uniform(static_cast<std::uint64_t>(i)) - 0.5f)));
      });
      Tensor first;
      for (std::uint64_t repeat = 0; repeat < (n < 1000 ? 100u : 25u); ++repeat) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(static_cast<int>(300 * delays.Uniform(repeat))));
        Tensor t = ConvertTo(input, dtype);
        comm.AllReduce(t);
        if (!first) {
          first = t;
          Tensor all = Tensor::Empty({comm.size(), n}, dtype);
          comm.AllGather(t, all);
          for (int r = 0; r < comm.size(); ++r) {
            EXPECT_TRUE(Agrees(check::CompareBitwise("another rank's", all.Select(r), t)));
          }
        }
        EXPECT_TRUE(Agrees(check::CompareBitwise("a repeat", t, first)));
      }
    }
  }
}

void SubCommunicators(Communicator& comm) {
  const int n = comm.size(), rank = comm.rank();
  // Odd and even ranks, in reverse order.
  const auto parity = comm.Split(rank % 2, -rank, "parity");
  const int members = (n + 1 - rank % 2) / 2;
  ASSERT_EQ(parity->size(), members);
  EXPECT_EQ(parity->rank(), members - 1 - rank / 2);
  EXPECT_EQ(parity->name(), "parity");
  Tensor order = Tensor::Empty({members}, DType::kI64);
  parity->AllGather(Fill({1}, DType::kI64, [&](std::int64_t) { return rank; }), order);
  for (int m = 0; m < members; ++m) {
    EXPECT_EQ(order.span<std::int64_t>()[static_cast<std::size_t>(m)],
              rank % 2 + 2 * (members - 1 - m));
  }
  // One rank alone, the others together; some without a communicator; a split of a split.
  const auto alone = comm.Split(rank == 0 ? 7 : 3, 0);
  EXPECT_EQ(alone->size(), rank == 0 ? 1 : n - 1);
  EXPECT_EQ(alone->name(), rank == 0 ? "world/7" : "world/3");
  const auto some = comm.Split(rank == n - 1 ? -1 : 0, 0);
  EXPECT_EQ(some == nullptr, rank == n - 1);
  const auto nested = parity->Split(0, rank);
  EXPECT_EQ(nested->rank(), rank / 2);
  // All of them at the same time: their messages do not mix.
  Tensor a = Fill({10'000}, DType::kF32, [&](std::int64_t) { return 1; });
  Tensor b = a.Clone(), c = a.Clone(), d = a.Clone(), e = a.Clone();
  const std::vector<Work> works = {comm.AllReduceAsync(a), parity->AllReduceAsync(b),
                                   alone->AllReduceAsync(c), nested->AllReduceAsync(d)};
  if (some) some->AllReduce(e);
  for (const Work& work : works) work.Wait();
  EXPECT_EQ(ElementAsDouble(a, 9999), n);
  EXPECT_EQ(ElementAsDouble(b, 9999), members);
  EXPECT_EQ(ElementAsDouble(c, 9999), alone->size());
  EXPECT_EQ(ElementAsDouble(d, 9999), members);
  EXPECT_EQ(ElementAsDouble(e, 9999), some ? n - 1 : 1);
  comm.Barrier();
}

// A mesh of dp × ep, row-major, as parallel/ makes it.
void Mesh(Communicator& comm) {
  if (comm.size() != 4) return;
  const auto ep = comm.Split(comm.rank() / 2, comm.rank(), "ep");
  const auto dp = comm.Split(comm.rank() % 2, comm.rank(), "dp");
  Tensor t = Fill({1}, DType::kI64, [&](std::int64_t) { return 1 << (4 * comm.rank()); });
  Tensor u = t.Clone();
  ep->AllReduce(t);
  dp->AllReduce(u);
  EXPECT_EQ(t.item(), comm.rank() < 2 ? 0x11 : 0x1100);
  EXPECT_EQ(u.item(), comm.rank() % 2 == 0 ? 0x101 : 0x1010);
}

}  // namespace

std::vector<CollectiveCase> CollectiveCases() {
  return {{"AllReduce", AllReduce},
          {"SumsAreTakenInRankOrder", SumsAreTakenInRankOrder},
          {"BF16IsRoundedOnce", BF16IsRoundedOnce},
          {"NaNPropagates", NaNPropagates},
          {"ReduceScatterAndAllGather", ReduceScatterAndAllGather},
          {"AllToAll", AllToAll},
          {"Broadcast", Broadcast},
          {"BarrierAndPointToPoint", BarrierAndPointToPoint},
          {"AsyncOperationsRunInOrder", AsyncOperationsRunInOrder},
          {"SameBitsInEveryRepeat", SameBitsInEveryRepeat},
          {"SubCommunicators", SubCommunicators},
          {"Mesh", Mesh}};
}

}  // namespace cistron::comm
