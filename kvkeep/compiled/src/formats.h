// The formats of packed weights: how 16 rows of 32 columns are unpacked, and what they are scaled
// by. kvkeep/models/formats.py says what the formats are, kvkeep/models/packing.py how they lie.
#pragma once

#include "simd.h"

namespace kvkeep {

enum Format : std::int32_t {
  kBf16, kF16, kF32, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs, kMxfp4
};

constexpr int kGroup = 32;  // columns that are unpacked together
constexpr int kPairs = kGroup / 2;
constexpr int kBlock = 16;  // rows that are multiplied together, one in each lane

inline __m512 half_floats(const char* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

inline __m512 byte_floats(const char* x) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

inline __m512 unsigned_byte_floats(const char* x) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

// bf16 of small integers and halves, from `kFirst` on.
template <int kFirst, int kCount>
struct Steps {
  alignas(64) Bf16 values[kCount];

  constexpr Steps() : values() {
    for (int i = 0; i < kCount; ++i) values[i] = bf16_of(kFirst + i % kCount);
  }

  // Of an integer below 256.
  static constexpr Bf16 bf16_of(int x) {
    if (x == 0) return 0;
    const int size = x < 0 ? -x : x;
    int exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    const int fraction = (size << (7 - exponent)) & 0x7f;
    return static_cast<Bf16>((x < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | fraction);
  }
};

// Tables of 16 stand there twice: a lookup takes five bits, and whatever the fifth is must not
// matter.
template <int kFirst>
struct Sixteen {
  alignas(64) Bf16 values[32];
  constexpr Sixteen() : values() {
    for (int i = 0; i < 32; ++i) values[i] = Steps<0, 1>::bf16_of(kFirst + i % 16);
  }
};

struct Finer {  // IQ4_NL, IQ4_XS
  alignas(64) Bf16 values[32];
  constexpr Finer() : values() {
    constexpr int kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
    for (int i = 0; i < 32; ++i) values[i] = Steps<0, 1>::bf16_of(kTable[i % 16]);
  }
};

struct E2m1 {  // MXFP4
  alignas(64) Bf16 values[32];
  constexpr E2m1() : values() {
    constexpr Bf16 kTable[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int i = 0; i < 32; ++i)
      values[i] = static_cast<Bf16>(kTable[i % 8] | (i % 16 < 8 ? 0 : 0x8000));
  }
};

// Codes: `pair<p>(data)` are columns 2 p and 2 p + 1 of 16 rows, as bf16.

// The word in whose lowest bits the codes of pair p are.
template <int p>
__m512i nibble_word(const char* data) {
  const __m512i word = load(data + 64 * (p / 4));
  if constexpr (p % 4 == 0)
    return word;
  else
    return _mm512_srli_epi16(word, 4 * (p % 4));
}

// With bit `from` of each word in place 4, and so on.
template <int from>
__m512i in_place_4(const char* plane) {
  const __m512i word = load(plane);
  if constexpr (from < 4)
    return _mm512_slli_epi16(word, 4 - from);
  else if constexpr (from > 4)
    return _mm512_srli_epi16(word, from - 4);
  else
    return word;
}

// The lowest four bits of one word, the others of another.
inline __m512i joined(__m512i low, __m512i high) {
  constexpr int kWhereMaskElse = 0xca;  // mask ? a : b, of mask, a, b
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, kWhereMaskElse);
}

template <typename Table>
struct Codes4 {
  static constexpr int kBytes = 256;
  static constexpr Table kTable{};
  template <int p>
  static __m512i pair(const char* data) {
    return _mm512_permutexvar_epi16(nibble_word<p>(data), load(kTable.values));
  }
};

template <int kFirst>
struct Codes5 {
  static constexpr int kBytes = 320;
  static constexpr Steps<kFirst, 32> kTable{};
  template <int p>
  static __m512i pair(const char* data) {
    const __m512i which = joined(nibble_word<p>(data), in_place_4<p>(data + 256));
    return _mm512_permutexvar_epi16(which, load(kTable.values));
  }
};

struct Codes6 {
  static constexpr int kBytes = 384;
  static constexpr Steps<-32, 64> kTable{};
  template <int p>
  static __m512i pair(const char* data) {
    const __m512i high = in_place_4<2 * (p % 8)>(data + 256 + 64 * (p / 8));
    return _mm512_permutex2var_epi16(load(kTable.values), joined(nibble_word<p>(data), high),
                                     load(kTable.values + 32));
  }
};

struct Codes8 {
  static constexpr int kBytes = 512;
  template <int p>
  static __m512i pair(const char* data) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(byte_floats(data + 32 * p + 16),
                                                         byte_floats(data + 32 * p)));
  }
};

