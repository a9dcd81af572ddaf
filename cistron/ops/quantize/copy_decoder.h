// Decodes any rectangle of a quantised copy: for dequantize and for the products of quantized_gemm.
#pragma once

#include <cstdint>

#include "cistron/ops/quantize/block_grid.h"

namespace cistron::ops::internal {

enum class DecodeScale { kApply, kOmit };  // kOmit: the values of the codes alone

class CopyDecoder {
 public:
  // Reads split_sizes; throws, naming `op`, as MakeBlockGrid does.
  CopyDecoder(std::string_view op, const QuantizedTensor& q, Direction direction);
  CopyDecoder(BlockGrid grid, const QuantizedCopy& copy, DType format);

  const BlockGrid& grid() const { return grid_; }
  DType format() const { return format_; }
  const Tensor& scales() const { return copy_.scales; }

  // Rows [row_begin, row_end) of the copy seen as one matrix, all of them in use, and columns
  // [col_begin, col_end); `to` is their corner, rows `stride` elements apart. Values are rounded to
  // T once, after being added to what is there with `accumulate`.
  template <class T>
  void Decode(std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin,
              std::int64_t col_end, bool accumulate, T* to, std::int64_t stride) const;
  // As above where every value is one of T.
  template <class T>
  void DecodeExact(DecodeScale scale, std::int64_t row_begin, std::int64_t row_end,
                   std::int64_t col_begin, std::int64_t col_end, T* to, std::int64_t stride) const;

  // What a decoded value can be, for those who choose a type for it.
  struct Range {
    bool powers_of_two = true;  // every scale
    // Exponents of the smallest and largest scale of blocks that are not zero throughout; the first
    // is above the second when there are none.
    int min_exponent = 1 << 10, max_exponent = -(1 << 10);
  };
  // `lowest`: scales below 2^lowest are looked at closely, whether their blocks are zero.
  Range ScaleRange(int lowest) const;

 private:
  template <class T, class F>
  void ForRuns(std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin,
               std::int64_t col_end, T* to, std::int64_t stride, F&& f) const;
  const std::uint8_t* Codes() const;
  bool IsZero(std::int64_t scale_row, std::int64_t scale_col) const;

  BlockGrid grid_;
  QuantizedCopy copy_;
  DType format_;
};

}  // namespace cistron::ops::internal
