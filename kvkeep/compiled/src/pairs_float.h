// Pairs of bf16 where there are no instructions for them: two floats for each lane, the numbers that
// were rounded. Products are exact either way. What is rounded is the same bits as by AVX512-BF16,
// to which numbers below the least normal one are zero.
#pragma once

namespace kvkeep {

using Activation = float;  // how a number is held that products will read: a bf16, widened

struct Paired {
  Floats even, odd;
};

KVKEEP_INLINE Floats load(const Bf16* x) { return as_floats(left<16>(widen(x))); }

// As bf16 in the upper half of each lane, to nearest, ties to even; the lower half is 0.
KVKEEP_INLINE Ints rounded_lanes(Floats x) {
  constexpr float kLeastNormal = 1.17549435e-38f;
  const Ints bits = as_ints(x);
  Ints found = sum(bits, sum(ints(0x7fff), right<16>(bits) & ints(1)));
  found = where(greater(all_lanes(), all(kLeastNormal), absolute(x)), bits & ints(INT32_MIN), found);
  found = where(equal(x, x), found, bits | ints(0x400000));  // a NaN stays one
  return found & ints(static_cast<int>(0xffff0000));
}

KVKEEP_INLINE void store_rounded(Bf16* to, Floats x) { store_halves(to, right<16>(rounded_lanes(x))); }
KVKEEP_INLINE void store_rounded(float* to, Floats x) { store(to, as_floats(rounded_lanes(x))); }

// The same, of 32 numbers: in their order.
KVKEEP_INLINE Ints rounded_in_order(Floats first, Floats second) {
  Bf16 halves[2 * kLanes];
  store_rounded(halves, first);
  store_rounded(halves + kLanes, second);
  return load_ints(halves);
}

// Of each lane of both: one beside the other.
KVKEEP_INLINE Ints rounded_in_pairs(Floats even, Floats odd) {
  return right<16>(rounded_lanes(even)) | rounded_lanes(odd);
}

KVKEEP_INLINE Paired paired(Ints x) {
  return {as_floats(left<16>(x)), as_floats(x & ints(static_cast<int>(0xffff0000)))};
}
KVKEEP_INLINE Paired load_paired(const Bf16* x) { return paired(load_ints(x)); }
KVKEEP_INLINE Paired load_paired(const float* x) {
  Paired found;
  load_apart(x, found.even, found.odd);
  return found;
}

// The same pair in every lane.
KVKEEP_INLINE Paired spread(const float* x) { return {all(x[0]), all(x[1])}; }
KVKEEP_INLINE Paired spread(const Bf16* x) {
  std::int32_t two;
  std::memcpy(&two, x, sizeof two);
  return paired(ints(two));
}

KVKEEP_INLINE Floats evens(Paired x) { return x.even; }
KVKEEP_INLINE Floats odds(Paired x) { return x.odd; }

// Adds to each lane of `sum` the products of two pairs, in the order of AVX512-BF16.
KVKEEP_INLINE Floats dot(Floats sum, Paired a, Paired b) {
  return multiply_add(a.even, b.even, multiply_add(a.odd, b.odd, sum));
}

// Integers of 8 bits, two for each lane, in their order.
KVKEEP_INLINE Paired load_bytes_paired(const std::int8_t* x) {
  const Ints both = widen(reinterpret_cast<const std::uint16_t*>(x));
  return {to_floats(right_signed<24>(left<24>(both))), to_floats(right_signed<24>(left<16>(both)))};
}

// What stands for the lowest bits of each half of a lane, the other bits being whatever they are.
template <typename Lanes>
KVKEEP_INLINE Paired of_halves(Ints codes, Lanes lanes) {
  return {lanes(codes), lanes(right<16>(codes))};
}

// Codes of four bits that stand for any numbers that are bf16.
struct Sixteen {
  alignas(64) float values[16];

  constexpr explicit Sixteen(const float (&from)[16]) : values() {
    for (int i = 0; i < 16; ++i) values[i] = from[i];
  }
  KVKEEP_INLINE Paired operator()(Ints codes) const {
    return of_halves(codes, [&](Ints which) { return looked_up(which, values); });
  }
};

// Codes of kBits that stand for kFirst and the integers after it.
template <int kFirst, int kBits>
struct Steps {
  KVKEEP_INLINE Paired operator()(Ints codes) const {
    return of_halves(codes, [](Ints lanes) {
      const Ints code = lanes & ints((1 << kBits) - 1);
      return to_floats(kFirst ? sum(code, ints(kFirst)) : code);
    });
  }
};

}  // namespace kvkeep
