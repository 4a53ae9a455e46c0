// What integers.h needs of AVX-512, with VNNI or without; bytes_avx2.h says what each is.
#pragma once

namespace kvkeep {

constexpr int kMostByteCode = 255;

using ByteSums = Ints;

KVKEEP_INLINE ByteSums no_byte_sums() { return _mm512_setzero_si512(); }

#if defined(__AVX512VNNI__)
// Each four are added up, in 32 bits.
constexpr int kMostOfByteSums = INT32_MAX, kAddedInByteSums = 4;

KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return _mm512_dpbusd_epi32(sums, codes, bytes);
}
template <int kFactor>
KVKEEP_INLINE Ints widened(ByteSums x) {
  if constexpr (kFactor == 1) return x;
  return _mm512_slli_epi32(x, __builtin_ctz(kFactor));
}
KVKEEP_INLINE Ints add_half_products(Ints sums, Ints a, Ints b) {
  return _mm512_dpwssd_epi32(sums, a, b);
}
#else
constexpr int kMostOfByteSums = 32767, kAddedInByteSums = 2;

KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, bytes));
}
template <int kFactor>
KVKEEP_INLINE Ints widened(ByteSums x) {
  return _mm512_madd_epi16(x, _mm512_set1_epi16(kFactor));
}
KVKEEP_INLINE Ints add_half_products(Ints sums, Ints a, Ints b) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
#endif

KVKEEP_INLINE Ints load_bytes_as_halves(const std::int8_t* x) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

KVKEEP_INLINE Ints bytes_in_order(Ints x, const std::uint8_t* order) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(all));
}

KVKEEP_INLINE Ints bytes_looked_up(Ints which, const std::uint8_t* table) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), which);
}

}  // namespace kvkeep
