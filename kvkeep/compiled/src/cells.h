// Stored keys and values: plain, or quantised as in kvkeep/cache/quantised.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "lanes.h"

namespace kvkeep {

// The strides of a tensor [layers, kv_heads, cells, head_dim], in elements; the last one is 1.
struct Strides {
  std::ptrdiff_t layer, head, cell;
};

// Keys or values. data: bf16 (16 bits), int8 (8 bits), or two numbers in a byte (4 bits). scale, of
// quantised ones: bf16 [..., 1] for 8 bits; for 4 bits [..., head_dim / 16], scales and minima.
struct StoredCells {
  void* data;
  Bf16* scale;
  Strides strides, scale_strides;
  std::int32_t bits, reserved;

  bool quantised() const { return bits != 16; }
};

// The offsets of ragged cells, whose count differs by layer and KV head: they lie in one row, with
// `strides.layer` and `strides.head` 0. offsets: where each head's cells begin, and the end of the
// last one's; null where all heads have the same count. most: the count of the longest head.
struct RaggedOffsets {
  const std::int64_t* offsets;

  std::ptrdiff_t first(int index) const { return offsets ? offsets[index] : 0; }
  int count(int index, int most) const {
    return offsets ? static_cast<int>(offsets[index + 1] - offsets[index]) : most;
  }
};

// The cells of one layer and KV head, from some cell on. Neighbours are `stride` bytes apart, their
// scales `scale_stride` elements.
struct HeadCells {
  std::uint8_t* data;
  Bf16* scale;
  std::ptrdiff_t stride, scale_stride;
  int bits;

  HeadCells(const StoredCells& stored, int layer, int head)
      : scale(nullptr), scale_stride(stored.scale_strides.cell), bits(stored.bits) {
    const int size = stored.quantised() ? 1 : sizeof(Bf16);
    const auto at = [=](const Strides& s) { return layer * s.layer + head * s.head; };
    data = static_cast<std::uint8_t*>(stored.data) + at(stored.strides) * size;
    stride = stored.strides.cell * size;
    if (stored.quantised()) scale = stored.scale + at(stored.scale_strides);
  }

  bool quantised() const { return bits != 16; }

  HeadCells advanced(std::ptrdiff_t cell) const {
    HeadCells later = *this;
    later.data += cell * stride, later.scale += cell * scale_stride;
    return later;
  }

  // Of plain cells only.
  Bf16* plain_data() const { return reinterpret_cast<Bf16*>(data); }
  std::ptrdiff_t plain_stride() const { return stride / static_cast<std::ptrdiff_t>(sizeof(Bf16)); }
};

template <int kDim>
using Vector = Floats[kDim / kLanes];

// Multiply by the Hadamard matrix of the largest power of two in kDim, block by block. It is its
// own inverse.
template <int kDim>
inline void hadamard(Vector<kDim>& x) {
  constexpr int kBlock = kDim & -kDim;
  const Floats norm = splat(1.f / std::sqrt(static_cast<float>(kBlock)));
  for (Floats& lanes : x)
    lanes = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(lanes)))) * norm;
  for (int step = 1; step < kBlock / kLanes; step *= 2)
    for (int i = 0; i < kDim / kLanes; ++i) {
      if (i & step) continue;
      const Floats one = x[i], other = x[i + step];
      x[i] = one + other, x[i + step] = one - other;
    }
}

template <int kDim, typename Number>
inline void load(const Number* from, Vector<kDim>& x) {
  for (int i = 0; i < kDim / kLanes; ++i) x[i] = load(from + i * kLanes);
}

template <int kDim, typename Number>
inline void store_rounded(Number* to, const Vector<kDim>& x) {
  for (int i = 0; i < kDim / kLanes; ++i) store_rounded(to + i * kLanes, x[i]);
}

// Dequantise the first cell; it stays in the Hadamard basis.
template <int kDim>
inline void dequantise(const HeadCells& from, Vector<kDim>& x) {
  if (from.bits == 8) {
    const Floats scale = splat(to_float(from.scale[0]));
    for (int i = 0; i < kDim / kLanes; ++i) {
      const auto* integer = reinterpret_cast<const std::int8_t*>(from.data) + i * kLanes;
      x[i] = to_floats(widen(integer)) * scale;
    }
    return;
  }
  constexpr int kHalf =
      kDim / kLanes / 2;  // registers whose numbers are in the lower halves of bytes
  const Bf16* least = from.scale + kHalf;
  const auto number = [&](int i, Ints integer) {
    x[i] = multiply_add(to_floats(integer), splat(to_float(from.scale[i / 2])),
                        splat(to_float(least[i / 2])));
  };
  for (int i = 0; i < kHalf; ++i) {
    const Ints codes = widen(from.data + i * kLanes);
    number(i, codes & splat_int(15));
    number(kHalf + i, shift_right<4>(codes));
  }
}

// Store the scale that maps `greatest` to `most`, and return it as a divisor.
inline Floats quantisation_step(float greatest, float most, Bf16* scale) {
  *scale = to_bf16(std::max(greatest, 0.f) / most);
  const float unit = to_float(*scale);
  return splat(unit == 0.f ? 1.f : unit);
}

// Quantise numbers in the Hadamard basis into the first cell.
template <int kDim>
inline void quantise(const Vector<kDim>& x, const HeadCells& to) {
  constexpr int kAll = kDim / kLanes, kHalf = kAll / 2;
  if (to.bits == 8) {
    Floats most = zeros();
    for (const Floats& lanes : x) most = max(most, absolute(lanes));
    const Floats unit = quantisation_step(reduce_max(most), 127.f, to.scale);
    for (int i = 0; i < kAll; ++i) {
      const Ints integer = to_ints(x[i] / unit);
      const Ints low = max(integer, splat_int(-127));
      store_bytes(to.data + i * kLanes, min(low, splat_int(127)));
    }
    return;
  }
  Ints integer[kAll];
  for (int i = 0; i < kAll; i += 2) {
    const float greatest = reduce_max(max(x[i], x[i + 1]));
    Bf16& least = to.scale[kHalf + i / 2];
    least = to_bf16(reduce_min(min(x[i], x[i + 1])));
    const Floats unit = quantisation_step(greatest - to_float(least), 15.f, to.scale + i / 2);
    for (int j = i; j < i + 2; ++j) {
      const Ints code = to_ints((x[j] - splat(to_float(least))) / unit);
      integer[j] = min(max(code, splat_int(0)), splat_int(15));
    }
  }
  for (int i = 0; i < kHalf; ++i)
    store_bytes(to.data + i * kLanes, integer[i] | shift_left<4>(integer[kHalf + i]));
}

}  // namespace kvkeep
