#pragma once

#include <cmath>

#include "simd.h"

namespace kvkeep {

// RMSNorm (arXiv:1910.07467) of `size` values, a multiple of 16; centred: their mean is taken off
// first, which makes it LayerNorm (arXiv:1607.06450). `to(i, values)` takes those from i on, 16 at
// a time.
template <typename To>
void norm(const float* x, const Bf16* weight, float eps, bool centred, int size, To to) {
  __m512 mean = _mm512_setzero_ps();
  if (centred) {
    for (int i = 0; i < size; i += kLanes) mean = _mm512_add_ps(mean, _mm512_loadu_ps(x + i));
    mean = _mm512_set1_ps(_mm512_reduce_add_ps(mean) / size);
  }
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += kLanes) {
    const __m512 value = _mm512_sub_ps(_mm512_loadu_ps(x + i), mean);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const __m512 factor =
      _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
  for (int i = 0; i < size; i += kLanes)
    to(i, _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), mean), factor),
                        load_bf16(weight + i)));
}

}  // namespace kvkeep
