// Rotary position embedding (arXiv:2104.09864) in the half layout: element i of a head is paired
// with i + head_dim / 2. Half a head is a multiple of 16.
#pragma once

#include <cmath>

#include "lanes.h"

namespace kvkeep {

// Write the cosines, then the sines, of a position: [head_dim / 2] each. frequencies: radians per
// position, for each pair.
inline void angles(const double* frequencies, int head_dim, std::int64_t position, float* to) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    to[i] = static_cast<float>(std::cos(angle));
    to[half + i] = static_cast<float>(std::sin(angle));
  }
}

// Rotate, round and store 16 pairs of the two halves.
template <typename To>
void rotate_lanes(Floats a, Floats b, const float* angle, int half, To* to) {
  const Floats cosine = load(angle), sine = load(angle + half);
  store_rounded(to, multiply_subtract(a, cosine, b * sine));
  store_rounded(to + half, multiply_add(b, cosine, a * sine));
}

// Rotate a head. x, to: bf16 or floats; results are rounded to bf16.
template <typename From, typename To>
void rotate(const From* x, const float* angle, int head_dim, To* to) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes)
    rotate_lanes(load(x + i), load(x + half + i), angle + i, half, to + i);
}

}  // namespace kvkeep
