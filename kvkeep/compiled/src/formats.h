// The formats of packed weights: how blocks of 16 rows by 32 columns are unpacked and scaled.
// kvkeep/models/weights/formats.py defines the formats, kvkeep/models/weights/packing.py their
// memory layout.
#pragma once

#include <utility>

#include "lanes.h"

namespace kvkeep {

enum Format : std::int32_t {
  kBf16,
  kF16,
  kF32,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIq4Nl,
  kIq4Xs,
  kMxfp4
};

constexpr int kGroup = 32;  // columns that are unpacked together
constexpr int kPairs = kGroup / 2;
constexpr int kBlock = 16;  // rows in a block, one for each lane

inline Ints unsigned_bytes(const char* x) {
  return widen(reinterpret_cast<const std::uint8_t*>(x));
}

struct Iq4Codebook : Codebook16 {  // IQ4_NL, IQ4_XS
  constexpr Iq4Codebook()
      : Codebook16({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}) {}
};

struct E2m1Codebook : Codebook16 {  // MXFP4
  constexpr E2m1Codebook()
      : Codebook16({0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6}) {}
};

// Call `each` with each integer of a sequence as a constant.
template <typename Each, int... n>
KVKEEP_INLINE void unroll(Each each, std::integer_sequence<int, n...>) {
  (each(std::integral_constant<int, n>{}), ...);
}

// Codes: `pair<p>(data)` returns columns 2 p and 2 p + 1 of 16 rows as bf16, and `halves<p>(data)`
// as integers of 16 bits in steps of kStep. Integer codes run from kLowest to kLowest + kRange; see
// integers.h.

// The word whose 16-bit halves have the lower four bits of pair p's codes as their lowest bits.
template <int p>
Ints nibble_word(const char* data) {
  return shift_halves_right<4 * (p % 4)>(load_ints(data + 64 * (p / 4)));
}

// The lower four bits of each byte of that word: of its pair, and of the pair two further.
template <int n>
Ints nibbles(const char* data) {
  return nibble_word<4 * (n / 2) + n % 2>(data) & splat_int(0x0f0f0f0f);
}

// The lowest bit of pair p within a half of a plane with kBits for each code. The pair two further
// is a byte above.
template <int p, int kBits>
constexpr int kPlaneBit = kBits * (2 * (p / 4) + p % 2) + 8 * (p % 4 / 2);

// A plane's bits of pair p, shifted to bits 4 and above.
template <int p, int kBits>
Ints shift_plane(const char* plane) {
  return shift_halves_right<kPlaneBit<p, kBits> - 4>(load_ints(plane));
}

// A pair of bf16 as integers of 16 bits in steps of kStep.
template <typename Codes, int p>
Ints pair_halves(const char* data) {
  const Bf16Pairs pair = Codes::template pair<p>(data);
  const Floats factor = splat(1 / Codes::kStep);
  return (to_ints(evens(pair) * factor) & splat_int(0xffff)) |
         shift_left<16>(to_ints(odds(pair) * factor));
}

template <typename Numbers>
struct Codes4 {
  static constexpr int kBytes = 256, kBits = 4;
  static constexpr Numbers kCodebook{};
  template <int p>
  static Bf16Pairs pair(const char* data) {
    return kCodebook(nibble_word<p>(data));
  }
};

template <int kLowestCode>
struct LinearCodes4 : Codes4<LinearCodebook<kLowestCode, 4>> {
  static constexpr int kLowest = kLowestCode, kRange = 15;
  static constexpr float kStep = 1;
  template <int p>
  static Ints halves(const char* data) {
    return add_halves(nibble_word<p>(data) & splat_int(0x000f000f), kLowest);
  }
  template <int n>
  static Ints bytes(const char* data) {
    return nibbles<n>(data);
  }
};

struct Iq4Codes : Codes4<Iq4Codebook> {
  static constexpr int kLowest = -127, kRange = 240;
  static constexpr float kStep = 1;
  template <int p>
  static Ints halves(const char* data) {
    return pair_halves<Iq4Codes, p>(data);
  }
  template <int n>
  static Ints bytes(const char* data) {
    alignas(16) static constexpr std::uint8_t kPlaces[16] = {
        0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
    return lookup_bytes(nibbles<n>(data), kPlaces);
  }
};

struct E2m1Codes : Codes4<E2m1Codebook> {
  static constexpr int kLowest = -12, kRange = 24;
  static constexpr float kStep = .5f;
  template <int p>
  static Ints halves(const char* data) {
    return pair_halves<E2m1Codes, p>(data);
  }
  template <int n>
  static Ints bytes(const char* data) {
    alignas(16) static constexpr std::uint8_t kPlaces[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                             12, 11, 10, 9,  8,  6,  4,  0};
    return lookup_bytes(nibbles<n>(data), kPlaces);
  }
};

template <int kLowestCode>
struct Codes5 {
  static constexpr int kBytes = 320, kBits = 5, kLowest = kLowestCode, kRange = 31;
  static constexpr float kStep = 1;
  static constexpr LinearCodebook<kLowestCode, 5> kCodebook{};
  template <int p>
  static Bf16Pairs pair(const char* data) {
    return kCodebook(word<p>(data));
  }
  template <int p>
  static Ints halves(const char* data) {
    return add_halves(word<p>(data) & splat_int(0x001f001f), kLowest);
  }
  template <int n>
  static Ints bytes(const char* data) {
    const Ints high = shift_plane<4 * (n / 2) + n % 2, 1>(data + 256);
    return nibbles<n>(data) | (high & splat_int(0x10101010));
  }

