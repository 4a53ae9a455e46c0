// Lanes on AVX2, FMA and F16C: two registers, of the lower and of the upper eight lanes.
#pragma once

#include "lanes_x86.h"

namespace kvkeep {

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
struct Mask {  // all bits of a lane, or none
  __m256i low, high;
};

constexpr int kAccumulators = 6;  // Floats that fit in registers as accumulators
constexpr int kRowTile = 3;       // input rows multiplied at a time with a block of packed weights
constexpr int kIntegerRowTile = 2;  // the same, for rows as integers
#if defined(__AVXVNNI__)
constexpr int kPromptTile = 6;  // the same, for rows of prompts
#else
constexpr int kPromptTile = 3;  // the same, for rows of prompts
#endif

KVKEEP_INLINE Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
KVKEEP_INLINE Floats operator-(Floats a, Floats b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
KVKEEP_INLINE Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
KVKEEP_INLINE Floats operator/(Floats a, Floats b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
KVKEEP_INLINE Ints operator&(Ints a, Ints b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
KVKEEP_INLINE Ints operator|(Ints a, Ints b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}

KVKEEP_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KVKEEP_INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KVKEEP_INLINE Floats load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
KVKEEP_INLINE void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

KVKEEP_INLINE Ints splat_int(std::int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
KVKEEP_INLINE Ints lane_indices() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
KVKEEP_INLINE Mask lanes_below(int lane) {
  const __m256i end = _mm256_set1_epi32(lane);
  const Ints number = lane_indices();
  return {_mm256_cmpgt_epi32(end, number.low), _mm256_cmpgt_epi32(end, number.high)};
}

// Lanes outside the mask are not read and become 0.
KVKEEP_INLINE Floats masked_load(Mask mask, const float* x) {
  return {_mm256_maskload_ps(x, mask.low), _mm256_maskload_ps(x + 8, mask.high)};
}
KVKEEP_INLINE void store_first(float* to, int count, Floats x) {
  const Mask mask = lanes_below(count);
  _mm256_maskstore_ps(to, mask.low, x.low);
  _mm256_maskstore_ps(to + 8, mask.high, x.high);
}

KVKEEP_INLINE Floats load_fp16(const void* x) {
  const __m128i* from = static_cast<const __m128i*>(x);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}

KVKEEP_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
KVKEEP_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
KVKEEP_INLINE Floats subtract_product(Floats c, Floats a, Floats b) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
KVKEEP_INLINE Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
KVKEEP_INLINE Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
KVKEEP_INLINE Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

// Reduce all lanes by halves.
template <typename Of>
KVKEEP_INLINE float reduce_lanes(Floats x, Of of) {
  const __m256 eight = of(x.low, x.high);
  const __m256 four = of(eight, _mm256_permute2f128_ps(eight, eight, 1));
  const __m256 two = of(four, _mm256_permute_ps(four, 0x4e));
  return _mm256_cvtss_f32(of(two, _mm256_permute_ps(two, 0xb1)));
}
KVKEEP_INLINE float reduce_add(Floats x) {
  return reduce_lanes(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
KVKEEP_INLINE float reduce_max(Floats x) {
  return reduce_lanes(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
KVKEEP_INLINE float reduce_min(Floats x) {
  return reduce_lanes(x, [](__m256 a, __m256 b) { return _mm256_min_ps(a, b); });
}
KVKEEP_INLINE float first_lane(Floats x) { return _mm256_cvtss_f32(x.low); }

KVKEEP_INLINE Mask all_lanes() { return {_mm256_set1_epi32(-1), _mm256_set1_epi32(-1)}; }
KVKEEP_INLINE Mask mask_and(Mask a, Mask b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
KVKEEP_INLINE Mask mask_and_not(Mask a, Mask b) {
  return {_mm256_andnot_si256(b.low, a.low), _mm256_andnot_si256(b.high, a.high)};
}
KVKEEP_INLINE Mask greater(Mask among, Floats a, Floats b) {
  return mask_and(among, {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
                          _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))});
}
KVKEEP_INLINE Mask equal(Floats a, Floats b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ))};
}
KVKEEP_INLINE Floats select(Mask mask, Floats x) {
  return {_mm256_and_ps(_mm256_castsi256_ps(mask.low), x.low),
          _mm256_and_ps(_mm256_castsi256_ps(mask.high), x.high)};
}
KVKEEP_INLINE Floats select(Mask mask, Floats x, Floats other) {
  return {_mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(mask.high))};
}
KVKEEP_INLINE Ints select(Mask mask, Ints x, Ints other) {
  return {_mm256_blendv_epi8(other.low, x.low, mask.low),
          _mm256_blendv_epi8(other.high, x.high, mask.high)};
}
KVKEEP_INLINE Floats masked_max(Mask mask, Floats a, Floats b) {
  return select(mask, max(a, b), a);
}

KVKEEP_INLINE Ints load_ints(const void* x) {
  const __m256i* from = static_cast<const __m256i*>(x);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
KVKEEP_INLINE void store_ints(void* to, Ints x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), x.low);
  _mm256_storeu_si256(static_cast<__m256i*>(to) + 1, x.high);
}
// Lanes from `count` on are not read and become 0.
KVKEEP_INLINE Ints load_first_ints(const void* x, int count) {
  const Mask mask = lanes_below(count);
  const int* from = static_cast<const int*>(x);
  return {_mm256_maskload_epi32(from, mask.low), _mm256_maskload_epi32(from + 8, mask.high)};
}
KVKEEP_INLINE Ints add(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
KVKEEP_INLINE Ints subtract(Ints a, Ints b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
KVKEEP_INLINE Ints max(Ints a, Ints b) {
  return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
KVKEEP_INLINE Ints min(Ints a, Ints b) {
  return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)};
}
KVKEEP_INLINE int masked_reduce_min(Mask mask, Ints x) {
  alignas(32) std::int32_t lanes[kLanes];
  store_ints(lanes, select(mask, x, splat_int(INT32_MAX)));
  int least = lanes[0];
  for (const std::int32_t lane : lanes) least = lane < least ? lane : least;
  return least;
}

// Whether any of the first `count` lanes is NaN or infinity.
KVKEEP_INLINE bool not_finite(Floats x, int count) {
  const Floats largest = splat(3.40282347e38f), size = absolute(x);
  const auto beyond = [](__m256 a, __m256 b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ));
  };
  const unsigned result = beyond(size.low, largest.low) | beyond(size.high, largest.high) << 8;
  return result & ((1u << (count < kLanes ? count : kLanes)) - 1);
}

template <int kBits>
KVKEEP_INLINE Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.low, kBits), _mm256_slli_epi32(x.high, kBits)};
}
template <int kBits>
KVKEEP_INLINE Ints shift_right(Ints x) {
  return {_mm256_srli_epi32(x.low, kBits), _mm256_srli_epi32(x.high, kBits)};
}
template <int kBits>  // signed
KVKEEP_INLINE Ints shift_right_signed(Ints x) {
  return {_mm256_srai_epi32(x.low, kBits), _mm256_srai_epi32(x.high, kBits)};
}

