// Sixteen lanes: all that the kernels know of a processor.
//
// What they call is the same in each instruction set, which the compiler's flags choose:
//
//   Floats   16 floats
//   Ints     512 bits: 16 integers of 32 bits, 32 of 16, or 32 bf16 as they lie in memory
//   Mask     which of 16 lanes
//   Paired   two bf16 for each lane, as products take them
//
// lanes_avx512.h, lanes_avx2.h and lanes_neon.h have arithmetic, and name the instructions, as
// bytes_avx512.h and so on do for products of bytes;
// pairs_bf16.h and pairs_float.h what becomes of bf16, where there are instructions for it, which
// bf16_avx512.h and bf16_neon.h name, and where there are none. This file has what can be said by
// these alone. docs/processors.md says how a set is added.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// A call takes longer than what these do, and keeps numbers out of registers.
#define KVKEEP_INLINE inline __attribute__((always_inline))

namespace kvkeep {

using Bf16 = std::uint16_t;

constexpr int kLanes = 16;  // floats in Floats

}  // namespace kvkeep

#if defined(__AVX512F__)
#include "lanes_avx512.h"
#include "bytes_avx512.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#include "bytes_avx2.h"
#elif defined(__aarch64__)
#include "lanes_neon.h"
#include "bytes_neon.h"
#else
#error "no lanes for this instruction set"
#endif

#if defined(__AVX512BF16__)
#include "bf16_avx512.h"
#include "pairs_bf16.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "bf16_neon.h"
#include "pairs_bf16.h"
#else
#include "pairs_float.h"
#endif

namespace kvkeep {

KVKEEP_INLINE float to_float(Bf16 x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

KVKEEP_INLINE Bf16 to_bf16(float x) {
  Bf16 lanes[kLanes];
  store_rounded(lanes, splat(x));
  return lanes[0];
}

// Of `count` lanes.
KVKEEP_INLINE Floats load_first(const Bf16* x, int count) {
  Bf16 lanes[kLanes] = {};
  std::memcpy(lanes, x, count * sizeof(Bf16));
  return load(lanes);
}

// 2 to the x, to about 2e-7 of it; 0 far below.
KVKEEP_INLINE Floats exp2(Floats x) {
  const Floats rest = fraction(x);
  Floats sum = splat(0.00186713008f);
  const auto next = [&](float factor) { sum = multiply_add(sum, rest, splat(factor)); };
  next(0.0090170303f);
  next(0.0557999131f);
  next(0.24016445f);
  next(0.693151312f);
  next(1.f);
  return multiply_power(sum, x);
}

constexpr float kLog2E = 1.44269504088896f;

KVKEEP_INLINE Floats sigmoid_times(Floats x, Floats y) {  // x * sigmoid(x) * y
  const Floats minus = exp2(x * splat(-kLog2E));
  return x / (splat(1.f) + minus) * y;
}

KVKEEP_INLINE Floats tanh(Floats x) {  // to about 1e-7
  return splat(1.f) - splat(2.f) / (splat(1.f) + exp2(x * splat(2.f * kLog2E)));
}

// The sum over the lanes of each of 16 registers, as the lanes of one.
KVKEEP_INLINE Floats reduce_add_each(const Floats (&x)[16]) {
  Ints r[16];
  for (int i = 0; i < 16; ++i) r[i] = as_ints(x[i]);
  transpose(r);
  Floats total[4];
  for (int i = 0; i < 4; ++i)
    total[i] = (as_floats(r[4 * i]) + as_floats(r[4 * i + 1])) +
               (as_floats(r[4 * i + 2]) + as_floats(r[4 * i + 3]));
  return (total[0] + total[1]) + (total[2] + total[3]);
}

}  // namespace kvkeep
