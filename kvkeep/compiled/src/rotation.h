// Rotary position embedding (arXiv:2104.09864) in the half layout: element i of a head is paired
// with i + head_dim / 2. Half a head is a multiple of 16.
#pragma once

#include <cmath>

#include "simd.h"

namespace kvkeep {

// Cosines and sines of a position: [head_dim / 2] each, one behind the other. frequencies: radians
// per position, for each pair.
inline void angles(const double* frequencies, int head_dim, std::int64_t position, float* to) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    to[i] = static_cast<float>(std::cos(angle));
    to[half + i] = static_cast<float>(std::sin(angle));
  }
}

// Two halves of one stretch of 16 pairs, rotated, rounded and stored.
inline void rotate_some(__m512 a, __m512 b, const float* angle, int half, Bf16* to) {
  const __m512 cosine = _mm512_loadu_ps(angle), sine = _mm512_loadu_ps(angle + half);
  store_bf16(to, _mm512_fmsub_ps(a, cosine, _mm512_mul_ps(b, sine)));
  store_bf16(to + half, _mm512_fmadd_ps(b, cosine, _mm512_mul_ps(a, sine)));
}

inline void rotate(const float* x, const float* angle, int head_dim, Bf16* to) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes)
    rotate_some(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + half + i), angle + i, half, to + i);
}

inline void rotate(const Bf16* x, const float* angle, int head_dim, Bf16* to) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes)
    rotate_some(load_bf16(x + i), load_bf16(x + half + i), angle + i, half, to + i);
}

}  // namespace kvkeep
