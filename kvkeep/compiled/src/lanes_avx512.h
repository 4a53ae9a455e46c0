// Lanes by AVX-512 (F, BW, DQ, VL): one register each.
#pragma once

#include "lanes_x86.h"

namespace kvkeep {

using Floats = __m512;  // + - * / are the compiler's own
using Ints = __m512i;   // as are & and |
using Mask = __mmask16;

constexpr int kSums = 24;             // Floats that stay in registers while products are added up
constexpr int kTile = 8;              // rows multiplied with 16 of packed weights at a time
constexpr int kIntegerTile = 8;       // the same, where rows are integers
constexpr bool kLooksUpFast = true;   // whether looked_up is faster than arithmetic

KVKEEP_INLINE Floats zeros() { return _mm512_setzero_ps(); }
KVKEEP_INLINE Floats all(float x) { return _mm512_set1_ps(x); }
KVKEEP_INLINE Floats load(const float* x) { return _mm512_loadu_ps(x); }
KVKEEP_INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }

KVKEEP_INLINE Mask lanes_below(int lane) {
  return static_cast<Mask>((1u << (lane < 0 ? 0 : lane < kLanes ? lane : kLanes)) - 1);
}

// Lanes that are not in the mask are not read, and become 0.
KVKEEP_INLINE Floats load_where(Mask mask, const float* x) { return _mm512_maskz_loadu_ps(mask, x); }
KVKEEP_INLINE void store_some(float* to, int count, Floats x) {
  _mm512_mask_storeu_ps(to, lanes_below(count), x);
}

KVKEEP_INLINE Floats load_half(const void* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(x)));
}

KVKEEP_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
KVKEEP_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
KVKEEP_INLINE Floats subtract_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }
KVKEEP_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
KVKEEP_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
KVKEEP_INLINE Floats absolute(Floats x) { return _mm512_abs_ps(x); }
KVKEEP_INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
KVKEEP_INLINE float greatest_of(Floats x) { return _mm512_reduce_max_ps(x); }
KVKEEP_INLINE float least_of(Floats x) { return _mm512_reduce_min_ps(x); }
KVKEEP_INLINE float first_of(Floats x) { return _mm512_cvtss_f32(x); }

KVKEEP_INLINE Mask all_lanes() { return 0xffff; }
KVKEEP_INLINE Mask both(Mask a, Mask b) { return a & b; }
KVKEEP_INLINE Mask without(Mask a, Mask b) { return a & ~b; }
KVKEEP_INLINE Mask greater(Mask where, Floats a, Floats b) {
  return _mm512_mask_cmp_ps_mask(where, a, b, _CMP_GT_OQ);
}
KVKEEP_INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
KVKEEP_INLINE Floats where(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }
KVKEEP_INLINE Floats where(Mask mask, Floats x, Floats other) {
  return _mm512_mask_mov_ps(other, mask, x);
}
KVKEEP_INLINE Ints where(Mask mask, Ints x, Ints other) { return _mm512_mask_mov_epi32(other, mask, x); }
KVKEEP_INLINE Floats max_where(Mask mask, Floats a, Floats b) { return _mm512_mask_max_ps(a, mask, a, b); }

// Whether one of the first `count` lanes is NaN or infinity.
KVKEEP_INLINE bool not_finite(Floats x, int count) {
  return _mm512_fpclass_ps_mask(x, 0x99) & lanes_below(count);
}

