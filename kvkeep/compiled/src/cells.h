// Keys and values as they are kept: plain, or quantised as kvkeep/cache/quantised.py does it.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace kvkeep {

// A tensor [layers, kv_heads, cells, head_dim]: elements between neighbours along the first three.
struct Strides {
  std::int64_t layer, head, cell;
};

// Keys or values. data: bf16 in 16 bits, int8 in 8, two numbers in a byte in 4. scale: where they
// are quantised, bf16 [..., 1] in 8 bits; in 4 [..., head_dim / 16], scales and least numbers.
struct Kept {
  void* data;
  Bf16* scale;
  Strides strides, scale_strides;
  std::int32_t bits, reserved;

  bool quantised() const { return bits != 16; }
};

// Cells of which each layer and KV head has a number of its own lie in one row, `strides.layer` and
// `strides.head` 0. offsets: where each head's begin, and where the last one's end; null where all
// heads have as many. most: that the head with most of them has.
struct Own {
  const std::int64_t* offsets;

  long first(int index) const { return offsets ? offsets[index] : 0; }
  int count(int index, int most) const {
    return offsets ? static_cast<int>(offsets[index + 1] - offsets[index]) : most;
  }
};

// Those of one layer and KV head, from some cell on. Neighbours lie `stride` bytes apart, and their
// scales `scale_stride` elements.
struct Stretch {
  std::uint8_t* data;
  Bf16* scale;
  long stride, scale_stride;
  int bits;

  Stretch(const Kept& kept, int layer, int head)
      : scale(nullptr), scale_stride(kept.scale_strides.cell), bits(kept.bits) {
    const int size = kept.quantised() ? 1 : sizeof(Bf16);
    const auto at = [=](const Strides& s) { return layer * s.layer + head * s.head; };
    data = static_cast<std::uint8_t*>(kept.data) + at(kept.strides) * size;
    stride = kept.strides.cell * size;
    if (kept.quantised()) scale = kept.scale + at(kept.scale_strides);
  }

  bool quantised() const { return bits != 16; }

  Stretch from(long cell) const {
    Stretch later = *this;
    later.data += cell * stride, later.scale += cell * scale_stride;
    return later;
  }

  // Of plain cells.
  Bf16* plain() const { return reinterpret_cast<Bf16*>(data); }
  long plain_stride() const { return stride / static_cast<long>(sizeof(Bf16)); }
};

template <int kDim>
using Vector = __m512[kDim / kLanes];

inline float single(Bf16 x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline Bf16 rounded(float x) {
  Bf16 lanes[kLanes];
  store_bf16(lanes, _mm512_set1_ps(x));
  return lanes[0];
}

// Sums and differences of lanes whose numbers differ in the bit `kBit`.
template <int kBit>
inline __m512 butterfly(__m512 x) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bit = _mm512_set1_epi32(kBit);
  const __m512 other = _mm512_permutexvar_ps(_mm512_xor_si512(lane, bit), x);
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), _mm512_test_epi32_mask(lane, bit), other, x);
}

// Times the Hadamard matrix of the largest power of two in kDim, block by block. Its own inverse.
template <int kDim>
inline void hadamard(Vector<kDim>& x) {
  constexpr int kBlock = kDim & -kDim;
  const __m512 norm = _mm512_set1_ps(1.f / std::sqrt(static_cast<float>(kBlock)));
  for (__m512& lanes : x)
    lanes = _mm512_mul_ps(
        butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(lanes)))), norm);
  for (int step = 1; step < kBlock / kLanes; step *= 2)
    for (int i = 0; i < kDim / kLanes; ++i) {
      if (i & step) continue;
      const __m512 one = x[i], other = x[i + step];
      x[i] = _mm512_add_ps(one, other), x[i + step] = _mm512_sub_ps(one, other);
    }
}

template <int kDim>
inline void load(const Bf16* from, Vector<kDim>& x) {
  for (int i = 0; i < kDim / kLanes; ++i) x[i] = load_bf16(from + i * kLanes);
}