// Scales: those of 16 rows in group `g` of a tile; `s` counts the scales of a group, if it has two.

struct HalfScales {
  static constexpr int kSpan = 32, kShared = 32, kTileBytes = 32;
  static constexpr bool kMinima = false;
  static __m512 scale(const char* tile, int, int) { return half_floats(tile); }
  static __m512 minimum(const char*, int) { return _mm512_setzero_ps(); }
};

struct HalfScalesAndMinima {
  static constexpr int kSpan = 32, kShared = 32, kTileBytes = 64;
  static constexpr bool kMinima = true;
  static __m512 scale(const char* tile, int, int) { return half_floats(tile); }
  static __m512 minimum(const char* tile, int) { return half_floats(tile + 32); }
};

struct KScales {  // Q4_K, Q5_K
  static constexpr int kSpan = 256, kShared = 32, kTileBytes = 320;
  static constexpr bool kMinima = true;
  static __m512 scale(const char* tile, int g, int) {
    return _mm512_mul_ps(half_floats(tile), unsigned_byte_floats(tile + 64 + 16 * g));
  }
  static __m512 minimum(const char* tile, int g) {
    const __m512 below = unsigned_byte_floats(tile + 192 + 16 * g);
    return _mm512_fnmadd_ps(half_floats(tile + 32), below, _mm512_setzero_ps());
  }
};

template <int kSharedBy>  // Q6_K, IQ4_XS
struct ByteScales {
  static constexpr int kSpan = 256, kShared = kSharedBy, kTileBytes = 32 + 16 * 256 / kSharedBy;
  static constexpr bool kMinima = false;
  static __m512 scale(const char* tile, int g, int s) {
    return _mm512_mul_ps(half_floats(tile),
                         byte_floats(tile + 32 + 16 * (g * (kGroup / kShared) + s)));
  }
  static __m512 minimum(const char*, int) { return _mm512_setzero_ps(); }
};

struct Exponents {  // MXFP4
  static constexpr int kSpan = 32, kShared = 32, kTileBytes = 16;
  static constexpr bool kMinima = false;
  static __m512 scale(const char* tile, int, int) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
  }
  static __m512 minimum(const char*, int) { return _mm512_setzero_ps(); }
};

template <typename CodesOf, typename ScalesOf>
struct Kind {
  using Codes = CodesOf;
  using Scales = ScalesOf;
};

// Calls `with(Kind<...>{})` for a packed format; `other()` for one whose numbers stand alone.
template <typename With, typename Other>
void for_format(std::int32_t format, With with, Other other) {
  switch (format) {
    case kQ8_0: return with(Kind<Codes8, HalfScales>{});
    case kQ4_0: return with(Kind<Codes4<Sixteen<-8>>, HalfScales>{});
    case kQ4_1: return with(Kind<Codes4<Sixteen<0>>, HalfScalesAndMinima>{});
    case kQ5_0: return with(Kind<Codes5<-16>, HalfScales>{});
    case kQ5_1: return with(Kind<Codes5<0>, HalfScalesAndMinima>{});
    case kQ4_K: return with(Kind<Codes4<Sixteen<0>>, KScales>{});
    case kQ5_K: return with(Kind<Codes5<0>, KScales>{});
    case kQ6_K: return with(Kind<Codes6, ByteScales<16>>{});
    case kIq4Nl: return with(Kind<Codes4<Finer>, HalfScales>{});
    case kIq4Xs: return with(Kind<Codes4<Finer>, ByteScales<32>>{});
    case kMxfp4: return with(Kind<Codes4<E2m1>, Exponents>{});
    default: return other();
  }
}

}  // namespace kvkeep
