#include "cistron/comm/nccl/library.h"

#include <dlfcn.h>

#include "cistron/base/error.h"

namespace cistron::comm::nccl {
namespace {

// The name of NCCL's interface since 2.0; every function here is older than 2.10.
constexpr const char* kFile = "libnccl.so.2";

template <class F>
void Find(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (function != nullptr) return;
  CISTRON_THROW(kUnsupported, "nccl: {} has no {}; install NCCL 2.13 or newer", kFile, name);
}

Library Load() {
  void* handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    CISTRON_THROW(kUnsupported,
                  "nccl: {} cannot be loaded ({}); install NCCL (Debian: libnccl2), or add its "
                  "folder to LD_LIBRARY_PATH",
                  kFile, dlerror());
  }
  Library l;
  Find(handle, "ncclGetVersion", l.GetVersion);
  Find(handle, "ncclGetErrorString", l.GetErrorString);
  Find(handle, "ncclGetLastError", l.GetLastError);
  Find(handle, "ncclGetUniqueId", l.GetUniqueId);
  Find(handle, "ncclCommInitRank", l.CommInitRank);
  Find(handle, "ncclCommDestroy", l.CommDestroy);
  Find(handle, "ncclCommAbort", l.CommAbort);
  Find(handle, "ncclCommGetAsyncError", l.CommGetAsyncError);
  Find(handle, "ncclAllReduce", l.AllReduce);
  Find(handle, "ncclReduceScatter", l.ReduceScatter);
  Find(handle, "ncclAllGather", l.AllGather);
  Find(handle, "ncclBroadcast", l.Broadcast);
  Find(handle, "ncclSend", l.Send);
  Find(handle, "ncclRecv", l.Recv);
  Find(handle, "ncclGroupStart", l.GroupStart);
  Find(handle, "ncclGroupEnd", l.GroupEnd);
  return l;
}

}  // namespace

const Library& Nccl() {
  static const Library library = Load();
  return library;
}

void Check(ncclResult_t status, const char* what) {
  if (status == ncclSuccess) return;
  const Library& nccl = Nccl();
  CISTRON_THROW(kInternal, "nccl: {} failed: {}. {}", what, nccl.GetErrorString(status),
                nccl.GetLastError(nullptr));
}

}  // namespace cistron::comm::nccl
