// The bf16 instructions of AVX512-BF16, for pairs_bf16.h.
#pragma once

namespace kvkeep {

// Round to bf16, to nearest, ties to even, and store.
KVKEEP_INLINE void store_rounded(Bf16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// Round 32 floats to bf16, in order.
KVKEEP_INLINE Ints round_in_order(Floats first, Floats second) {
  return reinterpret_cast<Ints>(_mm512_cvtne2ps_pbh(second, first));
}

// Round both to bf16: lane i holds even[i] in its lower half and odd[i] in its upper one.
KVKEEP_INLINE Ints round_interleaved(Floats even, Floats odd) {
  // After rounding, all numbers of `even` come first.
  alignas(64) static constexpr std::uint16_t kTogether[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(load_ints(kTogether), round_in_order(even, odd));
}

// Add to each lane of `sum` the two products of a pair of bf16.
KVKEEP_INLINE Floats add_products(Floats sum, Ints a, Ints b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Look up the lowest bits of each 16-bit half in a table of 32 or 64.
template <int kSize>
KVKEEP_INLINE Ints lookup_halves(Ints which, const Bf16* table) {
  if constexpr (kSize == 32)
    return _mm512_permutexvar_epi16(which, load_ints(table));
  else
    return _mm512_permutex2var_epi16(load_ints(table), which, load_ints(table + 32));
}

}  // namespace kvkeep
