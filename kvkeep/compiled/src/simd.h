// What the kernels need of AVX-512: bf16 conversions, sums over lanes, exp, a transposition.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvkeep {

using Bf16 = std::uint16_t;

constexpr int kLanes = 16;  // floats in a register

inline __m512 to_float(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

inline __m512 load_bf16(const Bf16* x) {
  return to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// Rounds to nearest, ties to even.
inline void store_bf16(Bf16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

inline __m512i load(const void* x) { return _mm512_loadu_si512(x); }

// Which lanes are NaN or infinity.
inline __mmask16 not_finite(__m512 x) { return _mm512_fpclass_ps_mask(x, 0x99); }

// Adds to each lane of `sum` the products of two bf16 pairs.
inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// The same pair of bf16 in every lane.
inline __m512i pair(const Bf16* x) {
  std::int32_t two;
  std::memcpy(&two, x, sizeof two);
  return _mm512_set1_epi32(two);
}

// 2 to the x, to about 2e-7 of it; 0 far below.
inline __m512 exp2(__m512 x) {
  // Of x less its floor; the scaling takes the floor by itself.
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 sum = _mm512_set1_ps(0.00186713008f);
  const auto next = [&](float factor) { sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor)); };
  next(0.0090170303f);
  next(0.0557999131f);
  next(0.24016445f);
  next(0.693151312f);
  next(1.f);
  return _mm512_scalef_ps(sum, x);
}

constexpr float kLog2E = 1.44269504088896f;

inline __m512 sigmoid_times(__m512 x, __m512 y) {  // x * sigmoid(x) * y
  const __m512 minus = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
  return _mm512_mul_ps(_mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), minus)), y);
}

// Rows of 16 32-bit lanes become columns.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
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
    const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i high_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low, high, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// The sum over the lanes of each of 16 registers, as the lanes of one.
inline __m512 sums(const __m512 (&x)[16]) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(x[i]);
  transpose(r);
  __m512 total[4];
  for (int i = 0; i < 4; ++i) {
    total[i] = _mm512_add_ps(
        _mm512_add_ps(_mm512_castsi512_ps(r[4 * i]), _mm512_castsi512_ps(r[4 * i + 1])),
        _mm512_add_ps(_mm512_castsi512_ps(r[4 * i + 2]), _mm512_castsi512_ps(r[4 * i + 3])));
  }
  return _mm512_add_ps(_mm512_add_ps(total[0], total[1]), _mm512_add_ps(total[2], total[3]));
}

}  // namespace kvkeep
