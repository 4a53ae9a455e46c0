// The integer products of integers.h on AVX-512, with or without VNNI; see bytes_avx2.h.
#pragma once

namespace kvkeep {

constexpr int kMaxByteCode = 255;

using ByteSums = Ints;

KVKEEP_INLINE ByteSums zero_byte_sums() { return _mm512_setzero_si512(); }

#if defined(__AVX512VNNI__)
// Added four at a time, in 32 bits.
constexpr int kMaxByteSum = INT32_MAX, kProductsPerByteSum = 4;

KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return _mm512_dpbusd_epi32(sums, codes, bytes);
}
template <int kFactor>
KVKEEP_INLINE Ints widen_byte_sums(ByteSums x) {
  if constexpr (kFactor == 1) return x;
  return _mm512_maskz_slli_epi32(kAll16, x, __builtin_ctz(kFactor));
}
KVKEEP_INLINE Ints add_int16_products(Ints sums, Ints a, Ints b) {
  return _mm512_dpwssd_epi32(sums, a, b);
}
#else
constexpr int kMaxByteSum = 32767, kProductsPerByteSum = 2;

KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, bytes));
}
template <int kFactor>
KVKEEP_INLINE Ints widen_byte_sums(ByteSums x) {
  return _mm512_madd_epi16(x, _mm512_set1_epi16(kFactor));
}
KVKEEP_INLINE Ints add_int16_products(Ints sums, Ints a, Ints b) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
#endif

KVKEEP_INLINE void require_now(ByteSums& sums) { asm("" : "+v"(sums)); }

KVKEEP_INLINE Ints multiply_halves(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
KVKEEP_INLINE Ints multiply_halves_high(Ints a, Ints b) { return _mm512_mulhrs_epi16(a, b); }

KVKEEP_INLINE Ints load_int8_as_int16(const std::int8_t* x) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

KVKEEP_INLINE Ints shuffle_bytes(Ints x, const std::uint8_t* order) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  return _mm512_shuffle_epi8(x, _mm512_maskz_broadcast_i32x4(kAll16, all));
}

KVKEEP_INLINE Ints lookup_bytes(Ints which, const std::uint8_t* table) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(kAll16, all), which);
}

}  // namespace kvkeep
