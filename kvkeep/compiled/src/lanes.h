// Vectors of sixteen lanes: the kernels' only access to a processor's instructions.
//
// All instruction sets have the same types and functions; the compiler's flags choose the set:
//
//   Floats   16 floats
//   Ints     512 bits: 16 integers of 32 bits, 32 of 16, or 32 bf16 in memory order
//   Mask     a bit for each of 16 lanes
//   Paired   two bf16 for each lane, as products take them
//
// Instructions are named in lanes_*.h (arithmetic, masks, memory), bytes_*.h (integer products),
// bf16_*.h and tiles_*.h (products of 16 rows) only. pairs_bf16.h defines products of bf16 by the
// instructions of bf16_*.h, pairs_float.h by float arithmetic where there are none. This file has
// the functions that all sets share. docs/processors.md describes how to add a set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// A call would take longer than these functions' work, and would spill registers.
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

// Load the first `count` lanes; the others are 0.
KVKEEP_INLINE Floats load_first(const Bf16* x, int count) {
  Bf16 lanes[kLanes] = {};
  std::memcpy(lanes, x, count * sizeof(Bf16));
  return load(lanes);
}

// 2 to the power of x, with a relative error of about 2e-7; 0 far below.
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

KVKEEP_INLINE Floats sigmoid(Floats x) {
  return splat(1.f) / (splat(1.f) + exp2(x * splat(-kLog2E)));
}

KVKEEP_INLINE Floats sigmoid_times(Floats x, Floats y) {  // x * sigmoid(x) * y
  const Floats minus = exp2(x * splat(-kLog2E));
  return x / (splat(1.f) + minus) * y;
}

KVKEEP_INLINE Floats tanh(Floats x) {  // to about 1e-7
  return splat(1.f) - splat(2.f) / (splat(1.f) + exp2(x * splat(2.f * kLog2E)));
}

// The sum over the lanes of each of 16 registers: lane i is the sum of x[i].
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
