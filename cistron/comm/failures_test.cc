// Ranks that do not match, do not come, throw or return: an error on every rank, never a hang.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "cistron/base/threads.h"
#include "cistron/comm/inproc.h"
#include "cistron/comm/self.h"

namespace cistron::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kShort{300};

// The error with which a run ends; what each rank saw goes to `seen`.
Error RunAndFail(int ranks, const std::function<void(Communicator&)>& f,
                 const Options& options = {.limit = std::chrono::seconds(60), .checked = true}) {
  std::atomic<int> threw{0};
  try {
    RunRanks(
        ranks,
        [&](Communicator& comm) {
          try {
            f(comm);
          } catch (const Error& e) {
            ++threw;
            // A broken communicator stays broken.
            if (e.code() == ErrorCode::kIo) {
              EXPECT_THROW(comm.Barrier(), Error);
            }
            throw;
          }
        },
        options);
  } catch (const Error& e) {
    EXPECT_EQ(threw, ranks) << "every rank must end with an error: " << e.message();
    return e;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kInternal, "nothing was thrown");
}

Tensor Ones(std::int64_t n, DType dtype = DType::kF32) {
  Tensor t = Tensor::Zeros({n}, dtype);
  return t;
}

TEST(Mismatch, OfKind) {
  const Error e = RunAndFail(3, [](Communicator& comm) {
    comm.Barrier();
    if (comm.rank() == 1) {
      comm.Broadcast(Ones(4), 2);
    } else {
      comm.AllReduce(Ones(8));
    }
  });
  EXPECT_EQ(e.code(), ErrorCode::kIo);
  EXPECT_THAT(e.message(), AllOf(HasSubstr("all_reduce sum of 8 f32"),
                                 HasSubstr("broadcast of 4 f32 from rank 2"), HasSubstr("rank 1"),
                                 HasSubstr("operation 2 of 'world'"),
                                 HasSubstr("finished last: operation 1, barrier")));
}

TEST(Mismatch, OfDTypeOperatorCountAndRoot) {
  const std::vector<std::function<void(Communicator&)>> runs = {
      [](Communicator& c) { c.AllReduce(Ones(8, c.rank() ? DType::kF32 : DType::kF64)); },
      [](Communicator& c) { c.AllReduce(Ones(8), c.rank() ? ReduceOp::kSum : ReduceOp::kMax); },
      [](Communicator& c) { c.AllReduce(Ones(8 + c.rank())); },
      [](Communicator& c) { c.Broadcast(Ones(8), c.rank()); },
      [](Communicator& c) { c.AllGather(Ones(1 + c.rank()), Ones(2 + 2 * c.rank())); },
  };
  const std::vector<std::pair<std::string, std::string>> sides = {
      {"of 8 f64", "of 8 f32"},
      {"all_reduce max", "all_reduce sum"},
      {"of 8 f32", "of 9 f32"},
      {"from rank 0", "from rank 1"},
      {"all_gather of 2 f32", "all_gather of 4 f32"}};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    EXPECT_THAT(RunAndFail(2, runs[i]).message(),
                AllOf(HasSubstr(sides[i].first), HasSubstr(sides[i].second)));
  }
}

TEST(Mismatch, OfRowCounts) {
  const Error e = RunAndFail(2, [](Communicator& comm) {
    // Rank 0 sends three rows; rank 1 expects two.
    const std::vector<std::int64_t> to = {0, comm.rank() == 0 ? 3 : 0};
    const std::vector<std::int64_t> from = {comm.rank() == 0 ? 0 : 2, 0};
    comm.AllToAll(Tensor::Zeros({3, 4}, DType::kF32), to, Tensor::Zeros({3, 4}, DType::kF32), from);
  });
  EXPECT_THAT(e.message(), AnyOf(HasSubstr("sends 3 and expects 0, rank 1 expects 2 and sends 0"),
                                 HasSubstr("sends 0 and expects 2, rank 0 expects 0 and sends 3")));
}

TEST(Mismatch, UncheckedLengthsAreFoundByTheirMessages) {
  const Error e = RunAndFail(2, [](Communicator& comm) { comm.AllReduce(Ones(8 + comm.rank())); },
                             {.limit = std::chrono::seconds(60), .checked = false});
  EXPECT_THAT(e.message(), AnyOf(HasSubstr("rank 1 sent 36 bytes where this rank expects 32"),
                                 HasSubstr("rank 0 sent 32 bytes where this rank expects 36")));
}