 private:
  template <int p>
  static Ints word(const char* data) {
    return merge_nibbles(nibble_word<p>(data), shift_plane<p, 1>(data + 256));
  }
};

struct Codes6 {
  static constexpr int kBytes = 384, kBits = 6, kLowest = -32, kRange = 63;
  static constexpr float kStep = 1;
  static constexpr LinearCodebook<-32, 6> kCodebook{};
  template <int p>
  static Bf16Pairs pair(const char* data) {
    return kCodebook(word<p>(data));
  }
  template <int p>
  static Ints halves(const char* data) {
    return add_halves(word<p>(data) & splat_int(0x003f003f), kLowest);
  }
  template <int n>
  static Ints bytes(const char* data) {
    const Ints high = shift_plane<4 * (n / 2) % 8 + n % 2, 2>(data + 256 + 64 * (n / 4));
    return nibbles<n>(data) | (high & splat_int(0x30303030));
  }

 private:
  template <int p>
  static Ints word(const char* data) {
    const Ints high = shift_plane<p % 8, 2>(data + 256 + 64 * (p / 8));
    return merge_nibbles(nibble_word<p>(data), high);
  }
};

struct Codes8 {
  static constexpr int kBytes = 512, kBits = 8, kLowest = -128, kRange = 255;
  static constexpr float kStep = 1;
  template <int p>
  static Bf16Pairs pair(const char* data) {
    return load_int8_pairs(reinterpret_cast<const std::int8_t*>(data + 32 * p));
  }
  template <int p>
  static Ints halves(const char* data) {
    return load_int8_as_int16(reinterpret_cast<const std::int8_t*>(data + 32 * p));
  }
  template <int n>
  static Ints bytes(const char* data) {
    constexpr int p = 4 * (n / 2) + n % 2;
    return add_halves(halves<p>(data), -kLowest) |
           shift_left<8>(add_halves(halves<p + 2>(data), -kLowest));
  }
};

// Scales: of 16 rows in group `g` of a tile; `s` counts the scales of a group where it has two.

struct Fp16Scales {
  static constexpr int kTileColumns = 32, kScaleColumns = 32, kTileBytes = 32;
  static constexpr bool kHasMinima = false;
  static Floats scale(const char* tile, int, int) { return load_fp16(tile); }
  static Floats minimum(const char*, int) { return zeros(); }
};

struct Fp16ScalesAndMinima {
  static constexpr int kTileColumns = 32, kScaleColumns = 32, kTileBytes = 64;
  static constexpr bool kHasMinima = true;
  static Floats scale(const char* tile, int, int) { return load_fp16(tile); }
  static Floats minimum(const char* tile, int) { return load_fp16(tile + 32); }
};

struct KScales {  // Q4_K, Q5_K
  static constexpr int kTileColumns = 256, kScaleColumns = 32, kTileBytes = 320;
  static constexpr bool kHasMinima = true;
  static Floats scale(const char* tile, int g, int) {
    return load_fp16(tile) * to_floats(integer_scale(tile, g, 0));
  }
  static Ints integer_scale(const char* tile, int g, int) {
    return unsigned_bytes(tile + 64 + 16 * g);
  }
  static Floats minimum(const char* tile, int g) {
    const Floats below = to_floats(unsigned_bytes(tile + 192 + 16 * g));
    return subtract_product(zeros(), load_fp16(tile + 32), below);
  }
};

template <int kSharedBy>  // Q6_K, IQ4_XS
struct ByteScales {
  static constexpr int kTileColumns = 256, kScaleColumns = kSharedBy,
                       kTileBytes = 32 + 16 * 256 / kSharedBy;
  static constexpr bool kHasMinima = false;
  static Floats scale(const char* tile, int g, int s) {
    return load_fp16(tile) * to_floats(integer_scale(tile, g, s));
  }
  static Ints integer_scale(const char* tile, int g, int s) {
    const char* scales = tile + 32 + 16 * (g * (kGroup / kScaleColumns) + s);
    return widen(reinterpret_cast<const std::int8_t*>(scales));
  }
  static Floats minimum(const char*, int) { return zeros(); }
};

struct ExponentScales {  // MXFP4
  static constexpr int kTileColumns = 32, kScaleColumns = 32, kTileBytes = 16;
  static constexpr bool kHasMinima = false;
  static Floats scale(const char* tile, int, int) {
    return as_floats(shift_left<23>(unsigned_bytes(tile)));
  }
  static Floats minimum(const char*, int) { return zeros(); }
};

template <typename CodesOf, typename ScalesOf>
struct PackedFormat {
  using Codes = CodesOf;
  using Scales = ScalesOf;
};

// Call `with(PackedFormat<...>{})` for a packed format, `other()` for a dense one.
template <typename With, typename Other>
void for_format(std::int32_t format, With with, Other other) {
  switch (format) {
    case kQ8_0: return with(PackedFormat<Codes8, Fp16Scales>{});
    case kQ4_0: return with(PackedFormat<LinearCodes4<-8>, Fp16Scales>{});
    case kQ4_1: return with(PackedFormat<LinearCodes4<0>, Fp16ScalesAndMinima>{});
    case kQ5_0: return with(PackedFormat<Codes5<-16>, Fp16Scales>{});
    case kQ5_1: return with(PackedFormat<Codes5<0>, Fp16ScalesAndMinima>{});
    case kQ4_K: return with(PackedFormat<LinearCodes4<0>, KScales>{});
    case kQ5_K: return with(PackedFormat<Codes5<0>, KScales>{});
    case kQ6_K: return with(PackedFormat<Codes6, ByteScales<16>>{});
    case kIq4Nl: return with(PackedFormat<Iq4Codes, Fp16Scales>{});
    case kIq4Xs: return with(PackedFormat<Iq4Codes, ByteScales<32>>{});
    case kMxfp4: return with(PackedFormat<E2m1Codes, ExponentScales>{});
    default: return other();
  }
}

}  // namespace kvkeep
