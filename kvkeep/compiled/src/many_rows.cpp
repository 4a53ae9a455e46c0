// Products of a prompt's rows with a packed matrix, as integers of 16 bits.
//
// The rows are those of integers.h, so that a row's products have the same bits as in decode steps.
// An instruction multiplies two codes of each lane with two numbers of a row: AVX2 computes twice
// as many such products as of floats.
#include "prompt_tiles.h"

namespace kvkeep {
namespace {

// Where one instruction multiplies and adds, GCC would store the sums in each turn of a loop.
constexpr int kUnrolledPairs = kProductsPerByteSum == 4 ? kPairs : 2;

// Codes in steps of kStep, two for each lane. A word is two numbers of a row.
template <typename F>
struct IntegerKernel : UnpackedGroups<F, IntegerKernel<F>> {
  using Format = F;
  static constexpr int kCodes = kPairs, kWords = kPairs;

  template <int p>
  static Ints codes(const char* data) {
    return F::Codes::template halves<p>(data);
  }

  static RowStep<kWords> quantise(const Activation* x) {
    IntegerGroup group{};
    RowStep<kWords> to;
    to.sums[0] = quantise_group(x, group);
    to.scale = group.scale;
    std::memcpy(to.words, group.integer, sizeof to.words);
    return to;
  }

  KVKEEP_INLINE static const std::int32_t* multiply(const Ints* codes, const std::int32_t* x,
                                                    Ints (&products)[kPromptTile]) {
    constexpr int kScalePairs = F::Scales::kScaleColumns / 2;
#pragma GCC unroll 16
    for (int i = 0; i < kPromptTile; ++i) products[i] = splat_int(0);
#pragma GCC unroll kUnrolledPairs
    for (int p = 0; p < kScalePairs; ++p, x += kPromptTile) {
      const Ints pair = codes[p];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i)
        products[i] = add_int16_products(products[i], pair, splat_int(x[i]));
    }
    return x;
  }
};

}  // namespace
}  // namespace kvkeep

int kvkeep_prompt_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count,
                          kvkeep::Bf16* out, int threads, int row_bits) {
  using namespace kvkeep;
  return run_guarded([=] {
    int status = kNoKernel;
    if (row_bits == 8) status = multiply_byte_tiles(*matrix, x, count, out, threads);
    if (row_bits == 8 && status == kNoKernel)
      status = multiply_byte_rows(*matrix, x, count, out, threads);
    if (status != kNoKernel) return status;
    for_format(
        matrix->format,
        [&](auto format) {
          status =
              multiply_prompt<IntegerKernel<decltype(format)>>(*matrix, x, count, out, threads);
        },
        [] {});
    return status;
  });
}
