// Rows as integers, for products with integer codes: bytes multiply faster than bf16.
//
// 32 columns of a row share a scale, a power of two, and each number is an integer of 15 bits in
// two bytes:
//
//   x = scale * (256 * high + low),  at most 16,320 * scale
//
// A bf16 has 8 significant bits: a number within 2^6 of the greatest of its 32 is exact, a smaller
// one is off by at most 2^-14 of the greatest. Sums of a group are exact. (llama.cpp's rows have 8
// bits.) Instructions multiply the four codes of a lane with four bytes, and add the products in
// pairs in 16 bits, or all in 32; sums of 16 bits are widened to 32 before they could overflow.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "formats.h"

namespace kvkeep {

// 32 columns of a row. bytes: `high`, then `low`, of eight columns at a time, in the order of codes
// with less than 8 bits: 0 4 1 5, 2 6 3 7.
struct IntegerGroup {
  std::uint8_t bytes[2 * kGroup];
  std::int16_t integer[kGroup];
  float scale;           // NaN where any of them is not finite
  std::int32_t sums[2];  // of the first 16 columns, and of the last 16

  const std::uint8_t* high() const { return bytes; }
  const std::uint8_t* low() const { return bytes + kGroup; }
};

// The columns of 16 bytes in the order of codes with less than 8 bits.
alignas(16) constexpr std::uint8_t kCodeOrder[16] = {0, 4,  1, 5,  2,  6,  3,  7,
                                                     8, 12, 9, 13, 10, 14, 11, 15};

// Quantise 32 numbers to integers. x: bf16, or floats rounded to bf16. Returns their quantised sum.
inline float quantise_group(const Activation* x, IntegerGroup& to) {
  const Floats part[2] = {load(x), load(x + kLanes)};
  const float greatest = reduce_max(max(absolute(part[0]), absolute(part[1])));
  std::uint32_t bits;
  std::memcpy(&bits, &greatest, sizeof bits);
  const std::uint32_t scale = std::max(static_cast<int>(bits >> 23) - 13, 1) << 23;
  const std::uint32_t inverse = (254u << 23) - scale;
  float factor;
  std::memcpy(&to.scale, &scale, sizeof scale);
  std::memcpy(&factor, &inverse, sizeof inverse);
  if (not_finite(part[0], kLanes) || not_finite(part[1], kLanes)) {
    to = {};
    return to.scale = std::numeric_limits<float>::quiet_NaN();
  }
  std::uint8_t bytes[2][kGroup];  // high, low
  for (int h = 0; h < 2; ++h) {
    const Ints integer = to_ints(part[h] * splat(factor));
    store_bytes(bytes[0] + h * kLanes, shift_right_signed<8>(add(integer, splat_int(128))));
    // The remainder of 256 * high is the lowest byte, signed.
    store_bytes(bytes[1] + h * kLanes, integer);
    store_halves(reinterpret_cast<std::uint16_t*>(to.integer) + h * kLanes, integer);
    to.sums[h] = static_cast<std::int32_t>(reduce_add(to_floats(integer)));
  }
  store_ints(to.bytes, shuffle_bytes(load_ints(bytes), kCodeOrder));
  return to.scale * static_cast<float>(to.sums[0] + to.sums[1]);
}

// Codes of 8 bits need 32-bit products with numbers of 15 bits: `halves<p>(data)` returns columns
// 2 p and 2 p + 1.
template <typename Codes>
constexpr bool kHasInt16Codes = Codes::kBits == 8;

// Codes less kLowest: `bytes<n>(data)` returns columns 8 (n / 2) + 2 (n % 2) and those 4, 1 and 5
// further. kHighProductsPerSum, kLowProductsPerSum: how many products with `high` and `low` can be
// added before a sum could overflow.
template <typename Codes>
constexpr int kHighProductsPerSum = kMaxByteSum / (kProductsPerByteSum * 64 * Codes::kRange);
template <typename Codes>
constexpr int kLowProductsPerSum = kHighProductsPerSum<Codes> / 2;

// Whether codes are multiplied as integers. IQ4's range is too large for sums of 16 bits.
template <typename Codes>
constexpr bool multiplies_as_integers() {
  if constexpr (kHasInt16Codes<Codes>)
    return true;
  else
    return Codes::kRange <= kMaxByteCode && kLowProductsPerSum<Codes> > 0;
}

inline Ints splat_bytes(const void* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  return splat_int(four);
}

// Multiply 16 rows of codes with kCount rows of input, over kColumns columns: the `s`-th such part
// of a group.
template <typename Codes, int kScaleColumns, int s, int kCount>
KVKEEP_INLINE void multiply_group(const char* data, const IntegerGroup* const (&x)[kCount],
                                  Ints (&sums)[kCount]) {
  for (int i = 0; i < kCount; ++i) sums[i] = splat_int(0);
  if constexpr (kHasInt16Codes<Codes>) {
    unroll(
        [&](auto p) __attribute__((always_inline)) {
          const Ints codes = Codes::template halves<p.value>(data);
          for (int i = 0; i < kCount; ++i)
            sums[i] = add_int16_products(sums[i], codes, splat_bytes(x[i]->integer + 2 * p.value));
        },
        std::make_integer_sequence<int, kPairs>{});
  } else {
    constexpr int kTerms = kScaleColumns / 4;
    ByteSums high[kCount], low[kCount];
    unroll(
        [&](auto n) __attribute__((always_inline)) {
          constexpr int index = s * kTerms + n.value;
          const Ints codes = Codes::template bytes<index>(data);
          constexpr bool last = n.value == kTerms - 1;
#pragma GCC unroll 8
          for (int i = 0; i < kCount; ++i) {
            if constexpr (n.value % kHighProductsPerSum<Codes> == 0) high[i] = zero_byte_sums();
            if constexpr (n.value % kLowProductsPerSum<Codes> == 0) low[i] = zero_byte_sums();
            high[i] = add_byte_products(high[i], codes, splat_bytes(x[i]->high() + 4 * index));
            low[i] = add_byte_products(low[i], codes, splat_bytes(x[i]->low() + 4 * index));
            if constexpr (last ||
                          n.value % kHighProductsPerSum<Codes> == kHighProductsPerSum<Codes> - 1)
              sums[i] = add(sums[i], widen_byte_sums<256>(high[i]));
            if constexpr (last ||
                          n.value % kLowProductsPerSum<Codes> == kLowProductsPerSum<Codes> - 1)
              sums[i] = add(sums[i], widen_byte_sums<1>(low[i]));
          }
        },
        std::make_integer_sequence<int, kTerms>{});
    if constexpr (Codes::kLowest != 0)
      for (int i = 0; i < kCount; ++i) {
        const auto& of = x[i]->sums;
        sums[i] =
            add(sums[i], splat_int(Codes::kLowest * (kScaleColumns == 16 ? of[s] : of[0] + of[1])));
      }
  }
}

}  // namespace kvkeep