TEST(Mismatch, OfAMessage) {
  const Error e = RunAndFail(2, [](Communicator& comm) {
    if (comm.rank() == 0) {
      comm.Send(Ones(3), 1);
    } else {
      comm.Recv(Ones(4), 0);
    }
    comm.Barrier();
  });
  EXPECT_THAT(e.message(), AllOf(HasSubstr("rank 1: recv of 4 f32 from rank 0 (point to point"),
                                 HasSubstr("rank 0 sent 12 bytes where this rank expects 16")));
}

// The rank that is late computes (sleeps) beyond the limit, and then throws as the others did.
TEST(Watchdog, NamesRankOperationSequenceAndTheLastThatFinished) {
  for (const bool checked : {true, false}) {
    const auto begin = Clock::now();
    const Error e = RunAndFail(3,
                               [](Communicator& comm) {
                                 comm.AllReduce(Ones(5));
                                 comm.Broadcast(Ones(2), 1);
                                 if (comm.rank() == 1) std::this_thread::sleep_for(4 * kShort);
                                 comm.AllReduce(Ones(100'000));
                               },
                               {.limit = kShort, .checked = checked});
    EXPECT_GE(Clock::now() - begin, kShort);
    EXPECT_EQ(e.code(), ErrorCode::kIo);
    EXPECT_THAT(e.message(),
                AllOf(HasSubstr("all_reduce sum of 100000 f32"),
                      HasSubstr("operation 3 of 'world'"), HasSubstr("waited 0.3 s for rank 1"),
                      HasSubstr("finished last: operation 2, broadcast of 2 f32 from rank 1")));
    EXPECT_THAT(e.message(), AnyOf(HasSubstr("rank 0: "), HasSubstr("rank 2: ")));
  }
}

TEST(Watchdog, NamesRanksOfTheWorldInASubCommunicator) {
  const Error e = RunAndFail(4,
                             [](Communicator& comm) {
                               const auto odd = comm.Split(comm.rank() % 2, 0, "ep");
                               if (comm.rank() == 3) std::this_thread::sleep_for(4 * kShort);
                               if (comm.rank() % 2 == 1) odd->Barrier();
                               comm.Barrier();
                             },
                             {.limit = kShort, .checked = true});
  EXPECT_THAT(e.message(), HasSubstr("for rank"));
  EXPECT_THAT(e.message(), HasSubstr("3"));
}

TEST(Watchdog, FiresInABackgroundOperationAndInRecv) {
  Error e = RunAndFail(2,
                       [](Communicator& comm) {
                         if (comm.rank() == 1) std::this_thread::sleep_for(4 * kShort);
                         const Work work = comm.AllReduceAsync(Ones(100'000));
                         work.Wait();
                       },
                       {.limit = kShort, .checked = false});
  EXPECT_THAT(e.message(), HasSubstr("rank 0: all_reduce"));
  e = RunAndFail(2,
                 [](Communicator& comm) {
                   if (comm.rank() == 1) comm.Recv(Ones(1), 0);
                   std::this_thread::sleep_for(4 * kShort);
                   comm.Barrier();
                 },
                 {.limit = kShort, .checked = false});
  EXPECT_THAT(e.message(), HasSubstr("rank 1: recv of 1 f32 from rank 0"));
}

TEST(Ranks, AnExceptionOfOneEndsTheOthersAndIsRethrown) {
  for (int thrower = 0; thrower < 3; ++thrower) {
    std::atomic<int> ended{0};
    try {
      RunRanks(3, [&](Communicator& comm) {
        if (comm.rank() == thrower) throw std::runtime_error("the disk is on fire");
        try {
          comm.Barrier();
          comm.AllReduce(Ones(100'000));
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), ErrorCode::kIo);
          EXPECT_THAT(e.message(),
                      HasSubstr(fmt::format("ended by rank {}: the disk is on fire", thrower)));
          ++ended;
          throw;
        }
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "the disk is on fire");
    }
    EXPECT_EQ(ended, 2);
  }
}

TEST(Ranks, OneThatReturnsWhileAnotherWaitsEndsTheRun) {
  try {
    RunRanks(2, [&](Communicator& comm) {
      if (comm.rank() == 0) comm.AllReduce(Ones(100'000));
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_THAT(e.message(), HasSubstr("rank 1 returned and takes no part"));
  }
}

TEST(Ranks, AFailureThatIsKeptQuietEndsTheRunToo) {
  EXPECT_THROW(RunRanks(2,
                        [](Communicator& comm) {
                          try {
                            comm.AllReduce(Ones(8 + comm.rank()));
                          } catch (const Error&) {
                          }
                        }),
               Error);
}

// As many as a large cluster has: what simulations run.
TEST(Ranks, MayBeHundreds) {
  constexpr int kRanks = 200;
  RunRanks(kRanks, [](Communicator& comm) {
    Tensor t = Tensor::Zeros({300}, DType::kI64);
    t.span<std::int64_t>()[0] = comm.rank();
    comm.AllReduce(t);
    EXPECT_EQ(t.span<std::int64_t>()[0], kRanks * (kRanks - 1) / 2);
    const auto row = comm.Split(comm.rank() / 8, 0);
    row->Barrier();
    EXPECT_EQ(row->size(), 8);
  });
}

TEST(Ranks, ShareTheThreadsOfTheCaller) {
  const int before = NumThreads();
  SetNumThreads(4);
  RunRanks(2, [](Communicator&) { EXPECT_EQ(NumThreads(), 2); });
  RunRanks(5, [](Communicator&) { EXPECT_EQ(NumThreads(), 1); });
  EXPECT_EQ(NumThreads(), 4);
  SetNumThreads(before);
  EXPECT_THROW(RunRanks(0, [](Communicator&) {}), Error);
}

// The message of a call that can never work.
std::string MessageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    return e.message();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Arguments, AreCheckedBeforeAnythingIsSent) {
  RunRanks(2, [](Communicator& c) {
    const Tensor t = Ones(6);
    const std::vector<std::int64_t> one = {1}, negative = {7, -1}, ok = {2, 4};
    EXPECT_THAT(MessageOf([&] { c.AllReduce({}); }), HasSubstr("all_reduce: the tensor is not"));
    EXPECT_THAT(MessageOf([&] { c.AllReduce(Ones(6, DType::kU8)); }),
                HasSubstr("u8 [6] cannot be reduced"));
    const Tensor column = Tensor::Zeros({4, 4}, DType::kF32).Slice(1, 0, 1);
    EXPECT_THAT(MessageOf([&] { c.AllReduce(column); }), HasSubstr("not contiguous"));
    EXPECT_THAT(MessageOf([&] { c.ReduceScatter(Ones(5), Ones(2)); }), HasSubstr("equal parts"));
    EXPECT_THAT(MessageOf([&] { c.ReduceScatter(t, Ones(3, DType::kF64)); }),
                HasSubstr("input is f32 [6] and output is f64 [3]"));
    EXPECT_THAT(MessageOf([&] { c.ReduceScatter(t, Ones(2)); }), HasSubstr("its count is 3"));
    EXPECT_THAT(MessageOf([&] { c.AllGather(t.Slice(0, 1, 3), t); }), HasSubstr("overlap"));
    EXPECT_THAT(MessageOf([&] { c.AllGather(Ones(1), t, one); }), HasSubstr("1 counts are given"));
    EXPECT_THAT(MessageOf([&] { c.AllGather(Ones(1), t, negative); }), HasSubstr("[7, -1]"));
    EXPECT_THAT(MessageOf([&] { c.AllToAll(t, ok, Ones(5), ok); }),
                HasSubstr("recv_counts sum to 6 rows, but output is f32 [5]"));
    EXPECT_THAT(MessageOf([&] { c.AllToAll(t, ok, t, ok); }), HasSubstr("overlap"));
    EXPECT_THAT(MessageOf([&] {
                  c.AllToAll(t, ok, Tensor::Zeros({6, 2}, DType::kF32), ok);
                }),
                HasSubstr("rows of input"));
    EXPECT_THAT(MessageOf([&] { c.Broadcast(t, 2); }), HasSubstr("root is 2, but ranks are 0 … 1"));
    EXPECT_THAT(MessageOf([&] { c.Send(t, c.rank()); }), HasSubstr("is this rank"));
    c.Barrier();  // nothing was broken by that
  });
}

}  // namespace
}  // namespace cistron::comm