// Shift the two 16-bit halves of each lane separately; a negative kBits shifts left.
template <int kBits>
KVKEEP_INLINE Ints shift_halves_right(Ints x) {
  if constexpr (kBits > 0)
    return {_mm256_srli_epi16(x.low, kBits), _mm256_srli_epi16(x.high, kBits)};
  if constexpr (kBits < 0)
    return {_mm256_slli_epi16(x.low, -kBits), _mm256_slli_epi16(x.high, -kBits)};
  return x;
}

// Add a number to each 16-bit half.
KVKEEP_INLINE Ints add_halves(Ints x, int number) {
  const __m256i each = _mm256_set1_epi16(static_cast<short>(number));
  return {_mm256_add_epi16(x.low, each), _mm256_add_epi16(x.high, each)};
}

// The lowest four bits of each 16-bit half from `low`, the other bits from `others`.
KVKEEP_INLINE Ints merge_nibbles(Ints low, Ints others) {
  const Ints four = {_mm256_set1_epi16(15), _mm256_set1_epi16(15)};
  return (low & four) | Ints{_mm256_andnot_si256(four.low, others.low),
                             _mm256_andnot_si256(four.high, others.high)};
}

KVKEEP_INLINE Floats to_floats(Ints x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
KVKEEP_INLINE Ints to_ints(Floats x) {  // to nearest, ties to even
  return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}
KVKEEP_INLINE Floats as_floats(Ints x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
KVKEEP_INLINE Ints as_ints(Floats x) {
  return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}

// Load 16 integers and extend each to a lane.
KVKEEP_INLINE Ints widen(const std::int8_t* x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
KVKEEP_INLINE Ints widen(const std::uint8_t* x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
KVKEEP_INLINE Ints widen(const std::uint16_t* x) {
  const __m128i* from = reinterpret_cast<const __m128i*>(x);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(from)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
}
// The lower 16-bit halves of all lanes, in order.
KVKEEP_INLINE __m256i lower_halves(Ints x) {
  const __m256i low = _mm256_and_si256(x.low, _mm256_set1_epi32(0xffff));
  const __m256i high = _mm256_and_si256(x.high, _mm256_set1_epi32(0xffff));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
// Store the lowest byte, or 16-bit half, of each lane.
KVKEEP_INLINE void store_bytes(std::uint8_t* to, Ints x) {
  const __m256i halves = lower_halves(x & splat_int(0xff));
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
KVKEEP_INLINE void store_halves(std::uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), lower_halves(x));
}

// Look up each lane's lowest four bits in a table of 16 floats.
KVKEEP_INLINE Floats lookup(Ints which, const float* table) {
  const Floats values = load(table);
  const Ints upper = shift_left<28>(which);  // the sign bit is now the highest of the four bits
  const auto result = [&](__m256i lanes, __m256i sign) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.low, lanes),
                            _mm256_permutevar8x32_ps(values.high, lanes),
                            _mm256_castsi256_ps(sign));
  };
  return {result(which.low, upper.low), result(which.high, upper.high)};
}

KVKEEP_INLINE Floats floor(Floats x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }

// Sums and differences of lanes whose indices differ in the bit `kBit`.
template <int kBit>
KVKEEP_INLINE Floats butterfly(Floats x) {
  if constexpr (kBit == 8) return {_mm256_add_ps(x.low, x.high), _mm256_sub_ps(x.low, x.high)};
  const auto eight = [](__m256 x) {
    if constexpr (kBit == 4) {
      const __m256 other = _mm256_permute2f128_ps(x, x, 1);
      return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xf0);
    } else {
      const __m256 other = _mm256_permute_ps(x, kBit == 2 ? 0x4e : 0xb1);
      return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x),
                             kBit == 2 ? 0xcc : 0xaa);
    }
  };
  return {eight(x.low), eight(x.high)};
}

