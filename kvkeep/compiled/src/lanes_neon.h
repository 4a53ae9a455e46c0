// Lanes on NEON, which every 64-bit Arm processor has: four registers of four lanes.
#pragma once

#include <arm_neon.h>

namespace kvkeep {

struct Floats {
  float32x4_t of[4];
};
struct Ints {
  uint32x4_t of[4];
};
struct Mask {  // all bits of a lane, or none
  uint32x4_t of[4];
};

constexpr int kAccumulators = 6;  // Floats that fit in registers as accumulators
constexpr int kRowTile = 2;       // input rows multiplied at a time with a block of packed weights
constexpr int kIntegerRowTile = 1;  // the same, for rows as integers
constexpr int kPromptTile = 4;      // the same, for rows of prompts

KVKEEP_INLINE void prefetch(const void* x) { __builtin_prefetch(x); }
KVKEEP_INLINE bool prefetches_to_second_cache() { return false; }
KVKEEP_INLINE void prefetch_to_second_cache(const void* x) { __builtin_prefetch(x, 0, 2); }

// `yield` returns at once on most processors; `isb` takes about as long as x86's `pause`.
KVKEEP_INLINE void spin_pause() { __asm__ volatile("isb" ::: "memory"); }

// Makes results of this thread zero that are too small for normal floats, and such operands, too,
// while it exists.
class SubnormalsFlushed {
 public:
  SubnormalsFlushed() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    set(before_ | 1 << 24);
  }
  ~SubnormalsFlushed() { set(before_); }
  SubnormalsFlushed(const SubnormalsFlushed&) = delete;
  SubnormalsFlushed& operator=(const SubnormalsFlushed&) = delete;

