// Work of a device captured in a CUDA graph, and what a captured step needs: memory that nobody
// else is given, and copies that do not wait. A build without CUDA has stand-ins that throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "cistron/tensor/allocator.h"
#include "cistron/tensor/device.h"

namespace cistron {
class BlockCache;
}

namespace cistron::cuda {

// Something of the driver's, destroyed with its owner; also where the owner's constructor throws.
using Handle = std::unique_ptr<void, void (*)(void*)>;

// Memory of a device apart from the rest: a captured graph keeps using the addresses of temporaries
// that were freed, so nobody else may be given them. Tensors may outlive their pool.
class MemoryPool {
 public:
  explicit MemoryPool(Device device);
  MemoryPool(const MemoryPool&) = delete;

  // While it lives, the device's allocator takes from the pool. Scopes do not nest.
  class Scope {
   public:
    explicit Scope(const MemoryPool& pool);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    Device device_;
  };

 private:
  Device device_;
  std::shared_ptr<BlockCache> blocks_;
};

// Work of the main stream, ready to be run again as often as one likes.
class Graph {
 public:
  // Captures what `work` queues, without running it. Whatever `work` throws is thrown on, the
  // stream being as before; waiting for the device within it is such an error. What it reads and
  // writes must stay where it is while the graph lives.
  Graph(Device device, const std::function<void()>& work);
  Graph(const Graph&) = delete;

  // Queues one run on the main stream.
  void Launch();
  std::int64_t nodes() const { return nodes_; }  // kernels, copies, fills

 private:
  Device device_;
  Handle exec_{nullptr, nullptr};
  std::int64_t nodes_ = 0;
};

// Memory of the host from which devices copy without making anyone wait; made by the device that
// was required last, whichever thread asks.
Allocator& PinnedAllocator();

// Queues a copy on the main stream and does not wait: memory of the host must be pinned, and left
// alone until the stream has come so far.
void CopyLater(void* to, const void* from, Device device, std::size_t bytes);

// Copies to a device on a stream beside its main one.
class Upload {
 public:
  explicit Upload(Device device);
  Upload(const Upload&) = delete;

  // Begins once the work that the main stream had at the last Release is done.
  void Start(void* to, const void* from, std::size_t bytes);
  // What is queued on the main stream from now on finds the copy made.
  void Join();
  // The main stream needs what was copied no longer than for what it has been given so far.
  void Release();

 private:
  Device device_;
  Handle stream_{nullptr, nullptr}, copied_{nullptr, nullptr}, released_{nullptr, nullptr};
};

}  // namespace cistron::cuda