// Load 32 floats: those at even indices, and those at odd ones.
KVKEEP_INLINE void load_deinterleaved(const float* x, Floats& even, Floats& odd) {
  const auto apart = [](Floats x, __m256& even, __m256& odd) {
    const auto in_order = [](__m256 x) {
      return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
    };
    even = in_order(_mm256_shuffle_ps(x.low, x.high, 0x88));
    odd = in_order(_mm256_shuffle_ps(x.low, x.high, 0xdd));
  };
  apart(load(x), even.low, odd.low);
  apart(load(x + kLanes), even.high, odd.high);
}

// Interleave 16-bit halves: those of `even` and `odd` in turn, the first 32 and the last 32.
KVKEEP_INLINE void interleave(Ints even, Ints odd, Ints& first, Ints& second) {
  const auto together = [](__m256i even, __m256i odd) -> Ints {
    const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
    return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
  };
  first = together(even.low, odd.low), second = together(even.high, odd.high);
}

// Transpose eight rows of eight lanes.
KVKEEP_INLINE void transpose_eight(__m256i (&r)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// Transpose 16 rows of 16 lanes.
KVKEEP_INLINE void transpose(Ints (&r)[16]) {
  __m256i square[2][2][8];  // [upper or lower rows][left or right lanes]
  for (int i = 0; i < 8; ++i) {
    square[0][0][i] = r[i].low, square[0][1][i] = r[i].high;
    square[1][0][i] = r[8 + i].low, square[1][1][i] = r[8 + i].high;
  }
  for (auto& rows : square)
    for (auto& eight : rows) transpose_eight(eight);
  for (int i = 0; i < 8; ++i) {
    r[i] = {square[0][0][i], square[1][0][i]};
    r[8 + i] = {square[0][1][i], square[1][1][i]};
  }
}

}  // namespace kvkeep

#include "power_of_two.h"
