// Lanes on AVX-512 (F, BW, DQ, VL): one register.
#pragma once

#include "lanes_x86.h"

namespace kvkeep {

using Floats = __m512;  // the compiler defines + - * /
using Ints = __m512i;   // and & |
using Mask = __mmask16;

constexpr int kAccumulators = 24;  // Floats that fit in registers as accumulators
constexpr int kRowTile = 8;        // input rows multiplied at a time with a block of packed weights
constexpr int kIntegerRowTile = 8;  // the same, for rows as integers
constexpr int kPromptTile = 12;     // the same, for rows of prompts

// Every lane selected. GCC's unmasked intrinsics pass an uninitialised register as the source of
// the lanes that are not selected, and its warnings then name that register. The zero-masked forms
// have no such source, and compile to the same unmasked instructions.
constexpr __mmask8 kAll8 = 0xff;           // lanes of 64 bits
constexpr __mmask16 kAll16 = 0xffff;       // of 32 bits
constexpr __mmask32 kAll32 = 0xffffffffu;  // of 16 bits

KVKEEP_INLINE Floats zeros() { return _mm512_setzero_ps(); }
KVKEEP_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
KVKEEP_INLINE Floats load(const float* x) { return _mm512_loadu_ps(x); }
KVKEEP_INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }

KVKEEP_INLINE Mask lanes_below(int lane) {
  return static_cast<Mask>((1u << (lane < 0 ? 0 : lane < kLanes ? lane : kLanes)) - 1);
}

// Lanes outside the mask are not read and become 0.
KVKEEP_INLINE Floats masked_load(Mask mask, const float* x) {
  return _mm512_maskz_loadu_ps(mask, x);
}
KVKEEP_INLINE void store_first(float* to, int count, Floats x) {
  _mm512_mask_storeu_ps(to, lanes_below(count), x);
}

KVKEEP_INLINE Floats load_fp16(const void* x) {
  return _mm512_maskz_cvtph_ps(kAll16, _mm256_loadu_si256(static_cast<const __m256i*>(x)));
}

KVKEEP_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
KVKEEP_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
  return _mm512_fmsub_ps(a, b, c);
}
KVKEEP_INLINE Floats subtract_product(Floats c, Floats a, Floats b) {
  return _mm512_fnmadd_ps(a, b, c);
}
KVKEEP_INLINE Floats max(Floats a, Floats b) { return _mm512_maskz_max_ps(kAll16, a, b); }
KVKEEP_INLINE Floats min(Floats a, Floats b) { return _mm512_maskz_min_ps(kAll16, a, b); }
KVKEEP_INLINE Floats absolute(Floats x) { return _mm512_abs_ps(x); }

