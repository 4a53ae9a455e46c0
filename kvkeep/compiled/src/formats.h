// The formats of packed weights: how 16 rows of 32 columns are unpacked, and what they are scaled
// by. kvkeep/models/formats.py says what the formats are, kvkeep/models/packing.py how they lie.
#pragma once

#include "lanes.h"

namespace kvkeep {

enum Format : std::int32_t {
  kBf16, kF16, kF32, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs, kMxfp4
};

constexpr int kGroup = 32;  // columns that are unpacked together
constexpr int kPairs = kGroup / 2;
constexpr int kBlock = 16;  // rows that are multiplied together, one in each lane

inline Floats byte_floats(const char* x) {
  return to_floats(widen(reinterpret_cast<const std::int8_t*>(x)));
}

inline Ints unsigned_bytes(const char* x) {
  return widen(reinterpret_cast<const std::uint8_t*>(x));
}

struct Finer : Sixteen {  // IQ4_NL, IQ4_XS
  constexpr Finer()
      : Sixteen({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}) {}
};

struct E2m1 : Sixteen {  // MXFP4
  constexpr E2m1()
      : Sixteen({0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6}) {}
};

// Codes: `pair<p>(data)` are columns 2 p and 2 p + 1 of 16 rows, as bf16.

// `scaled_pair<p>(data)`, where there is one: the same, too large by what `scale_down` makes rows too
// small.

// The word of which bit `place` is the lowest of the codes of pair p.
template <int p, int place = 0>
Ints nibble_word(const char* data) {
  return halves_right<4 * (p % 4) - place>(load_ints(data + 64 * (p / 4)));
}

// With bit `from` of each word in the place of bit `to`, and so on.
template <int from, int to>
Ints moved(const char* plane) {
  return halves_right<from - to>(load_ints(plane));
}

template <int p>
constexpr int kPlaceOf = place_of(p % 4);

template <typename Numbers>
struct Codes4 {
  static constexpr int kBytes = 256;
  static constexpr Numbers kNumbers{};
  template <int p>
  static Paired pair(const char* data) {
    return kNumbers(nibble_word<p>(data));
  }
};

template <int kFirst>
struct Steps4 : Codes4<Steps<kFirst, 4>> {
  template <int p>
  static Paired scaled_pair(const char* data) {
    constexpr int place = kPlaceOf<p>;
    return Codes4<Steps<kFirst, 4>>::kNumbers.template in_place<place>(nibble_word<p, place>(data));
  }
};

template <int kFirst>
struct Codes5 {
  static constexpr int kBytes = 320;
  static constexpr Steps<kFirst, 5> kNumbers{};
  template <int p>
  static Paired pair(const char* data) {
    return kNumbers(word<p, 0>(data));
  }
  template <int p>
  static Paired scaled_pair(const char* data) {
    return kNumbers.template in_place<kPlaceOf<p>>(word<p, kPlaceOf<p>>(data));
  }

 private:
  template <int p, int place>
  static Ints word(const char* data) {
    return four_from<place>(nibble_word<p, place>(data), moved<p, place + 4>(data + 256));
  }
};

struct Codes6 {
  static constexpr int kBytes = 384;
  static constexpr Steps<-32, 6> kNumbers{};
  template <int p>
  static Paired pair(const char* data) {
    return kNumbers(word<p, 0>(data));
  }
  template <int p>
  static Paired scaled_pair(const char* data) {
    return kNumbers.template in_place<kPlaceOf<p>>(word<p, kPlaceOf<p>>(data));
  }

 private:
  template <int p, int place>
  static Ints word(const char* data) {
    const Ints high = moved<2 * (p % 8), place + 4>(data + 256 + 64 * (p / 8));
    return four_from<place>(nibble_word<p, place>(data), high);
  }
};

struct Codes8 {
  static constexpr int kBytes = 512;
  template <int p>
  static Paired pair(const char* data) {
    return load_bytes_paired(reinterpret_cast<const std::int8_t*>(data + 32 * p));
  }
};

// Scales: those of 16 rows in group `g` of a tile; `s` counts the scales of a group, if it has two.

struct HalfScales {
  static constexpr int kSpan = 32, kShared = 32, kTileBytes = 32;
  static constexpr bool kMinima = false;
  static Floats scale(const char* tile, int, int) { return load_half(tile); }
  static Floats minimum(const char*, int) { return zeros(); }
};

struct HalfScalesAndMinima {
  static constexpr int kSpan = 32, kShared = 32, kTileBytes = 64;
  static constexpr bool kMinima = true;
  static Floats scale(const char* tile, int, int) { return load_half(tile); }
  static Floats minimum(const char* tile, int) { return load_half(tile + 32); }
};

struct KScales {  // Q4_K, Q5_K
  static constexpr int kSpan = 256, kShared = 32, kTileBytes = 320;
  static constexpr bool kMinima = true;
  static Floats scale(const char* tile, int g, int) {
    return load_half(tile) * to_floats(unsigned_bytes(tile + 64 + 16 * g));
  }
  static Floats minimum(const char* tile, int g) {
    const Floats below = to_floats(unsigned_bytes(tile + 192 + 16 * g));
    return subtract_product(zeros(), load_half(tile + 32), below);
  }
};

template <int kSharedBy>  // Q6_K, IQ4_XS
struct ByteScales {
  static constexpr int kSpan = 256, kShared = kSharedBy, kTileBytes = 32 + 16 * 256 / kSharedBy;
  static constexpr bool kMinima = false;
  static Floats scale(const char* tile, int g, int s) {
    return load_half(tile) * byte_floats(tile + 32 + 16 * (g * (kGroup / kShared) + s));
  }
  static Floats minimum(const char*, int) { return zeros(); }
};

struct Exponents {  // MXFP4
  static constexpr int kSpan = 32, kShared = 32, kTileBytes = 16;
  static constexpr bool kMinima = false;
  static Floats scale(const char* tile, int, int) {
    return as_floats(left<23>(unsigned_bytes(tile)));
  }
  static Floats minimum(const char*, int) { return zeros(); }
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
    case kQ4_0: return with(Kind<Steps4<-8>, HalfScales>{});
    case kQ4_1: return with(Kind<Steps4<0>, HalfScalesAndMinima>{});
    case kQ5_0: return with(Kind<Codes5<-16>, HalfScales>{});
    case kQ5_1: return with(Kind<Codes5<0>, HalfScalesAndMinima>{});
    case kQ4_K: return with(Kind<Steps4<0>, KScales>{});
    case kQ5_K: return with(Kind<Codes5<0>, KScales>{});
    case kQ6_K: return with(Kind<Codes6, ByteScales<16>>{});
    case kIq4Nl: return with(Kind<Codes4<Finer>, HalfScales>{});
    case kIq4Xs: return with(Kind<Codes4<Finer>, ByteScales<32>>{});
    case kMxfp4: return with(Kind<Codes4<E2m1>, Exponents>{});
    default: return other();
  }
}

}  // namespace kvkeep