 private:
  static void set(std::uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" ::"r"(fpcr) : "memory"); }

  std::uint64_t before_;
};

// Apply a function to each of the four registers.
template <typename To, typename With, typename... Of>
KVKEEP_INLINE To map_registers(With with, Of... x) {
  return {{with(x.of[0]...), with(x.of[1]...), with(x.of[2]...), with(x.of[3]...)}};
}

KVKEEP_INLINE int32x4_t as_signed(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
KVKEEP_INLINE uint32x4_t as_unsigned(int32x4_t x) { return vreinterpretq_u32_s32(x); }
KVKEEP_INLINE uint16x8_t as_halves(uint32x4_t x) { return vreinterpretq_u16_u32(x); }
KVKEEP_INLINE uint32x4_t as_lanes(uint16x8_t x) { return vreinterpretq_u32_u16(x); }

KVKEEP_INLINE Floats operator+(Floats a, Floats b) {
  return map_registers<Floats>([](auto a, auto b) { return vaddq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Floats operator-(Floats a, Floats b) {
  return map_registers<Floats>([](auto a, auto b) { return vsubq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Floats operator*(Floats a, Floats b) {
  return map_registers<Floats>([](auto a, auto b) { return vmulq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Floats operator/(Floats a, Floats b) {
  return map_registers<Floats>([](auto a, auto b) { return vdivq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Ints operator&(Ints a, Ints b) {
  return map_registers<Ints>([](auto a, auto b) { return vandq_u32(a, b); }, a, b);
}
KVKEEP_INLINE Ints operator|(Ints a, Ints b) {
  return map_registers<Ints>([](auto a, auto b) { return vorrq_u32(a, b); }, a, b);
}

KVKEEP_INLINE Floats splat(float x) {
  const float32x4_t four = vdupq_n_f32(x);
  return {{four, four, four, four}};
}
KVKEEP_INLINE Floats zeros() { return splat(0.f); }
KVKEEP_INLINE Floats load(const float* x) {
  return {{vld1q_f32(x), vld1q_f32(x + 4), vld1q_f32(x + 8), vld1q_f32(x + 12)}};
}
KVKEEP_INLINE void store(float* to, Floats x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, x.of[i]);
}

KVKEEP_INLINE Ints splat_int(std::int32_t x) {
  const uint32x4_t four = vdupq_n_u32(static_cast<std::uint32_t>(x));
  return {{four, four, four, four}};
}
KVKEEP_INLINE Ints load_ints(const void* x) {
  const auto* from = static_cast<const std::uint8_t*>(x);  // at any address
  const auto four = [=](int i) { return vreinterpretq_u32_u8(vld1q_u8(from + 16 * i)); };
  return {{four(0), four(1), four(2), four(3)}};
}
KVKEEP_INLINE void store_ints(void* to, Ints x) {
  for (int i = 0; i < 4; ++i)
    vst1q_u8(static_cast<std::uint8_t*>(to) + 16 * i, vreinterpretq_u8_u32(x.of[i]));
}
KVKEEP_INLINE Ints lane_indices() {
  alignas(64) static constexpr std::int32_t kCodebook[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                                 8, 9, 10, 11, 12, 13, 14, 15};
  return load_ints(kCodebook);
}
KVKEEP_INLINE Mask lanes_below(int lane) {
  const int32x4_t end = vdupq_n_s32(lane);
  return map_registers<Mask>([=](auto number) { return vcgtq_s32(end, as_signed(number)); },
                             lane_indices());
}
KVKEEP_INLINE int clamp_lane_count(int count) {
  return count < 0 ? 0 : count < kLanes ? count : kLanes;
}

KVKEEP_INLINE bool any_lane(Mask mask) {
  const uint32x4_t low = vorrq_u32(mask.of[0], mask.of[1]);
  return vmaxvq_u32(vorrq_u32(low, vorrq_u32(mask.of[2], mask.of[3]))) != 0;
}
KVKEEP_INLINE bool every_lane(Mask mask) {
  const uint32x4_t low = vandq_u32(mask.of[0], mask.of[1]);
  return vminvq_u32(vandq_u32(low, vandq_u32(mask.of[2], mask.of[3]))) != 0;
}

// Lanes outside the mask are not read and become 0.
KVKEEP_INLINE Floats masked_load(Mask mask, const float* x) {
  if (every_lane(mask)) return load(x);
  std::uint32_t selected[kLanes];
  store_ints(selected, Ints{{mask.of[0], mask.of[1], mask.of[2], mask.of[3]}});
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = selected[i] ? x[i] : 0.f;
  return load(lanes);
}
KVKEEP_INLINE void store_first(float* to, int count, Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  std::memcpy(to, lanes, clamp_lane_count(count) * sizeof(float));
}
// Lanes from `count` on are not read and become 0.
KVKEEP_INLINE Ints load_first_ints(const void* x, int count) {
  std::int32_t lanes[kLanes] = {};
  std::memcpy(lanes, x, clamp_lane_count(count) * sizeof(std::int32_t));
  return load_ints(lanes);
}

KVKEEP_INLINE Floats load_fp16(const void* x) {
  const auto* from = static_cast<const std::uint8_t*>(x);
  const auto four = [=](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i))); };
  return {{four(0), four(1), four(2), four(3)}};
}

KVKEEP_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return map_registers<Floats>([](auto a, auto b, auto c) { return vfmaq_f32(c, a, b); }, a, b, c);
}
KVKEEP_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
  return map_registers<Floats>([](auto a, auto b, auto c) { return vfmaq_f32(vnegq_f32(c), a, b); },
                               a, b, c);
}
KVKEEP_INLINE Floats subtract_product(Floats c, Floats a, Floats b) {
  return map_registers<Floats>([](auto c, auto a, auto b) { return vfmsq_f32(c, a, b); }, c, a, b);
}
// Of a number and a NaN, both return the NaN.
KVKEEP_INLINE Floats max(Floats a, Floats b) {
  return map_registers<Floats>([](auto a, auto b) { return vmaxq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Floats min(Floats a, Floats b) {
  return map_registers<Floats>([](auto a, auto b) { return vminq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Floats absolute(Floats x) {
  return map_registers<Floats>([](auto x) { return vabsq_f32(x); }, x);
}

// Reduce all lanes by halves.
template <typename Of>
KVKEEP_INLINE float reduce_lanes(Floats x, Of of) {
  const float32x4_t four = of(of(x.of[0], x.of[2]), of(x.of[1], x.of[3]));
  const float32x4_t two = of(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(of(two, vextq_f32(two, two, 1)), 0);
}
KVKEEP_INLINE float reduce_add(Floats x) {
  return reduce_lanes(x, [](auto a, auto b) { return vaddq_f32(a, b); });
}
KVKEEP_INLINE float reduce_max(Floats x) {
  return reduce_lanes(x, [](auto a, auto b) { return vmaxq_f32(a, b); });
}
KVKEEP_INLINE float reduce_min(Floats x) {
  return reduce_lanes(x, [](auto a, auto b) { return vminq_f32(a, b); });
}
KVKEEP_INLINE float first_lane(Floats x) { return vgetq_lane_f32(x.of[0], 0); }

KVKEEP_INLINE Mask all_lanes() {
  const uint32x4_t four = vdupq_n_u32(0xffffffff);
  return {{four, four, four, four}};
}
KVKEEP_INLINE Mask mask_and(Mask a, Mask b) {
  return map_registers<Mask>([](auto a, auto b) { return vandq_u32(a, b); }, a, b);
}
KVKEEP_INLINE Mask mask_and_not(Mask a, Mask b) {
  return map_registers<Mask>([](auto a, auto b) { return vbicq_u32(a, b); }, a, b);
}
KVKEEP_INLINE Mask greater(Mask among, Floats a, Floats b) {
  return mask_and(among, map_registers<Mask>([](auto a, auto b) { return vcgtq_f32(a, b); }, a, b));
}
KVKEEP_INLINE Mask equal(Floats a, Floats b) {
  return map_registers<Mask>([](auto a, auto b) { return vceqq_f32(a, b); }, a, b);
}
KVKEEP_INLINE Floats select(Mask mask, Floats x, Floats other) {
  return map_registers<Floats>(
      [](auto mask, auto x, auto other) { return vbslq_f32(mask, x, other); }, mask, x, other);
}
KVKEEP_INLINE Floats select(Mask mask, Floats x) { return select(mask, x, zeros()); }
KVKEEP_INLINE Ints select(Mask mask, Ints x, Ints other) {
  return map_registers<Ints>(
      [](auto mask, auto x, auto other) { return vbslq_u32(mask, x, other); }, mask, x, other);
}
KVKEEP_INLINE Floats masked_max(Mask mask, Floats a, Floats b) {
  return select(mask, max(a, b), a);
}

KVKEEP_INLINE Ints add(Ints a, Ints b) {
  return map_registers<Ints>([](auto a, auto b) { return vaddq_u32(a, b); }, a, b);
}
KVKEEP_INLINE Ints subtract(Ints a, Ints b) {
  return map_registers<Ints>([](auto a, auto b) { return vsubq_u32(a, b); }, a, b);
}
KVKEEP_INLINE Ints max(Ints a, Ints b) {
  return map_registers<Ints>(
      [](auto a, auto b) { return as_unsigned(vmaxq_s32(as_signed(a), as_signed(b))); }, a, b);
}
KVKEEP_INLINE Ints min(Ints a, Ints b) {
  return map_registers<Ints>(
      [](auto a, auto b) { return as_unsigned(vminq_s32(as_signed(a), as_signed(b))); }, a, b);
}
KVKEEP_INLINE int masked_reduce_min(Mask mask, Ints x) {
  const Ints in = select(mask, x, splat_int(INT32_MAX));
  const auto least = [](auto a, auto b) { return vminq_s32(as_signed(a), as_signed(b)); };
  return vminvq_s32(vminq_s32(least(in.of[0], in.of[1]), least(in.of[2], in.of[3])));
}

// Whether any of the first `count` lanes is NaN or infinity.
KVKEEP_INLINE bool not_finite(Floats x, int count) {
  const float32x4_t largest = vdupq_n_f32(3.40282347e38f);
  const Mask finite =
      map_registers<Mask>([=](auto x) { return vcleq_f32(vabsq_f32(x), largest); }, x);
  return any_lane(mask_and_not(lanes_below(count), finite));
}

template <int kBits>
KVKEEP_INLINE Ints shift_left(Ints x) {
  return map_registers<Ints>([](auto x) { return vshlq_n_u32(x, kBits); }, x);
}
template <int kBits>
KVKEEP_INLINE Ints shift_right(Ints x) {
  return map_registers<Ints>([](auto x) { return vshrq_n_u32(x, kBits); }, x);
}
template <int kBits>  // signed
KVKEEP_INLINE Ints shift_right_signed(Ints x) {
  return map_registers<Ints>([](auto x) { return as_unsigned(vshrq_n_s32(as_signed(x), kBits)); },
                             x);
}

// Shift the two 16-bit halves of each lane separately; a negative kBits shifts left.
template <int kBits>
KVKEEP_INLINE Ints shift_halves_right(Ints x) {
  if constexpr (kBits > 0)
    return map_registers<Ints>([](auto x) { return as_lanes(vshrq_n_u16(as_halves(x), kBits)); },
                               x);
  if constexpr (kBits < 0)
    return map_registers<Ints>([](auto x) { return as_lanes(vshlq_n_u16(as_halves(x), -kBits)); },
                               x);
  return x;
}

// Add a number to each 16-bit half.
KVKEEP_INLINE Ints add_halves(Ints x, int number) {
  const uint16x8_t each = vdupq_n_u16(static_cast<std::uint16_t>(number));
  return map_registers<Ints>(
      [=](auto x) { return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(x), each)); }, x);
}

// The lowest four bits of each 16-bit half from `low`, the other bits from `others`.
KVKEEP_INLINE Ints merge_nibbles(Ints low, Ints others) {
  const uint32x4_t four = vdupq_n_u32(0x000f000fu);
  return map_registers<Ints>([=](auto low, auto others) { return vbslq_u32(four, low, others); },
                             low, others);
}

KVKEEP_INLINE Floats to_floats(Ints x) {
  return map_registers<Floats>([](auto x) { return vcvtq_f32_s32(as_signed(x)); }, x);
}
KVKEEP_INLINE Ints to_ints(Floats x) {  // to nearest, ties to even
  return map_registers<Ints>([](auto x) { return as_unsigned(vcvtnq_s32_f32(x)); }, x);
}
KVKEEP_INLINE Floats as_floats(Ints x) {
  return map_registers<Floats>([](auto x) { return vreinterpretq_f32_u32(x); }, x);
}
KVKEEP_INLINE Ints as_ints(Floats x) {
  return map_registers<Ints>([](auto x) { return vreinterpretq_u32_f32(x); }, x);
}

// Load 16 integers and extend each to a lane.
KVKEEP_INLINE Ints widen(const std::int8_t* x) {
  const int8x16_t bytes = vld1q_s8(x);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {{as_unsigned(vmovl_s16(vget_low_s16(low))), as_unsigned(vmovl_high_s16(low)),
           as_unsigned(vmovl_s16(vget_low_s16(high))), as_unsigned(vmovl_high_s16(high))}};
}
KVKEEP_INLINE Ints widen_halves(uint16x8_t low, uint16x8_t high) {
  return {{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)),
           vmovl_high_u16(high)}};
}
KVKEEP_INLINE Ints widen(const std::uint8_t* x) {
  const uint8x16_t bytes = vld1q_u8(x);
  return widen_halves(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
}
KVKEEP_INLINE Ints widen(const std::uint16_t* x) {
  const auto* from = reinterpret_cast<const std::uint8_t*>(x);  // at any address
  return widen_halves(vreinterpretq_u16_u8(vld1q_u8(from)),
                      vreinterpretq_u16_u8(vld1q_u8(from + 16)));
}
// The lower 16-bit halves of two registers, in order.
KVKEEP_INLINE uint16x8_t lower_halves(uint32x4_t low, uint32x4_t high) {
  return vmovn_high_u32(vmovn_u32(low), high);
}
// Store the lowest byte, or 16-bit half, of each lane.
KVKEEP_INLINE void store_bytes(std::uint8_t* to, Ints x) {
  const uint8x8_t low = vmovn_u16(lower_halves(x.of[0], x.of[1]));
  vst1q_u8(to, vmovn_high_u16(low, lower_halves(x.of[2], x.of[3])));
}
KVKEEP_INLINE void store_halves(std::uint16_t* to, Ints x) {
  vst1q_u16(to, lower_halves(x.of[0], x.of[1]));
  vst1q_u16(to + 8, lower_halves(x.of[2], x.of[3]));
}

KVKEEP_INLINE uint8x16x4_t load_table(const void* x) {
  const auto* from = static_cast<const std::uint8_t*>(x);
  return {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
}

// Look up each lane's lowest four bits in a table of 16 floats.
KVKEEP_INLINE Floats lookup(Ints which, const float* table) {
  const uint8x16x4_t values = load_table(table);
  const uint32x4_t four = vdupq_n_u32(15), times = vdupq_n_u32(0x04040404);
  const uint32x4_t first = vdupq_n_u32(0x03020100);  // byte indices of the table's first float
  return map_registers<Floats>(
      [&](auto which) {
        const uint32x4_t bytes = vmlaq_u32(first, vandq_u32(which, four), times);
        return vreinterpretq_f32_u8(vqtbl4q_u8(values, vreinterpretq_u8_u32(bytes)));
      },
      which);
}

KVKEEP_INLINE Floats floor(Floats x) {
  return map_registers<Floats>([](auto x) { return vrndmq_f32(x); }, x);
}

// Sums and differences of lanes whose indices differ in the bit `kBit`.
template <int kBit>
KVKEEP_INLINE Floats butterfly(Floats x) {
  if constexpr (kBit >= 4) {
    Floats result;
    for (int i = 0; i < 4; ++i) {
      const float32x4_t other = x.of[i ^ kBit / 4];
      result.of[i] = i & kBit / 4 ? vsubq_f32(other, x.of[i]) : vaddq_f32(x.of[i], other);
    }
    return result;
  } else {
    constexpr float kSecond = kBit == 1 ? -1.f : 1.f;
    const float32x4_t sign = {1.f, kSecond, -kSecond, -1.f};
    return map_registers<Floats>(
        [=](auto x) {
          const float32x4_t other = kBit == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
          return vfmaq_f32(other, x, sign);  // a product with 1 or -1 is exact
        },
        x);
  }
}

// Load 32 floats: those at even indices, and those at odd ones.
KVKEEP_INLINE void load_deinterleaved(const float* x, Floats& even, Floats& odd) {
  for (int i = 0; i < 4; ++i) {
    const float32x4x2_t apart = vld2q_f32(x + 8 * i);
    even.of[i] = apart.val[0], odd.of[i] = apart.val[1];
  }
}

// Interleave 16-bit halves: those of `even` and `odd` in turn, the first 32 and the last 32.
KVKEEP_INLINE void interleave(Ints even, Ints odd, Ints& first, Ints& second) {
  const auto low = [&](int i) {
    return as_lanes(vzip1q_u16(as_halves(even.of[i]), as_halves(odd.of[i])));
  };
  const auto high = [&](int i) {
    return as_lanes(vzip2q_u16(as_halves(even.of[i]), as_halves(odd.of[i])));
  };
  first = {{low(0), high(0), low(1), high(1)}};
  second = {{low(2), high(2), low(3), high(3)}};
}

// Transpose four rows of four lanes.
KVKEEP_INLINE void transpose_four(uint32x4_t& a, uint32x4_t& b, uint32x4_t& c, uint32x4_t& d) {
  const auto pairs = [](uint32x4_t x) { return vreinterpretq_u64_u32(x); };
  const auto lanes = [](uint64x2_t x) { return vreinterpretq_u32_u64(x); };
  const uint64x2_t ab = pairs(vtrn1q_u32(a, b)), ab_odd = pairs(vtrn2q_u32(a, b));
  const uint64x2_t cd = pairs(vtrn1q_u32(c, d)), cd_odd = pairs(vtrn2q_u32(c, d));
  a = lanes(vtrn1q_u64(ab, cd)), b = lanes(vtrn1q_u64(ab_odd, cd_odd));
  c = lanes(vtrn2q_u64(ab, cd)), d = lanes(vtrn2q_u64(ab_odd, cd_odd));
}

// Transpose 16 rows of 16 lanes.
KVKEEP_INLINE void transpose(Ints (&r)[16]) {
  Ints t[16];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      uint32x4_t a = r[4 * i].of[j], b = r[4 * i + 1].of[j];
      uint32x4_t c = r[4 * i + 2].of[j], d = r[4 * i + 3].of[j];
      transpose_four(a, b, c, d);
      t[4 * j].of[i] = a, t[4 * j + 1].of[i] = b;
      t[4 * j + 2].of[i] = c, t[4 * j + 3].of[i] = d;
    }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace kvkeep

#include "power_of_two.h"
