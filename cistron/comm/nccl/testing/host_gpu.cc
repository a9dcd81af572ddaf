#include "cistron/comm/nccl/testing/host_gpu.h"

#include <cuda_runtime.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "cistron/comm/nccl/library.h"
#include "cistron/comm/nccl/reduce_ranks.h"
#include "cistron/comm/reduce.h"
#include "cistron/tensor/cuda_backend.h"

namespace {

std::atomic<int> g_sums{0};
std::atomic<int> g_opened{0};
std::atomic<std::int64_t> g_live{0};

// The events of a thread, and how many of them end.
struct Timeline {
  std::atomic<std::int64_t> recorded{0}, ends{std::numeric_limits<std::int64_t>::max()};
};
thread_local auto t_timeline = std::make_shared<Timeline>();
struct HostEvent {
  std::shared_ptr<Timeline> timeline;
  std::int64_t number = 0;
};
HostEvent& Of(cudaEvent_t event) {
  return *reinterpret_cast<HostEvent*>(event);
}

thread_local cistron::comm::nccl::PeerFaults t_faults;

// Messages between the threads of a group.
struct Room {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int>, std::deque<std::vector<char>>> messages;  // by sender, receiver
};

struct HostComm {
  std::shared_ptr<Room> room;
  int rank, size;

  void Send(const void* data, std::size_t bytes, int to) {
    const std::lock_guard lock(room->mutex);
    const auto* begin = static_cast<const char*>(data);
    room->messages[{rank, to}].emplace_back(begin, begin + bytes);
    room->changed.notify_all();
  }
  void Recv(void* data, std::size_t bytes, int from) {
    std::unique_lock lock(room->mutex);
    auto& queue = room->messages[{from, rank}];
    room->changed.wait(lock, [&] { return !queue.empty(); });
    if (queue.front().size() != bytes) std::abort();  // NCCL would hang, or write beyond
    std::memcpy(data, queue.front().data(), bytes);
    queue.pop_front();
  }
};

HostComm& Of(ncclComm_t comm) {
  return *reinterpret_cast<HostComm*>(comm);
}

// Receives of an open group wait for its end.
struct Receive {
  ncclComm_t comm;
  void* data;
  std::size_t bytes;
  int from;
};
thread_local bool t_grouped = false;
thread_local std::vector<Receive> t_receives;

std::size_t SizeOfType(ncclDataType_t type) {
  switch (type) {
    case ncclUint8: return 1;
    case ncclBfloat16: return 2;
    case ncclFloat32: return 4;
    default: return 8;
  }
}
cistron::DType DTypeOfType(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16: return cistron::DType::kBF16;
    case ncclFloat32: return cistron::DType::kF32;
    case ncclFloat64: return cistron::DType::kF64;
    default: return cistron::DType::kI64;
  }
}

ncclResult_t GetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* GetErrorString(ncclResult_t) {
  return "an error";
}
const char* GetLastError(ncclComm_t) {
  return "";
}
ncclResult_t GetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> next{0};
  const int number = next++;
  std::memcpy(id, &number, sizeof(number));
  return ncclSuccess;
}
ncclResult_t CommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  static std::mutex mutex;
  static std::map<int, std::shared_ptr<Room>> rooms;
  int number = 0;
  std::memcpy(&number, &id, sizeof(number));
  const std::lock_guard lock(mutex);
  std::shared_ptr<Room>& room = rooms[number];
  if (!room) room = std::make_shared<Room>();
  *comm = reinterpret_cast<ncclComm_t>(new HostComm{room, rank, size});
  return ncclSuccess;
}
ncclResult_t CommDestroy(ncclComm_t comm) {
  delete &Of(comm);
  return ncclSuccess;
}
ncclResult_t CommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t Send(const void* data, std::size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                  cudaStream_t) {
  Of(comm).Send(data, count * SizeOfType(type), to);
  return ncclSuccess;
}
ncclResult_t Recv(void* data, std::size_t count, ncclDataType_t type, int from, ncclComm_t comm,
                  cudaStream_t) {
  if (!t_grouped) std::abort();
  t_receives.push_back({comm, data, count * SizeOfType(type), from});
  return ncclSuccess;
}
ncclResult_t GroupStart() {
  t_grouped = true;
  return ncclSuccess;
}
ncclResult_t GroupEnd() {
  t_grouped = false;
  for (const Receive& r : t_receives) Of(r.comm).Recv(r.data, r.bytes, r.from);
  t_receives.clear();
  return ncclSuccess;
}
ncclResult_t AllGather(const void* input, void* output, std::size_t count, ncclDataType_t type,
                       ncclComm_t comm, cudaStream_t) {
  HostComm& c = Of(comm);
  const std::size_t bytes = count * SizeOfType(type);
  for (int r = 0; r < c.size; ++r) c.Send(input, bytes, r);
  for (int r = 0; r < c.size; ++r) {
    c.Recv(static_cast<char*>(output) + static_cast<std::size_t>(r) * bytes, bytes, r);
  }
  return ncclSuccess;
}
ncclResult_t Broadcast(const void* input, void* output, std::size_t count, ncclDataType_t type,
                       int root, ncclComm_t comm, cudaStream_t) {
  HostComm& c = Of(comm);
  const std::size_t bytes = count * SizeOfType(type);
  for (int r = 0; r < c.size && c.rank == root; ++r) c.Send(input, bytes, r);
  c.Recv(output, bytes, root);
  return ncclSuccess;
}
// Elements [skip, skip + count) of every rank's input, added.
void SumOf(const void* input, void* output, std::size_t count, std::size_t whole, std::size_t skip,
           ncclDataType_t type, ncclComm_t comm) {
  ++g_sums;
  const std::size_t element = SizeOfType(type);
  std::vector<char> all(whole * element * static_cast<std::size_t>(Of(comm).size));
  AllGather(input, all.data(), whole, type, comm, nullptr);
  std::vector<const std::byte*> sources;
  for (int r = 0; r < Of(comm).size; ++r) {
    sources.push_back(reinterpret_cast<const std::byte*>(all.data()) +
                      (static_cast<std::size_t>(r) * whole + skip) * element);
  }
  cistron::comm::ReduceInOrder(cistron::comm::ReduceOp::kSum, DTypeOfType(type), sources,
                               static_cast<std::int64_t>(count), static_cast<std::byte*>(output));
}
ncclResult_t AllReduce(const void* input, void* output, std::size_t count, ncclDataType_t type,
                       ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
  SumOf(input, output, count, count, 0, type, comm);
  return ncclSuccess;
}
ncclResult_t ReduceScatter(const void* input, void* output, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
  const HostComm& c = Of(comm);
  SumOf(input, output, count, count * static_cast<std::size_t>(c.size),
        count * static_cast<std::size_t>(c.rank), type, comm);
  return ncclSuccess;
}

