// Products of a prompt's rows with a packed matrix, as integers of 8 bits: half the instructions
// that rows of 15 bits need (many_rows.cpp), for results that are less exact.
//
// 32 columns of a row share a scale, and x = scale * byte. An instruction multiplies the four codes
// of each lane, unsigned bytes, with four bytes of a row.
#include <cfloat>

#include "prompt_tiles.h"

namespace kvkeep {
namespace {

constexpr int kMaxByte = 127;  // of a row

// How many products with a row can be added before a sum could overflow, as a power of two.
template <typename Codes>
constexpr int products_per_sum() {
  const int limit = kMaxByteSum / (kProductsPerByteSum * kMaxByte * Codes::kRange);
  int products = kGroup / 4;
  while (products > limit) products /= 2;
  return products;
}

// Whether codes are multiplied as bytes. The range of IQ4 and of codes of 8 bits is too large for
// sums of 16 bits.
template <typename Codes>
constexpr bool kMultipliesBytes = Codes::kRange <= kMaxByteCode && products_per_sum<Codes>() > 0;

// Sums of bytes that begin with `first` where they have 32 bits, and with 0 where they have 16.
template <typename Sums>
KVKEEP_INLINE Sums begin_sums(Ints first) {
  if constexpr (kProductsPerByteSum == 4)
    return first;
  else
    return zero_byte_sums();
}

// Codes are counted from kLowest. Where that is not 0, the words of a scale begin with what this
// leaves out: kLowest times the sum of the row's bytes.
template <typename F>
struct ByteKernel : UnpackedGroups<F, ByteKernel<F>> {
  using Format = F;
  using Codes = typename F::Codes;
  static constexpr int kCodes = kGroup / 4, kScaleCount = kGroup / F::Scales::kScaleColumns;
  static constexpr int kTerms = kCodes / kScaleCount;  // registers of codes that share a scale
  static constexpr int kTermsPerSum = std::min(kTerms, products_per_sum<Codes>());
  static constexpr bool kHasOffsets = Codes::kLowest != 0;
  static constexpr int kWords = kCodes + (kHasOffsets ? kScaleCount : 0);

  template <int n>
  static Ints codes(const char* data) {
    return Codes::template bytes<n>(data);
  }

  static RowStep<kWords> quantise(const Activation* x) {
    RowStep<kWords> to{};
    const Floats part[2] = {load(x), load(x + kLanes)};
    if (not_finite(part[0], kLanes) || not_finite(part[1], kLanes)) {
      to.scale = to.sums[0] = std::numeric_limits<float>::quiet_NaN();
      return to;
    }
    const float greatest = reduce_max(max(absolute(part[0]), absolute(part[1])));
    to.scale = std::max(greatest / kMaxByte, FLT_MIN);  // whose inverse is finite
    const Floats inverse = splat(1 / to.scale);
    std::uint8_t bytes[2 * kGroup] = {};
    std::int32_t sums[2];
    for (int h = 0; h < 2; ++h) {
      const Ints integer = to_ints(part[h] * inverse);
      store_bytes(bytes + h * kLanes, integer);
      sums[h] = static_cast<std::int32_t>(reduce_add(to_floats(integer)));
    }
    store_ints(bytes, shuffle_bytes(load_ints(bytes), kCodeOrder));
    to.sums[0] = to.scale * static_cast<float>(sums[0] + sums[1]);
    for (int s = 0; s < kScaleCount; ++s) {
      std::int32_t* words = to.words + s * (kWords / kScaleCount);
      if constexpr (kHasOffsets)
        *words++ = Codes::kLowest * (kScaleCount == 2 ? sums[s] : sums[0] + sums[1]);
      std::memcpy(words, bytes + s * F::Scales::kScaleColumns, F::Scales::kScaleColumns);
    }
    return to;
  }

  KVKEEP_INLINE static const std::int32_t* multiply(const Ints* codes, const std::int32_t* x,
                                                    Ints (&products)[kPromptTile]) {
#pragma GCC unroll 16
    for (int i = 0; i < kPromptTile; ++i) products[i] = splat_int(kHasOffsets ? x[i] : 0);
    if constexpr (kHasOffsets) x += kPromptTile;
#pragma GCC unroll 8
    for (int first = 0; first < kTerms; first += kTermsPerSum) {
      ByteSums sums[kPromptTile];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i) sums[i] = begin_sums<ByteSums>(products[i]);
#pragma GCC unroll 8
      for (int n = 0; n < kTermsPerSum; ++n, x += kPromptTile) {
        const Ints four = codes[first + n];
#pragma GCC unroll 16
        for (int i = 0; i < kPromptTile; ++i) {
          sums[i] = add_byte_products(sums[i], four, splat_int(x[i]));
          require_now(sums[i]);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i) {
        const Ints sum = widen_byte_sums<1>(sums[i]);
        products[i] = kProductsPerByteSum == 4 ? sum : add(products[i], sum);
      }
    }
    return x;
  }
};

}  // namespace

int multiply_byte_rows(const Matrix& matrix, const Bf16* x, int count, Bf16* out, int threads) {
  int status = kNoKernel;
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        if constexpr (kMultipliesBytes<typename F::Codes>)
          status = multiply_prompt<ByteKernel<F>>(matrix, x, count, out, threads);
      },
      [] {});
  return status;
}

}  // namespace kvkeep
