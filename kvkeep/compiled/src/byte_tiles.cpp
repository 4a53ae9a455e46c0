// Products of a prompt's rows with matrices in K formats, as integers of 8 bits, where an
// instruction adds the products of bytes in 32 bits.
//
// A K format has scales of six or eight bits for 16 or 32 columns, times one number for 256. Each
// code is multiplied with its scale and rounded to a byte when a panel is unpacked. So 256 columns
// share a scale of the row and one of the weights, and sums of bytes are converted to floats once
// for all of them. llama.cpp's rows for K formats share a scale in the same way (Q8_K), and
// ik_llama.cpp rounds the weights so for long prompts (Q8_K_R8).
#include <cfloat>

#include "prompt_tiles.h"

namespace kvkeep {
namespace {

constexpr int kTile = 256;     // columns
constexpr int kMaxByte = 127;  // of a row

// Formats with scales in a tile of 256 columns, whose codes have four to six bits.
template <typename F>
constexpr bool kHasTiles = F::Scales::kTileColumns == kTile && F::Codes::kRange < 64 &&
                           kProductsPerByteSum == 4 && kMaxByteCode >= 255;

template <typename F>
struct ByteTileKernel {
  using Format = F;
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  static constexpr int kColumns = kTile, kScaleCount = 1, kGroups = kTile / kGroup;
  static constexpr int kGroupCodes = kGroup / 4, kCodes = kTile / 4;
  static constexpr int kGroupScales = kGroup / Scales::kScaleColumns;
  // Codes with a sign are counted from -128, and words begin with what that leaves out.
  static constexpr bool kSigned = Codes::kLowest != 0;
  static constexpr int kLowest = kSigned ? -128 : 0, kGreatest = kSigned ? 127 : 255;
  static constexpr int kGreatestCode = kSigned ? -Codes::kLowest : Codes::kRange;
  static constexpr int kWords = kCodes + kSigned;

  static void unpack(const BlockPointers<F>& from, int step, Ints* codes, Floats* scales,
                     Floats* minima) {
    const int first = step * kGroups;
    const char* tile = from.tile(first);
    const Ints factor = byte_factor(tile);
    scales[0] = load_fp16(tile) * splat(32768.f) / to_floats(factor);
    const Ints factors = in_both_halves(factor);
    for (int g = 0; g < kGroups; ++g, codes += kGroupCodes) {
      const char* data = from.codes(first + g);
      Ints group_scales[kGroupScales];
      for (int s = 0; s < kGroupScales; ++s)
        group_scales[s] = in_both_halves(Scales::integer_scale(tile, g, s));
      unroll(
          [&](auto n) __attribute__((always_inline)) {
            codes[n.value] = scaled(Codes::template bytes<n.value>(data),
                                    group_scales[n.value * kGroupScales / kGroupCodes], factors);
          },
          std::make_integer_sequence<int, kGroupCodes>{});
      if constexpr (Scales::kHasMinima) minima[g] = Scales::minimum(tile, g);
    }
  }

  static RowStep<kWords, kGroups> quantise(const Activation* x) {
    RowStep<kWords, kGroups> to{};
    Floats greatest = zeros();
    bool finite = true;
    for (int c = 0; c < kTile; c += kLanes) {
      greatest = max(greatest, absolute(load(x + c)));
      finite = finite && !not_finite(load(x + c), kLanes);
    }
    if (!finite) {
      to.scale = std::numeric_limits<float>::quiet_NaN();
      for (float& sum : to.sums) sum = to.scale;
      return to;
    }
    to.scale = std::max(reduce_max(greatest) / kMaxByte, FLT_MIN);  // whose inverse is finite
    const Floats inverse = splat(1 / to.scale);
    std::int32_t* words = to.words + kSigned;
    for (int g = 0; g < kGroups; ++g, x += kGroup, words += kGroupCodes) {
      std::uint8_t bytes[2 * kGroup] = {};
      std::int32_t sum = 0;
      for (int h = 0; h < 2; ++h) {
        const Ints integer = to_ints(load(x + h * kLanes) * inverse);
        store_bytes(bytes + h * kLanes, integer);
        sum += static_cast<std::int32_t>(reduce_add(to_floats(integer)));
      }
      store_ints(bytes, shuffle_bytes(load_ints(bytes), kCodeOrder));
      std::memcpy(words, bytes, kGroup);
      to.sums[g] = to.scale * static_cast<float>(sum);
      if constexpr (kSigned) to.words[0] += kLowest * sum;
    }
    return to;
  }

  KVKEEP_INLINE static const std::int32_t* multiply(const Ints* codes, const std::int32_t* x,
                                                    Ints (&products)[kPromptTile]) {
#pragma GCC unroll 16
    for (int i = 0; i < kPromptTile; ++i) products[i] = splat_int(kSigned ? x[i] : 0);
    if constexpr (kSigned) x += kPromptTile;
#pragma GCC unroll 64
    for (int n = 0; n < kCodes; ++n, x += kPromptTile) {
      const Ints four = codes[n];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i) {
        products[i] = add_byte_products(products[i], four, splat_int(x[i]));
        require_now(products[i]);
      }
    }
    return x;
  }

 private:
  static Ints in_both_halves(Ints x) { return (x & splat_int(0xffff)) | shift_left<16>(x); }

  // What products of codes and scales are multiplied by, over 2^15, to become bytes.
  static Ints byte_factor(const char* tile) {
    Floats greatest = splat(1);
    for (int g = 0; g < kGroups; ++g)
      for (int s = 0; s < kGroupScales; ++s)
        greatest = max(greatest, absolute(to_floats(Scales::integer_scale(tile, g, s))));
    // A factor of 32,767 is the greatest of 16 bits.
    const Floats bound = max(greatest * splat(kGreatestCode), splat(kGreatest / 32767.f * 32768));
    return to_ints(splat(kGreatest * 32768.f) / bound);
  }

  // The bytes of each lane, which are codes, times a scale and a factor. Both halves of a lane of
  // those are equal.
  KVKEEP_INLINE static Ints scaled(Ints bytes, Ints scale, Ints factor) {
    Ints parts[2] = {bytes & splat_int(0x00ff00ff), shift_halves_right<8>(bytes)};
    for (Ints& part : parts) {
      if constexpr (kSigned) part = add_halves(part, Codes::kLowest);
      part = multiply_halves_high(multiply_halves(part, scale), factor);
      if constexpr (kSigned) part = add_halves(part, -kLowest);
    }
    return parts[0] | shift_left<8>(parts[1]);
  }
};

}  // namespace

int multiply_byte_tiles(const Matrix& matrix, const Bf16* x, int count, Bf16* out, int threads) {
  int status = kNoKernel;
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        if constexpr (kHasTiles<F>)
          status = multiply_prompt<ByteTileKernel<F>>(matrix, x, count, out, threads);
      },
      [] {});
  return status;
}

}  // namespace kvkeep
