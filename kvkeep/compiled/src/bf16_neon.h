// The bf16 instructions of Arm's FEAT_BF16, for pairs_bf16.h.
#pragma once

namespace kvkeep {

KVKEEP_INLINE bfloat16x8_t as_bf16(uint32x4_t x) { return vreinterpretq_bf16_u32(x); }

// Round eight floats to bf16, to nearest, ties to even. The instruction keeps subnormal numbers;
// here they become zero, as on all sets.
KVKEEP_INLINE uint16x8_t round_eight(float32x4_t low, float32x4_t high) {
  const auto normal = [](float32x4_t x) {
    const uint32x4_t tiny = vcaltq_f32(x, vdupq_n_f32(1.17549435e-38f));
    const uint32x4_t size = vandq_u32(tiny, vdupq_n_u32(0x7fffffff));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), size));
  };
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(normal(low)), normal(high)));
}

KVKEEP_INLINE void store_rounded(Bf16* to, Floats x) {
  vst1q_u16(to, round_eight(x.of[0], x.of[1]));
  vst1q_u16(to + 8, round_eight(x.of[2], x.of[3]));
}

// Round 32 floats to bf16, in order.
KVKEEP_INLINE Ints round_in_order(Floats first, Floats second) {
  return {{as_lanes(round_eight(first.of[0], first.of[1])),
           as_lanes(round_eight(first.of[2], first.of[3])),
           as_lanes(round_eight(second.of[0], second.of[1])),
           as_lanes(round_eight(second.of[2], second.of[3]))}};
}

// Round both to bf16: lane i holds even[i] in its lower half and odd[i] in its upper one.
KVKEEP_INLINE Ints round_interleaved(Floats even, Floats odd) {
  const uint16x8_t low = round_eight(even.of[0], even.of[1]);
  const uint16x8_t low_odd = round_eight(odd.of[0], odd.of[1]);
  const uint16x8_t high = round_eight(even.of[2], even.of[3]);
  const uint16x8_t high_odd = round_eight(odd.of[2], odd.of[3]);
  return {{as_lanes(vzip1q_u16(low, low_odd)), as_lanes(vzip2q_u16(low, low_odd)),
           as_lanes(vzip1q_u16(high, high_odd)), as_lanes(vzip2q_u16(high, high_odd))}};
}

// Add to each lane of `sum` the two products of a pair of bf16. BFDOT adds the two products, then
// their sum to the lane, and rounds both times to odd, not to nearest: docs/processors.md gives the
// resulting error.
KVKEEP_INLINE Floats add_products(Floats sum, Ints a, Ints b) {
  return map_registers<Floats>(
      [](auto sum, auto a, auto b) { return vbfdotq_f32(sum, as_bf16(a), as_bf16(b)); }, sum, a, b);
}

// Look up the lowest bits of each 16-bit half in a table of 32 or 64.
template <int kSize>
KVKEEP_INLINE Ints lookup_halves(Ints which, const Bf16* table) {
  // Byte indices: a half of 3 selects bytes 6 and 7. Indices outside a part of the table give 0.
  const uint16x8_t bits = vdupq_n_u16(kSize - 1), byte_step = vdupq_n_u16(0x0202);
  const uint16x8_t upper = vdupq_n_u16(0x0100);
  const uint8x16x4_t low = load_table(table), high = load_table(table + kSize - 32);
  return map_registers<Ints>(
      [&](auto which) {
        const uint8x16_t bytes =
            vreinterpretq_u8_u16(vmlaq_u16(upper, vandq_u16(as_halves(which), bits), byte_step));
        uint8x16_t values = vqtbl4q_u8(low, bytes);
        if constexpr (kSize == 64)
          values = vorrq_u8(values, vqtbl4q_u8(high, vsubq_u8(bytes, vdupq_n_u8(64))));
        return vreinterpretq_u32_u8(values);
      },
      which);
}

}  // namespace kvkeep
