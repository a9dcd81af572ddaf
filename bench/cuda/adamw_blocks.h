// AdamW on as many blocks as it is told, on a stream of its own: what adamw_beside_products_bench
// runs beside products.
#pragma once

#include <cstdint>

namespace cistron::bench {

class AdamWOnBlocks {
 public:
  // Of `n` parameters, a multiple of 4: masters, moments and gradients in fp32, weights in bf16, 30
  // bytes each in a step. The current device's; memory is taken, and all zeros.
  explicit AdamWOnBlocks(std::int64_t n);
  ~AdamWOnBlocks();
  AdamWOnBlocks(const AdamWOnBlocks&) = delete;
  AdamWOnBlocks& operator=(const AdamWOnBlocks&) = delete;

  // Queues a step of 512 threads a block, ahead of what other streams queue later.
  void Start(int blocks);

 private:
  std::int64_t n_;
  float *master_ = nullptr, *m_ = nullptr, *v_ = nullptr, *gradient_ = nullptr;
  void* weight_ = nullptr;
  void* stream_ = nullptr;
};

// Waits for all streams of the current device.
void WaitForDevice();

}  // namespace cistron::bench
