// Pairs of bf16 on sets with instructions for them (bf16_avx512.h, bf16_neon.h). Products take bf16
// in memory order, so the rows that matrices are multiplied with stay bf16.
#pragma once

namespace kvkeep {

using Activation = Bf16;  // the storage type of a product's input
using Bf16Pairs = Ints;

KVKEEP_INLINE Floats as_upper_halves(Ints x) { return as_floats(shift_left<16>(x)); }

KVKEEP_INLINE Floats load(const Bf16* x) { return as_upper_halves(widen(x)); }

KVKEEP_INLINE Bf16Pairs as_pairs(Ints x) { return x; }
KVKEEP_INLINE Bf16Pairs load_pairs(const Bf16* x) { return load_ints(x); }

// Load one pair into every lane.
KVKEEP_INLINE Bf16Pairs splat_pair(const Bf16* x) {
  std::int32_t two;
  std::memcpy(&two, x, sizeof two);
  return splat_int(two);
}

KVKEEP_INLINE Floats evens(Bf16Pairs x) { return as_upper_halves(x); }
KVKEEP_INLINE Floats odds(Bf16Pairs x) {
  return as_floats(x & splat_int(static_cast<int>(0xffff0000)));
}

// Add to each lane of `sum` the two products of a pair.
KVKEEP_INLINE Floats dot(Floats sum, Bf16Pairs a, Bf16Pairs b) { return add_products(sum, a, b); }

// Load 32 signed bytes as pairs of bf16, in order.
KVKEEP_INLINE Bf16Pairs load_int8_pairs(const std::int8_t* x) {
  return round_in_order(to_floats(widen(x)), to_floats(widen(x + kLanes)));
}

// A table of bf16, looked up by the lowest bits of each 16-bit half. The other bits do not matter:
// a lookup takes five or six bits, and shorter tables are repeated.
template <int kSize>
struct Table {
  alignas(64) Bf16 values[kSize];

  template <typename Value>
  constexpr explicit Table(Value value) : values() {
    for (int i = 0; i < kSize; ++i)
      values[i] = static_cast<Bf16>(__builtin_bit_cast(std::uint32_t, float(value(i))) >> 16);
  }

  KVKEEP_INLINE Bf16Pairs operator()(Ints which) const {
    return lookup_halves<kSize>(which, values);
  }
};

// Codes of kBits bits that stand for kLowest and the integers after it.
template <int kLowest, int kBits>
struct LinearCodebook : Table<kBits <= 5 ? 32 : 64> {
  constexpr LinearCodebook()
      : Table<kBits <= 5 ? 32 : 64>([](int i) { return kLowest + i % (1 << kBits); }) {}
};

// Codes of four bits that stand for any 16 numbers.
struct Codebook16 : Table<32> {
  constexpr explicit Codebook16(const float (&from)[16])
      : Table<32>([&](int i) { return from[i % 16]; }) {}
};

}  // namespace kvkeep