KVKEEP_INLINE Ints ints(std::int32_t x) { return _mm512_set1_epi32(x); }
KVKEEP_INLINE Ints load_ints(const void* x) { return _mm512_loadu_si512(x); }
KVKEEP_INLINE void store_ints(void* to, Ints x) { _mm512_storeu_si512(to, x); }
// Lanes from `count` on are not read, and become 0.
KVKEEP_INLINE Ints load_some_ints(const void* x, int count) {
  return _mm512_maskz_loadu_epi32(lanes_below(count), x);
}
KVKEEP_INLINE Ints lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KVKEEP_INLINE Ints sum(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
KVKEEP_INLINE Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
KVKEEP_INLINE Ints min(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
KVKEEP_INLINE int least_where(Mask mask, Ints x) { return _mm512_mask_reduce_min_epi32(mask, x); }

template <int kBits>
KVKEEP_INLINE Ints left(Ints x) {
  return _mm512_slli_epi32(x, kBits);
}
template <int kBits>
KVKEEP_INLINE Ints right(Ints x) {
  return _mm512_srli_epi32(x, kBits);
}
template <int kBits>  // signed
KVKEEP_INLINE Ints right_signed(Ints x) {
  return _mm512_srai_epi32(x, kBits);
}

// Of each half of a lane by itself; a negative number of bits goes left.
template <int kBits>
KVKEEP_INLINE Ints halves_right(Ints x) {
  if constexpr (kBits > 0) return _mm512_srli_epi16(x, kBits);
  if constexpr (kBits < 0) return _mm512_slli_epi16(x, -kBits);
  return x;
}

// The lowest four bits of each half of one, the others of another.
KVKEEP_INLINE Ints four_from(Ints low, Ints others) {
  constexpr int kWhereMaskElse = 0xca;  // mask ? a : b, of mask, a, b
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, others, kWhereMaskElse);
}

KVKEEP_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
KVKEEP_INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // to nearest, ties to even
KVKEEP_INLINE Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
KVKEEP_INLINE Ints as_ints(Floats x) { return _mm512_castps_si512(x); }

// 16 numbers in memory, one for each lane.
KVKEEP_INLINE Ints widen(const std::int8_t* x) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
KVKEEP_INLINE Ints widen(const std::uint8_t* x) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
KVKEEP_INLINE Ints widen(const std::uint16_t* x) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
// The lowest byte, or half, of each lane.
KVKEEP_INLINE void store_bytes(std::uint8_t* to, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}
KVKEEP_INLINE void store_halves(std::uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
}

// Of each lane's lowest four bits, by a table of 16.
KVKEEP_INLINE Floats looked_up(Ints which, const float* table) {
  return _mm512_permutexvar_ps(which, load(table));
}

// x less its floor, and y times 2 to that floor: 0 or infinity far away.
KVKEEP_INLINE Floats fraction(Floats x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
KVKEEP_INLINE Floats times_power(Floats y, Floats x) { return _mm512_scalef_ps(y, x); }

// Sums and differences of lanes whose numbers differ in the bit `kBit`.
template <int kBit>
KVKEEP_INLINE Floats butterfly(Floats x) {
  const Ints lane = lane_numbers(), bit = ints(kBit);
  const Floats other = _mm512_permutexvar_ps(_mm512_xor_si512(lane, bit), x);
  return _mm512_mask_sub_ps(x + other, _mm512_test_epi32_mask(lane, bit), other, x);
}

// 32 floats in memory: those at even places, and those at odd ones.
KVKEEP_INLINE void load_apart(const float* x, Floats& even, Floats& odd) {
  const Floats low = load(x), high = load(x + kLanes);
  const Ints evens = left<1>(lane_numbers());
  even = _mm512_permutex2var_ps(low, evens, high);
  odd = _mm512_permutex2var_ps(low, evens | ints(1), high);
}

// Halves of lanes put together: those of `even` and `odd` in turn, the first 32 and the others.
KVKEEP_INLINE void interleave(Ints even, Ints odd, Ints& first, Ints& second) {
  const auto widen = [](Ints x, bool upper) {
    return _mm512_cvtepu16_epi32(upper ? _mm512_extracti64x4_epi64(x, 1)
                                       : _mm512_castsi512_si256(x));
  };
  first = widen(even, false) | left<16>(widen(odd, false));
  second = widen(even, true) | left<16>(widen(odd, true));
}

// Rows of 16 lanes become columns.
KVKEEP_INLINE void transpose(Ints (&r)[16]) {
  Ints t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  // Now r[4a + c] holds in its 128-bit part p column 4p + c of rows 4a ... 4a + 3.
  for (int c = 0; c < 4; ++c) {
    const Ints low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const Ints high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const Ints low_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const Ints high_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low, high, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace kvkeep
