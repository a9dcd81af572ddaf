// Random values for tests: Philox streams under one seed that the test program prints.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::testing {

// Seed of this run of a test program: CISTRON_TEST_SEED, or a fixed number. Printed with every
// failure.
std::uint64_t TestSeed();

// Values are a function of (TestSeed(), name, flat index), rounded to the dtype. Float dtypes but
// e8m0.
void FillNormal(const Tensor& t, std::string_view name, double std = 1.0, double mean = 0.0);
// Uniform in [low, high).
void FillUniform(const Tensor& t, std::string_view name, double low = -1.0, double high = 1.0);
// Integers in [low, high), for i64, i32 and u8.
void FillIntegers(const Tensor& t, std::string_view name, std::int64_t low, std::int64_t high);

Tensor Normal(const Shape& shape, DType dtype, std::string_view name, double std = 1.0);
Tensor Uniform(const Shape& shape, DType dtype, std::string_view name, double low = -1.0,
               double high = 1.0);

// i64 [groups] that sum to `rows`: uneven, with empty groups where there are enough of them.
Tensor RandomSplit(std::int64_t groups, std::int64_t rows, std::string_view name);

}  // namespace cistron::testing
