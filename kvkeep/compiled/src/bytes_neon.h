// The integer products of integers.h on NEON, with or without DotProd; see bytes_avx2.h.
#pragma once

namespace kvkeep {

constexpr int kMaxByteCode = 127;  // the instructions take codes as signed bytes

KVKEEP_INLINE int8x16_t as_signed_bytes(uint32x4_t x) { return vreinterpretq_s8_u32(x); }

#if defined(__ARM_FEATURE_DOTPROD)
// Added four at a time, in 32 bits.
using ByteSums = Ints;
constexpr int kMaxByteSum = INT32_MAX, kProductsPerByteSum = 4;

KVKEEP_INLINE ByteSums zero_byte_sums() { return splat_int(0); }
KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  return map_registers<Ints>(
      [](auto sum, auto codes, auto bytes) {
        return as_unsigned(
            vdotq_s32(as_signed(sum), as_signed_bytes(codes), as_signed_bytes(bytes)));
      },
      sums, codes, bytes);
}
template <int kFactor>
KVKEEP_INLINE Ints widen_byte_sums(ByteSums x) {
  return shift_left<__builtin_ctz(kFactor)>(x);
}
#else
// Four 16-bit sums for each lane.
struct ByteSums {
  int16x8_t low[4], high[4];
};
constexpr int kMaxByteSum = 32767, kProductsPerByteSum = 1;

KVKEEP_INLINE ByteSums zero_byte_sums() {
  const int16x8_t zero = vdupq_n_s16(0);
  return {{zero, zero, zero, zero}, {zero, zero, zero, zero}};
}
KVKEEP_INLINE ByteSums add_byte_products(ByteSums sums, Ints codes, Ints bytes) {
  for (int i = 0; i < 4; ++i) {
    const int8x16_t a = as_signed_bytes(codes.of[i]), b = as_signed_bytes(bytes.of[i]);
    sums.low[i] = vmlal_s8(sums.low[i], vget_low_s8(a), vget_low_s8(b));
    sums.high[i] = vmlal_high_s8(sums.high[i], a, b);
  }
  return sums;
}
template <int kFactor>
KVKEEP_INLINE Ints widen_byte_sums(ByteSums x) {
  const auto quarter = [&](int i) {
    const int32x4_t sum = vpaddq_s32(vpaddlq_s16(x.low[i]), vpaddlq_s16(x.high[i]));
    return as_unsigned(vshlq_n_s32(sum, __builtin_ctz(kFactor)));
  };
  return {{quarter(0), quarter(1), quarter(2), quarter(3)}};
}
#endif

KVKEEP_INLINE void require_now(ByteSums&) {}

KVKEEP_INLINE Ints add_int16_products(Ints sums, Ints a, Ints b) {
  return map_registers<Ints>(
      [](auto sum, auto a, auto b) {
        const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
        return as_unsigned(vaddq_s32(as_signed(sum), vpaddq_s32(low, vmull_high_s16(x, y))));
      },
      sums, a, b);
}
KVKEEP_INLINE Ints load_int8_as_int16(const std::int8_t* x) {
  const auto eight = [=](int i) { return vreinterpretq_u32_s16(vmovl_s8(vld1_s8(x + 8 * i))); };
  return {{eight(0), eight(1), eight(2), eight(3)}};
}

KVKEEP_INLINE Ints shuffle_bytes(Ints x, const std::uint8_t* order) {
  const uint8x16_t places = vld1q_u8(order);
  return map_registers<Ints>(
      [=](auto x) { return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(x), places)); }, x);
}

KVKEEP_INLINE Ints lookup_bytes(Ints which, const std::uint8_t* table) {
  const uint8x16_t values = vld1q_u8(table);
  return map_registers<Ints>(
      [=](auto which) {
        return vreinterpretq_u32_u8(vqtbl1q_u8(values, vreinterpretq_u8_u32(which)));
      },
      which);
}

KVKEEP_INLINE Ints multiply_halves(Ints a, Ints b) {
  return map_registers<Ints>(
      [](auto x, auto y) { return as_lanes(vmulq_u16(as_halves(x), as_halves(y))); }, a, b);
}
KVKEEP_INLINE Ints multiply_halves_high(Ints a, Ints b) {
  return map_registers<Ints>(
      [](auto x, auto y) {
        return vreinterpretq_u32_s16(
            vqrdmulhq_s16(vreinterpretq_s16_u32(x), vreinterpretq_s16_u32(y)));
      },
      a, b);
}

}  // namespace kvkeep