// Reduce all lanes by halves: `op8` of the upper and lower eight, `op4` of what is left.
template <typename Op8, typename Op4>
KVKEEP_INLINE float reduce_lanes(Floats x, Op8 op8, Op4 op4) {
  const __m512d halves = _mm512_castps_pd(x);
  const __m256 upper = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(kAll8, halves, 1));
  const __m256 lower = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(kAll8, halves, 0));
  const __m256 eight = op8(upper, lower);
  const __m128 four = op4(_mm256_extractf128_ps(eight, 1), _mm256_extractf128_ps(eight, 0));
  const __m128 two = op4(four, _mm_permute_ps(four, 0x4e));
  return _mm_cvtss_f32(op4(two, _mm_permute_ps(two, 0x11)));
}
KVKEEP_INLINE float reduce_add(Floats x) {
  return reduce_lanes(
      x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); },
      [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
KVKEEP_INLINE float reduce_max(Floats x) {
  return reduce_lanes(
      x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
      [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
KVKEEP_INLINE float reduce_min(Floats x) {
  return reduce_lanes(
      x, [](__m256 a, __m256 b) { return _mm256_min_ps(a, b); },
      [](__m128 a, __m128 b) { return _mm_min_ps(a, b); });
}
KVKEEP_INLINE float first_lane(Floats x) { return _mm512_cvtss_f32(x); }

KVKEEP_INLINE Mask all_lanes() { return 0xffff; }
KVKEEP_INLINE Mask mask_and(Mask a, Mask b) { return a & b; }
KVKEEP_INLINE Mask mask_and_not(Mask a, Mask b) { return a & ~b; }
KVKEEP_INLINE Mask greater(Mask among, Floats a, Floats b) {
  return _mm512_mask_cmp_ps_mask(among, a, b, _CMP_GT_OQ);
}
KVKEEP_INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
KVKEEP_INLINE Floats select(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }
KVKEEP_INLINE Floats select(Mask mask, Floats x, Floats other) {
  return _mm512_mask_mov_ps(other, mask, x);
}
KVKEEP_INLINE Ints select(Mask mask, Ints x, Ints other) {
  return _mm512_mask_mov_epi32(other, mask, x);
}
KVKEEP_INLINE Floats masked_max(Mask mask, Floats a, Floats b) {
  return _mm512_mask_max_ps(a, mask, a, b);
}

// Whether any of the first `count` lanes is NaN or infinity.
KVKEEP_INLINE bool not_finite(Floats x, int count) {
  return _mm512_fpclass_ps_mask(x, 0x99) & lanes_below(count);
}

KVKEEP_INLINE Ints splat_int(std::int32_t x) { return _mm512_set1_epi32(x); }
KVKEEP_INLINE Ints load_ints(const void* x) { return _mm512_loadu_si512(x); }
KVKEEP_INLINE void store_ints(void* to, Ints x) { _mm512_storeu_si512(to, x); }
// Lanes from `count` on are not read and become 0.
KVKEEP_INLINE Ints load_first_ints(const void* x, int count) {
  return _mm512_maskz_loadu_epi32(lanes_below(count), x);
}
KVKEEP_INLINE Ints lane_indices() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KVKEEP_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
KVKEEP_INLINE Ints max(Ints a, Ints b) { return _mm512_maskz_max_epi32(kAll16, a, b); }
KVKEEP_INLINE Ints min(Ints a, Ints b) { return _mm512_maskz_min_epi32(kAll16, a, b); }
KVKEEP_INLINE int masked_reduce_min(Mask mask, Ints x) {
  alignas(64) std::int32_t lanes[kLanes];
  store_ints(lanes, select(mask, x, splat_int(INT32_MAX)));
  int least = lanes[0];
  for (const std::int32_t lane : lanes) least = lane < least ? lane : least;
  return least;
}

template <int kBits>
KVKEEP_INLINE Ints shift_left(Ints x) {
  return _mm512_maskz_slli_epi32(kAll16, x, kBits);
}
template <int kBits>
KVKEEP_INLINE Ints shift_right(Ints x) {
  return _mm512_maskz_srli_epi32(kAll16, x, kBits);
}
template <int kBits>  // signed
KVKEEP_INLINE Ints shift_right_signed(Ints x) {
  return _mm512_maskz_srai_epi32(kAll16, x, kBits);
}

// Shift the two 16-bit halves of each lane separately; a negative kBits shifts left.
template <int kBits>
KVKEEP_INLINE Ints shift_halves_right(Ints x) {
  if constexpr (kBits > 0) return _mm512_maskz_srli_epi16(kAll32, x, kBits);
  if constexpr (kBits < 0) return _mm512_maskz_slli_epi16(kAll32, x, -kBits);
  return x;
}

// Add a number to each 16-bit half.
KVKEEP_INLINE Ints add_halves(Ints x, int number) {
  return _mm512_add_epi16(x, _mm512_set1_epi16(static_cast<short>(number)));
}

// The lowest four bits of each 16-bit half from `low`, the other bits from `others`.
KVKEEP_INLINE Ints merge_nibbles(Ints low, Ints others) {
  constexpr int kWhereMaskElse = 0xca;  // mask ? a : b, of mask, a, b
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, others, kWhereMaskElse);
}

KVKEEP_INLINE Floats to_floats(Ints x) { return _mm512_maskz_cvtepi32_ps(kAll16, x); }
KVKEEP_INLINE Ints to_ints(Floats x) {
  return _mm512_maskz_cvtps_epi32(kAll16, x);
}  // to nearest, ties to even
KVKEEP_INLINE Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
KVKEEP_INLINE Ints as_ints(Floats x) { return _mm512_castps_si512(x); }

// Load 16 integers and extend each to a lane.
KVKEEP_INLINE Ints widen(const std::int8_t* x) {
  return _mm512_maskz_cvtepi8_epi32(kAll16, _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
KVKEEP_INLINE Ints widen(const std::uint8_t* x) {
  return _mm512_maskz_cvtepu8_epi32(kAll16, _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
KVKEEP_INLINE Ints widen(const std::uint16_t* x) {
  return _mm512_maskz_cvtepu16_epi32(kAll16,
                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
// Store the lowest byte, or 16-bit half, of each lane.
KVKEEP_INLINE void store_bytes(std::uint8_t* to, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(kAll16, x));
}
KVKEEP_INLINE void store_halves(std::uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(kAll16, x));
}

// Look up each lane's lowest four bits in a table of 16 floats.
KVKEEP_INLINE Floats lookup(Ints which, const float* table) {
  return _mm512_maskz_permutexvar_ps(kAll16, which, load(table));
}

// fraction(x): x less its floor. multiply_power(y, x): y times 2 to the floor of x; 0 or infinity
// far away.
KVKEEP_INLINE Floats fraction(Floats x) {
  return _mm512_maskz_reduce_ps(kAll16, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
KVKEEP_INLINE Floats multiply_power(Floats y, Floats x) {
  return _mm512_maskz_scalef_ps(kAll16, y, x);
}

// Sums and differences of lanes whose indices differ in the bit `kBit`.
template <int kBit>
KVKEEP_INLINE Floats butterfly(Floats x) {
  const Ints lane = lane_indices(), bit = splat_int(kBit);
  const Floats other = _mm512_maskz_permutexvar_ps(kAll16, _mm512_xor_si512(lane, bit), x);
  return _mm512_mask_sub_ps(x + other, _mm512_test_epi32_mask(lane, bit), other, x);
}

// Load 32 floats: those at even indices, and those at odd ones.
KVKEEP_INLINE void load_deinterleaved(const float* x, Floats& even, Floats& odd) {
  const Floats low = load(x), high = load(x + kLanes);
  const Ints evens = shift_left<1>(lane_indices());
  even = _mm512_permutex2var_ps(low, evens, high);
  odd = _mm512_permutex2var_ps(low, evens | splat_int(1), high);
}

// Interleave 16-bit halves: those of `even` and `odd` in turn, the first 32 and the last 32.
KVKEEP_INLINE void interleave(Ints even, Ints odd, Ints& first, Ints& second) {
  const auto widen = [](Ints x, bool upper) {
    return _mm512_maskz_cvtepu16_epi32(kAll16, upper
                                                   ? _mm512_maskz_extracti64x4_epi64(kAll8, x, 1)
                                                   : _mm512_maskz_extracti64x4_epi64(kAll8, x, 0));
  };
  first = widen(even, false) | shift_left<16>(widen(odd, false));
  second = widen(even, true) | shift_left<16>(widen(odd, true));
}

// Transpose 16 rows of 16 lanes.
KVKEEP_INLINE void transpose(Ints (&r)[16]) {
  Ints t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(kAll16, r[i], r[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(kAll16, r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_maskz_unpacklo_epi64(kAll8, t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi64(kAll8, t[i + j], t[i + j + 2]);
    }
  // Now r[4a + c] holds in its 128-bit part p column 4p + c of rows 4a ... 4a + 3.
  for (int c = 0; c < 4; ++c) {
    const Ints low = _mm512_maskz_shuffle_i32x4(kAll16, r[c], r[4 + c], 0x88);
    const Ints high = _mm512_maskz_shuffle_i32x4(kAll16, r[8 + c], r[12 + c], 0x88);
    const Ints low_odd = _mm512_maskz_shuffle_i32x4(kAll16, r[c], r[4 + c], 0xdd);
    const Ints high_odd = _mm512_maskz_shuffle_i32x4(kAll16, r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_maskz_shuffle_i32x4(kAll16, low, high, 0x88);
    t[8 + c] = _mm512_maskz_shuffle_i32x4(kAll16, low, high, 0xdd);
    t[4 + c] = _mm512_maskz_shuffle_i32x4(kAll16, low_odd, high_odd, 0x88);
    t[12 + c] = _mm512_maskz_shuffle_i32x4(kAll16, low_odd, high_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace kvkeep