class HostGpuAllocator final : public cistron::Allocator {
 public:
  void* Allocate(std::size_t bytes) override {
    g_live += static_cast<std::int64_t>(bytes);
    return cistron::CpuAllocator().Allocate(bytes);
  }
  void Deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer != nullptr) g_live -= static_cast<std::int64_t>(bytes);
    cistron::CpuAllocator().Deallocate(pointer, bytes);
  }
  cistron::Device device() const override { return cistron::comm::nccl::kHostGpu; }
  cistron::AllocatorStats Stats() const override { return {}; }
  void ResetPeak() override {}
};

}  // namespace

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new HostEvent);
  return cudaSuccess;
}
// Behind another thread's wait in the driver it would wait: nobody frees events.
cudaError_t cudaEventDestroy(cudaEvent_t) {
  std::abort();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  Of(event) = {t_timeline, ++t_timeline->recorded};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const HostEvent& e = Of(event);
  return !e.timeline || e.number <= e.timeline->ends ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(&g_sums);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

// Memory of peers: an address is the same for every thread. Its size is kept before it.
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (t_faults.take != 0) return static_cast<cudaError_t>(t_faults.take);
  auto* block = static_cast<std::size_t*>(std::malloc(bytes + 64));
  *block = bytes;
  *data = reinterpret_cast<std::byte*>(block) + 64;
  g_live += static_cast<std::int64_t>(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  auto* block = reinterpret_cast<std::size_t*>(static_cast<std::byte*>(data) - 64);
  g_live -= static_cast<std::int64_t>(*block);
  std::free(block);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (t_faults.write != 0) return static_cast<cudaError_t>(t_faults.write);
  if (!t_faults.loses_writes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  if (t_faults.share != 0) return static_cast<cudaError_t>(t_faults.share);
  std::memcpy(handle, &data, sizeof(data));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  if (t_faults.open != 0) return static_cast<cudaError_t>(t_faults.open);
  std::memcpy(data, &handle, sizeof(*data));
  ++g_opened;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  --g_opened;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error";
}
const char* cudaGetErrorName(cudaError_t) {
  return "cudaError";
}

namespace cistron::cuda {

Allocator& DeviceAllocator(int) {
  static HostGpuAllocator allocator;
  return allocator;
}
Stream MainStream(int) {
  return {comm::nccl::kHostGpu, &g_sums};
}
void Copy(void* to, Device, const void* from, Device, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
void FillBytes(void* data, Device, unsigned char value, std::size_t bytes) {
  std::memset(data, value, bytes);
}
void RequireDevice(int) {}
void TrimDeviceMemory(int) {}
void Synchronize(Device) {}

}  // namespace cistron::cuda

namespace cistron::comm::nccl {

void LetEventsEnd(int more) {
  t_timeline->ends = t_timeline->recorded + more;
}
std::int64_t LiveBytes() {
  return g_live;
}
int OpenedByPeers() {
  return g_opened;
}
void SetPeerFaults(const PeerFaults& faults) {
  t_faults = faults;
}
int NcclSums() {
  return g_sums;
}

const Library& Nccl() {
  static const Library library{.GetVersion = GetVersion,
                               .GetErrorString = GetErrorString,
                               .GetLastError = GetLastError,
                               .GetUniqueId = GetUniqueId,
                               .CommInitRank = CommInitRank,
                               .CommDestroy = CommDestroy,
                               .CommAbort = CommDestroy,
                               .CommGetAsyncError = CommGetAsyncError,
                               .AllReduce = AllReduce,
                               .ReduceScatter = ReduceScatter,
                               .AllGather = AllGather,
                               .Broadcast = Broadcast,
                               .Send = Send,
                               .Recv = Recv,
                               .GroupStart = GroupStart,
                               .GroupEnd = GroupEnd};
  return library;
}

void Check(ncclResult_t status, const char* what) {
  if (status != ncclSuccess) CISTRON_THROW(kInternal, "nccl: {} failed", what);
}

void ReduceRanks(ReduceOp reduce, DType dtype, const RankParts& parts, std::int64_t count,
                 void* out, cudaStream_t) {
  std::vector<const std::byte*> sources;
  const auto element = static_cast<std::int64_t>(SizeOf(dtype));
  for (int r = 0; r < parts.ranks; ++r) {
    sources.push_back(r == parts.rank ? static_cast<const std::byte*>(parts.own)
                                      : static_cast<const std::byte*>(parts.received) +
                                            r * parts.stride * element);
  }
  if (count > 0) ReduceInOrder(reduce, dtype, sources, count, static_cast<std::byte*>(out));
}

}  // namespace cistron::comm::nccl
