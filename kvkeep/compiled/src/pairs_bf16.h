// Pairs of bf16 where there are instructions for them: AVX512-BF16. Products take bf16 as it lies
// in memory, and so the rows that matrices are multiplied with stay bf16.
#pragma once

namespace kvkeep {

using Activation = Bf16;  // how a number is held that products will read
using Paired = Ints;

KVKEEP_INLINE Floats as_upper_halves(Ints x) { return as_floats(left<16>(x)); }

KVKEEP_INLINE Floats load(const Bf16* x) { return as_upper_halves(widen(x)); }

// Rounds to nearest, ties to even.
KVKEEP_INLINE void store_rounded(Bf16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// The same, of 32 numbers: in their order.
KVKEEP_INLINE Ints rounded_in_order(Floats first, Floats second) {
  return reinterpret_cast<Ints>(_mm512_cvtne2ps_pbh(second, first));
}

// Of each lane of both: one beside the other.
KVKEEP_INLINE Ints rounded_in_pairs(Floats even, Floats odd) {
  // What is rounded has all even ones in front.
  alignas(64) static constexpr std::uint16_t kTogether[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(load_ints(kTogether), rounded_in_order(even, odd));
}

KVKEEP_INLINE Paired paired(Ints x) { return x; }
KVKEEP_INLINE Paired load_paired(const Bf16* x) { return load_ints(x); }

// The same pair in every lane.
KVKEEP_INLINE Paired spread(const Bf16* x) {
  std::int32_t two;
  std::memcpy(&two, x, sizeof two);
  return ints(two);
}

KVKEEP_INLINE Floats evens(Paired x) { return as_upper_halves(x); }
KVKEEP_INLINE Floats odds(Paired x) { return as_floats(x & ints(static_cast<int>(0xffff0000))); }

// Adds to each lane of `sum` the products of two pairs.
KVKEEP_INLINE Floats dot(Floats sum, Paired a, Paired b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Integers of 8 bits, two for each lane, in their order.
KVKEEP_INLINE Paired load_bytes_paired(const std::int8_t* x) {
  return rounded_in_order(to_floats(widen(x)), to_floats(widen(x + kLanes)));
}

// Numbers that are bf16, looked up by the lowest bits of each half of a lane. What the other bits
// are does not matter: a lookup takes five or six, and shorter tables stand there more than once.
template <int kSize>
struct Table {
  alignas(64) Bf16 values[kSize];

  template <typename Value>
  constexpr explicit Table(Value value) : values() {
    for (int i = 0; i < kSize; ++i)
      values[i] = static_cast<Bf16>(__builtin_bit_cast(std::uint32_t, float(value(i))) >> 16);
  }

  KVKEEP_INLINE Paired operator()(Ints which) const {
    if constexpr (kSize == 32)
      return _mm512_permutexvar_epi16(which, load_ints(values));
    else
      return _mm512_permutex2var_epi16(load_ints(values), which, load_ints(values + 32));
  }
};

constexpr bool kInPlace = false;  // codes are looked up, wherever they lie
constexpr int place_of(int) { return 0; }
inline void scale_down(Bf16*, const Bf16*, int) {}

// Codes of kBits that stand for kFirst and the integers after it.
template <int kFirst, int kBits>
struct Steps : Table<kBits <= 5 ? 32 : 64> {
  constexpr Steps()
      : Table<kBits <= 5 ? 32 : 64>([](int i) { return kFirst + i % (1 << kBits); }) {}
};

// Codes of four bits that stand for any numbers.
struct Sixteen : Table<32> {
  constexpr explicit Sixteen(const float (&from)[16])
      : Table<32>([&](int i) { return from[i % 16]; }) {}
};

}  // namespace kvkeep
