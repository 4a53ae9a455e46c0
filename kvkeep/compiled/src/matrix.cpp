#include "matrix.h"

namespace kvkeep {
namespace {

// bf16 of 0 ... 15, twice: a lookup takes five bits, and whatever the fifth is must not matter.
alignas(64) constexpr Bf16 kNibbles[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// Bytes that are asked for before they are needed: what follows lies in other pages, where the
// processor by itself does not look.
constexpr int kAhead = 8192;

// AMD's processors can fetch past the second cache: weights are read once for each token, and what
// runs between two tokens, the program, finds itself there again. Intel's then fill the first cache
// alone, which has few lines on their way at a time: a token takes 2.5 times as long.
bool fetches_past_second() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}
const bool kPastSecond = fetches_past_second();

void prefetch(const char* x) {
  if (kPastSecond)
    _mm_prefetch(x, _MM_HINT_NTA);
  else
    _mm_prefetch(x, _MM_HINT_T0);
}

__m512 half_floats(const std::uint16_t* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// The pairs of columns that follow one another in the packed data, as bf16: `each(pair, weights)`.
template <typename Each>
inline __attribute__((always_inline)) void unpack_int4(const char* data, Each each) {
  const __m512i nibbles = load(kNibbles);
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    const __m512i word = load(data + 64 * part);
    each(4 * part, _mm512_permutexvar_epi16(word, nibbles));
    each(4 * part + 1, _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4), nibbles));
    each(4 * part + 2, _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 8), nibbles));
    each(4 * part + 3, _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 12), nibbles));
  }
}

template <typename Each>
inline __attribute__((always_inline)) void unpack_int8(const char* data, Each each) {
  const auto floats = [](const char* bytes) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
  };
#pragma GCC unroll 16
  for (int pair = 0; pair < kGroup / 2; ++pair)
    each(pair, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(floats(data + 32 * pair + 16),
                                                            floats(data + 32 * pair))));
}

template <int kCount, bool kFour>
void packed(const Matrix& matrix, int block, const Input& input, int first, __m512* out) {
  constexpr int kBytes = kFour ? 256 : 512, kScales = kFour ? 32 : 16;
  const int groups = matrix.columns / kGroup;
  const long begin = static_cast<long>(block) * groups;
  const char* data = static_cast<const char*>(matrix.data) + begin * kBytes;
  const std::uint16_t* scales = static_cast<const std::uint16_t*>(matrix.scales) + begin * kScales;
  const Bf16* x = input.row(first);
  const int columns = matrix.columns;
  __m512 total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, data += kBytes, scales += kScales, x += kGroup) {
    for (int line = 0; line < kBytes; line += 64) prefetch(data + kAhead + line);
    prefetch(reinterpret_cast<const char*>(scales) + kAhead * kScales * 2 / kBytes);
    __m512 sum[kCount];
    for (int i = 0; i < kCount; ++i) sum[i] = _mm512_setzero_ps();
    const auto add = [&](int p, __m512i weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i)
        sum[i] = dot(sum[i], weights, pair(x + static_cast<long>(i) * columns + 2 * p));
    };
    if constexpr (kFour)
      unpack_int4(data, add);
    else
      unpack_int8(data, add);
    const __m512 scale = half_floats(scales);
    for (int i = 0; i < kCount; ++i) {
      total[i] = _mm512_fmadd_ps(sum[i], scale, total[i]);
      if (kFour)
        total[i] = _mm512_fmadd_ps(_mm512_set1_ps(input.row_sums(first + i)[g]),
                                   half_floats(scales + kBlock), total[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) out[i] = total[i];
}

__m512 plain(const Matrix& matrix, int block, const Bf16* x) {
  const int columns = matrix.columns;
  const Bf16* weights =
      static_cast<const Bf16*>(matrix.data) + static_cast<long>(block) * kBlock * columns;
  const int rows = matrix.rows - block * kBlock;
  __m512 sum[kBlock];
  for (int r = 0; r < kBlock; r += 4) {
    const Bf16* row[4];
    for (int i = 0; i < 4; ++i)  // past the end the last row again, for nothing
      row[i] = weights + static_cast<long>(r + i < rows ? r + i : rows - 1) * columns;
    __m512 one = _mm512_setzero_ps(), two = one, three = one, four = one;
    for (int c = 0; c < columns; c += 32) {
      const __m512i values = load(x + c);
      one = dot(one, load(row[0] + c), values);
      two = dot(two, load(row[1] + c), values);
      three = dot(three, load(row[2] + c), values);
      four = dot(four, load(row[3] + c), values);
    }
    sum[r] = one, sum[r + 1] = two, sum[r + 2] = three, sum[r + 3] = four;
  }
  return sums(sum);
}

template <int kCount>
void multiply_some(const Matrix& matrix, int block, const Input& input, int first, __m512* out) {
  if (matrix.format == kInt4)
    packed<kCount, true>(matrix, block, input, first, out);
  else if (matrix.format == kInt8)
    packed<kCount, false>(matrix, block, input, first, out);
  else
    for (int i = 0; i < kCount; ++i) out[i] = plain(matrix, block, input.row(first + i));
  if (!matrix.bias) return;
  const __m512 bias = to_float(
      _mm256_maskz_loadu_epi16(rows_of(matrix, block), matrix.bias + block * kBlock));
  for (int i = 0; i < kCount; ++i) out[i] = _mm512_add_ps(out[i], bias);
}

}  // namespace

void multiply(const Matrix& matrix, int block, const Input& input, int first, int count,
              __m512* out) {
  for (; count >= 8; first += 8, count -= 8, out += 8)
    multiply_some<8>(matrix, block, input, first, out);
  for (; count >= 4; first += 4, count -= 4, out += 4)
    multiply_some<4>(matrix, block, input, first, out);
  for (; count >= 1; ++first, --count, ++out) multiply_some<1>(matrix, block, input, first, out);
}

}  // namespace kvkeep