template <int kDim>
inline void load(const float* from, Vector<kDim>& x) {
  for (int i = 0; i < kDim / kLanes; ++i) x[i] = _mm512_loadu_ps(from + i * kLanes);
}

template <int kDim>
inline void store(Bf16* to, const Vector<kDim>& x) {
  for (int i = 0; i < kDim / kLanes; ++i) store_bf16(to + i * kLanes, x[i]);
}

inline __m128i load_16_bytes(const std::uint8_t* x) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
}

inline void store_16_bytes(std::uint8_t* to, __m512i x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}

// The numbers of the first cell of a quantised stretch, still transformed.
template <int kDim>
inline void dequantise(const Stretch& from, Vector<kDim>& x) {
  if (from.bits == 8) {
    const __m512 scale = _mm512_set1_ps(single(from.scale[0]));
    for (int i = 0; i < kDim / kLanes; ++i) {
      const __m512i whole = _mm512_cvtepi8_epi32(load_16_bytes(from.data + i * kLanes));
      x[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale);
    }
    return;
  }
  constexpr int kHalf = kDim / kLanes / 2;  // registers whose numbers are in the lower halves
  const Bf16* least = from.scale + kHalf;
  const auto number = [&](int i, __m512i whole) {
    x[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(single(from.scale[i / 2])),
                           _mm512_set1_ps(single(least[i / 2])));
  };
  for (int i = 0; i < kHalf; ++i) {
    const __m512i both = _mm512_cvtepu8_epi32(load_16_bytes(from.data + i * kLanes));
    number(i, _mm512_and_si512(both, _mm512_set1_epi32(15)));
    number(kHalf + i, _mm512_srli_epi32(both, 4));
  }
}

// What numbers are divided by, of which the greatest is to become `most`.
inline __m512 units_of(float greatest, float most, Bf16* scale) {
  *scale = rounded(std::max(greatest, 0.f) / most);
  const float unit = single(*scale);
  return _mm512_set1_ps(unit == 0.f ? 1.f : unit);
}

// Mixed numbers into the first cell of a quantised stretch.
template <int kDim>
inline void quantise(const Vector<kDim>& x, const Stretch& to) {
  constexpr int kAll = kDim / kLanes, kHalf = kAll / 2;
  if (to.bits == 8) {
    __m512 most = _mm512_setzero_ps();
    for (const __m512& lanes : x) most = _mm512_max_ps(most, _mm512_abs_ps(lanes));
    const __m512 unit = units_of(_mm512_reduce_max_ps(most), 127.f, to.scale);
    for (int i = 0; i < kAll; ++i) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(x[i], unit));
      const __m512i low = _mm512_max_epi32(whole, _mm512_set1_epi32(-127));
      store_16_bytes(to.data + i * kLanes, _mm512_min_epi32(low, _mm512_set1_epi32(127)));
    }
    return;
  }
  __m512i whole[kAll];
  for (int i = 0; i < kAll; i += 2) {
    const float greatest = _mm512_reduce_max_ps(_mm512_max_ps(x[i], x[i + 1]));
    Bf16& least = to.scale[kHalf + i / 2];
    least = rounded(_mm512_reduce_min_ps(_mm512_min_ps(x[i], x[i + 1])));
    const __m512 unit = units_of(greatest - single(least), 15.f, to.scale + i / 2);
    for (int j = i; j < i + 2; ++j) {
      const __m512 above = _mm512_sub_ps(x[j], _mm512_set1_ps(single(least)));
      const __m512i near = _mm512_cvtps_epi32(_mm512_div_ps(above, unit));
      whole[j] = _mm512_min_epi32(_mm512_max_epi32(near, _mm512_setzero_si512()),
                                  _mm512_set1_epi32(15));
    }
  }
  for (int i = 0; i < kHalf; ++i)
    store_16_bytes(to.data + i * kLanes,
                   _mm512_or_si512(whole[i], _mm512_slli_epi32(whole[kHalf + i], 4)));
}

}  // namespace kvkeep
