// Pairs of bf16 on sets without instructions for them: two floats for each lane, already rounded to
// bf16. Products are exact either way. Rounding gives the same bits as AVX512-BF16, which takes
// subnormal numbers as zero.
#pragma once

namespace kvkeep {

using Activation = float;  // the storage type of a product's input: a bf16, widened

struct Bf16Pairs {
  Floats even, odd;
};

KVKEEP_INLINE Floats load(const Bf16* x) { return as_floats(shift_left<16>(widen(x))); }

// Round to bf16 in the upper half of each lane, to nearest, ties to even; the lower half is 0.
KVKEEP_INLINE Ints round_lanes(Floats x) {
  constexpr float kLeastNormal = 1.17549435e-38f;
  const Ints bits = as_ints(x);
  Ints result = add(bits, add(splat_int(0x7fff), shift_right<16>(bits) & splat_int(1)));
  result = select(greater(all_lanes(), splat(kLeastNormal), absolute(x)),
                  bits & splat_int(INT32_MIN), result);
  result = select(equal(x, x), result, bits | splat_int(0x400000));  // a NaN stays a NaN
  return result & splat_int(static_cast<int>(0xffff0000));
}

KVKEEP_INLINE void store_rounded(Bf16* to, Floats x) {
  store_halves(to, shift_right<16>(round_lanes(x)));
}
KVKEEP_INLINE void store_rounded(float* to, Floats x) { store(to, as_floats(round_lanes(x))); }

// Round 32 floats to bf16, in order.
KVKEEP_INLINE Ints round_in_order(Floats first, Floats second) {
  Bf16 halves[2 * kLanes];
  store_rounded(halves, first);
  store_rounded(halves + kLanes, second);
  return load_ints(halves);
}

// Round both to bf16: lane i holds even[i] in its lower half and odd[i] in its upper one.
KVKEEP_INLINE Ints round_interleaved(Floats even, Floats odd) {
  return shift_right<16>(round_lanes(even)) | round_lanes(odd);
}

KVKEEP_INLINE Bf16Pairs as_pairs(Ints x) {
  return {as_floats(shift_left<16>(x)), as_floats(x & splat_int(static_cast<int>(0xffff0000)))};
}
KVKEEP_INLINE Bf16Pairs load_pairs(const Bf16* x) { return as_pairs(load_ints(x)); }
KVKEEP_INLINE Bf16Pairs load_pairs(const float* x) {
  Bf16Pairs result;
  load_deinterleaved(x, result.even, result.odd);
  return result;
}

// Load one pair into every lane.
KVKEEP_INLINE Bf16Pairs splat_pair(const float* x) { return {splat(x[0]), splat(x[1])}; }
KVKEEP_INLINE Bf16Pairs splat_pair(const Bf16* x) {
  std::int32_t two;
  std::memcpy(&two, x, sizeof two);
  return as_pairs(splat_int(two));
}

KVKEEP_INLINE Floats evens(Bf16Pairs x) { return x.even; }
KVKEEP_INLINE Floats odds(Bf16Pairs x) { return x.odd; }

// Add to each lane of `sum` the two products of a pair, in the order of AVX512-BF16.
KVKEEP_INLINE Floats dot(Floats sum, Bf16Pairs a, Bf16Pairs b) {
  return multiply_add(a.even, b.even, multiply_add(a.odd, b.odd, sum));
}

// Load 32 signed bytes as pairs, in order.
KVKEEP_INLINE Bf16Pairs load_int8_pairs(const std::int8_t* x) {
  const Ints bytes = widen(reinterpret_cast<const std::uint16_t*>(x));
  return {to_floats(shift_right_signed<24>(shift_left<24>(bytes))),
          to_floats(shift_right_signed<24>(shift_left<16>(bytes)))};
}

// Decode the lowest bits of each 16-bit half with `lanes`; the other bits may have any value.
template <typename Lanes>
KVKEEP_INLINE Bf16Pairs map_halves(Ints codes, Lanes lanes) {
  return {lanes(codes), lanes(shift_right<16>(codes))};
}

// Codes of four bits that stand for any 16 bf16 numbers.
struct Codebook16 {
  alignas(64) float values[16];

  constexpr explicit Codebook16(const float (&from)[16]) : values() {
    for (int i = 0; i < 16; ++i) values[i] = from[i];
  }
  KVKEEP_INLINE Bf16Pairs operator()(Ints codes) const {
    return map_halves(codes, [&](Ints which) { return lookup(which, values); });
  }
};

// Codes of kBits bits that stand for kLowest and the integers after it.
template <int kLowest, int kBits>
struct LinearCodebook {
  KVKEEP_INLINE Bf16Pairs operator()(Ints codes) const {
    return map_halves(codes, [](Ints lanes) {
      const Ints code = lanes & splat_int((1 << kBits) - 1);
      return to_floats(kLowest ? add(code, splat_int(kLowest)) : code);
    });
  }
};

}  // namespace kvkeep
