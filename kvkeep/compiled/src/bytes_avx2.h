// The integer products of integers.h on AVX2, with or without VNNI.
#pragma once

namespace kvkeep {

constexpr int kMaxByteCode = 255;

using ByteSums = Ints;

KVKEEP_INLINE ByteSums zero_byte_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

#if defined(__AVXVNNI__)
// Sums of products of unsigned with signed bytes, added four at a time, in 32 bits.
constexpr int kMaxByteSum = INT32_MAX, kProductsPerByteSum = 4;

KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return {_mm256_dpbusd_avx_epi32(sums.low, codes.low, bytes.low),
          _mm256_dpbusd_avx_epi32(sums.high, codes.high, bytes.high)};
}
template <int kFactor>
KVKEEP_INLINE Ints widen_byte_sums(ByteSums x) {
  return shift_left<__builtin_ctz(kFactor)>(x);
}
KVKEEP_INLINE Ints add_int16_products(Ints sums, Ints a, Ints b) {
  return {_mm256_dpwssd_avx_epi32(sums.low, a.low, b.low),
          _mm256_dpwssd_avx_epi32(sums.high, a.high, b.high)};
}
#else
// Sums of products of unsigned with signed bytes, added in pairs: two 16-bit sums for each lane.
constexpr int kMaxByteSum = 32767, kProductsPerByteSum = 2;

KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return {_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(codes.low, bytes.low)),
          _mm256_add_epi16(sums.high, _mm256_maddubs_epi16(codes.high, bytes.high))};
}
// The sum of each lane's 16-bit sums, times kFactor, in 32 bits.
template <int kFactor>
KVKEEP_INLINE Ints widen_byte_sums(ByteSums x) {
  const __m256i factors = _mm256_set1_epi16(kFactor);
  return {_mm256_madd_epi16(x.low, factors), _mm256_madd_epi16(x.high, factors)};
}

// Add to each lane the two products of its signed 16-bit halves.
KVKEEP_INLINE Ints add_int16_products(Ints sums, Ints a, Ints b) {
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(a.low, b.low)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(a.high, b.high))};
}
#endif

// Make the compiler compute sums before those that come later in the program. GCC would multiply
// all terms of unrolled loops first, and keep the products in memory.
KVKEEP_INLINE void require_now(ByteSums& sums) { asm("" : "+x"(sums.low), "+x"(sums.high)); }

// Products of 16-bit halves: their lower 16 bits, and signed ones over 2^15, rounded.
KVKEEP_INLINE Ints multiply_halves(Ints a, Ints b) {
  return {_mm256_mullo_epi16(a.low, b.low), _mm256_mullo_epi16(a.high, b.high)};
}
KVKEEP_INLINE Ints multiply_halves_high(Ints a, Ints b) {
  return {_mm256_mulhrs_epi16(a.low, b.low), _mm256_mulhrs_epi16(a.high, b.high)};
}

// Load 32 signed bytes, extended to the 16-bit halves of the lanes.
KVKEEP_INLINE Ints load_int8_as_int16(const std::int8_t* x) {
  const __m128i* from = reinterpret_cast<const __m128i*>(x);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
}

// Reorder the bytes of each 128 bits.
KVKEEP_INLINE Ints shuffle_bytes(Ints x, const std::uint8_t* order) {
  const __m256i both =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(order)));
  return {_mm256_shuffle_epi8(x.low, both), _mm256_shuffle_epi8(x.high, both)};
}

// Look up each byte in a table of 16. The upper four bits of each byte must be 0.
KVKEEP_INLINE Ints lookup_bytes(Ints which, const std::uint8_t* table) {
  const __m256i both =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both, which.low), _mm256_shuffle_epi8(both, which.high)};
}

}  // namespace kvkeep
