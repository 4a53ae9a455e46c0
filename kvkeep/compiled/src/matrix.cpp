#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvkeep {
namespace {

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

inline void prefetch(const char* x) {
  if (kPastSecond)
    _mm_prefetch(x, _MM_HINT_NTA);
  else
    _mm_prefetch(x, _MM_HINT_T0);
}

// Where a block of a packed matrix begins.
template <typename F>
struct Place {
  const char* data;
  const char* scales;

  Place(const Matrix& matrix, int block)
      : data(static_cast<const char*>(matrix.data) +
             static_cast<long>(block) * (matrix.columns / kGroup) * F::Codes::kBytes),
        scales(static_cast<const char*>(matrix.scales) +
               static_cast<long>(block) * (matrix.columns / F::Scales::kSpan) *
                   F::Scales::kTileBytes) {}

  // To a group: its codes, the tile that it is in, and which of the tile's groups it is.
  const char* codes(int group) const { return data + static_cast<long>(group) * F::Codes::kBytes; }
  const char* tile(int group) const {
    return scales + static_cast<long>(group * kGroup / F::Scales::kSpan) * F::Scales::kTileBytes;
  }
  static int within(int group) { return group % (F::Scales::kSpan / kGroup); }
};

template <typename Each, int... p>
inline __attribute__((always_inline)) void each_pair(Each each, std::integer_sequence<int, p...>) {
  (each(std::integral_constant<int, p>{}), ...);
}

template <typename F, int kCount>
void packed(const Matrix& matrix, int block, const Input& input, int first, __m512* out) {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  constexpr int kSharing = Scales::kShared / 2;  // pairs that share a scale
  constexpr int kScaleBytes = Scales::kTileBytes * kGroup / Scales::kSpan;
  const int groups = matrix.columns / kGroup, columns = matrix.columns;
  const Place<F> place(matrix, block);
  const Bf16* x = input.row(first);
  __m512 total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, x += kGroup) {
    const char *data = place.codes(g), *tile = place.tile(g);
    const int within = place.within(g);
    for (int line = 0; line < Codes::kBytes; line += 64) prefetch(data + kAhead + line);
    prefetch(tile + within * kScaleBytes + kAhead * kScaleBytes / Codes::kBytes);
    __m512 sum[2][kCount];  // of every other pair: one waits while the other adds
    each_pair(
        [&](auto p) __attribute__((always_inline)) {
          const __m512i weights = Codes::template pair<p.value>(data);
#pragma GCC unroll 8
          for (int i = 0; i < kCount; ++i) {
            __m512& own = sum[p.value % 2][i];
            if constexpr (p.value % kSharing < 2) own = _mm512_setzero_ps();
            own = dot(own, weights, pair(x + static_cast<long>(i) * columns + 2 * p.value));
          }
          if constexpr (p.value % kSharing == kSharing - 1) {
            const __m512 scale = Scales::scale(tile, within, p.value / kSharing);
            for (int i = 0; i < kCount; ++i)
              total[i] = _mm512_fmadd_ps(_mm512_add_ps(sum[0][i], sum[1][i]), scale, total[i]);
          }
        },
        std::make_integer_sequence<int, kPairs>{});
    if constexpr (Scales::kMinima) {
      const __m512 minimum = Scales::minimum(tile, within);
      for (int i = 0; i < kCount; ++i)
        total[i] =
            _mm512_fmadd_ps(_mm512_set1_ps(input.row_sums(first + i)[g]), minimum, total[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) out[i] = total[i];
}

// A group of 16 rows as bf16: of each pair of columns, those of row 0, those of row 1 and so on.
template <typename F>
inline __attribute__((always_inline)) void round_group(const Place<F>& place, int group,
                                                       __m512i* out) {
  using Scales = typename F::Scales;
  constexpr int kSharing = Scales::kShared / 2;
  // What is rounded has all first columns in front: rows come together again.
  alignas(64) static constexpr std::uint16_t kTogether[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const char *data = place.codes(group), *tile = place.tile(group);
  const int within = place.within(group);
  const __m512 minimum = Scales::minimum(tile, within);
  const __m512i together = load(kTogether);
  __m512 scale = minimum;
  each_pair(
      [&](auto p) __attribute__((always_inline)) {
        if constexpr (p.value % kSharing == 0)
          scale = Scales::scale(tile, within, p.value / kSharing);
        const __m512i codes = F::Codes::template pair<p.value>(data);
        const __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(codes, 16));
        const __m512 two = _mm512_castsi512_ps(
            _mm512_and_si512(codes, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(two, scale, minimum),
                                                  _mm512_fmadd_ps(one, scale, minimum));
        out[p.value] = _mm512_permutexvar_epi16(together, reinterpret_cast<__m512i>(both));
      },
      std::make_integer_sequence<int, kPairs>{});
}

// Adds to `out` the products of 16 rows of bf16, in pairs, with rows of input `stride` apart.
template <int kCount>
void add_paired(const __m512i* weights, int pairs, const Bf16* x, long stride, __m512* out) {
  __m512 sum[kCount];
  for (int i = 0; i < kCount; ++i) sum[i] = out[i];
  for (int p = 0; p < pairs; ++p) {
    const __m512i some = load(weights + p);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = dot(sum[i], some, pair(x + i * stride + 2 * p));
  }
  for (int i = 0; i < kCount; ++i) out[i] = sum[i];
}

constexpr int kStretch = 1024;  // columns that are unpacked before they are multiplied

template <typename F>
void rounded(const Matrix& matrix, int block, const Input& input, int first, int count,
             __m512* out) {
  alignas(64) __m512i weights[kStretch / 2];
  const Place<F> place(matrix, block);
  const long columns = matrix.columns;
  for (int i = 0; i < count; ++i) out[i] = _mm512_setzero_ps();
  for (int begin = 0; begin < columns; begin += kStretch) {
    const int some = std::min<int>(kStretch, columns - begin);
    for (int g = 0; g < some / kGroup; ++g)
      round_group<F>(place, begin / kGroup + g, weights + g * kPairs);
    int i = 0;
    for (; i + 8 <= count; i += 8)
      add_paired<8>(weights, some / 2, input.row(first + i) + begin, columns, out + i);
    for (; i + 4 <= count; i += 4)
      add_paired<4>(weights, some / 2, input.row(first + i) + begin, columns, out + i);
    for (; i < count; ++i)
      add_paired<1>(weights, some / 2, input.row(first + i) + begin, columns, out + i);
  }
}

// Numbers that stand alone: 32 of a row as bf16, and 16 as floats.
struct Bf16Row {
  using Number = Bf16;
  static __m512i rounded(const Number* x) { return load(x); }
  static __m512 floats(const Number* x) { return load_bf16(x); }
};

template <typename Of>
struct WiderRow {
  using Number = typename Of::Number;
  static __m512i rounded(const Number* x) {
    return reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(Of::floats(x + kLanes), Of::floats(x)));
  }
  static __m512 floats(const Number* x) { return Of::floats(x); }
};

struct Halves {
  using Number = std::uint16_t;
  static __m512 floats(const Number* x) { return half_floats(reinterpret_cast<const char*>(x)); }
};

struct Floats {
  using Number = float;
  static __m512 floats(const Number* x) { return _mm512_loadu_ps(x); }
};

// 16 rows by one, 32 columns at a time; of rows past the end the last one again, for nothing.
template <typename Row>
const typename Row::Number* row_of(const Matrix& matrix, int block, int r) {
  const int row = std::min(block * kBlock + r, matrix.rows - 1);
  return static_cast<const typename Row::Number*>(matrix.data) +
         static_cast<long>(row) * matrix.columns;
}

template <typename Row, bool kRounded>
__m512 plain(const Matrix& matrix, int block, const Bf16* x) {
  __m512 sum[kBlock];
  for (int r = 0; r < kBlock; r += 4) {
    const typename Row::Number* row[4];
    __m512 four[4];
    for (int i = 0; i < 4; ++i) {
      row[i] = row_of<Row>(matrix, block, r + i);
      four[i] = _mm512_setzero_ps();
    }
    for (int c = 0; c < matrix.columns; c += kGroup) {
      if constexpr (kRounded) {
        const __m512i values = load(x + c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) four[i] = dot(four[i], Row::rounded(row[i] + c), values);
      } else {
        const __m512 low = load_bf16(x + c), high = load_bf16(x + c + kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          four[i] = _mm512_fmadd_ps(Row::floats(row[i] + c), low, four[i]);
          four[i] = _mm512_fmadd_ps(Row::floats(row[i] + c + kLanes), high, four[i]);
        }
      }
    }
    for (int i = 0; i < 4; ++i) sum[r + i] = four[i];
  }
  return sums(sum);
}

// Calls `with(Row{})` for the kind of numbers that stand alone.
template <typename With>
void for_numbers(std::int32_t format, With with) {
  if (format == kF16) return with(WiderRow<Halves>{});
  if (format == kF32) return with(WiderRow<Floats>{});
  with(Bf16Row{});
}

void multiply_plain(const Matrix& matrix, int block, const Input& input, int first, int count,
                    __m512* out) {
  for_numbers(matrix.format, [&](auto row) {
    using Row = decltype(row);
    const bool exact = matrix.format == kBf16 || matrix.rounded;
    for (int i = 0; i < count; ++i)
      out[i] = exact ? plain<Row, true>(matrix, block, input.row(first + i))
                     : plain<Row, false>(matrix, block, input.row(first + i));
  });
}

template <typename F>
void multiply_packed(const Matrix& matrix, int block, const Input& input, int first, int count,
                     __m512* out) {
  if (matrix.rounded) return rounded<F>(matrix, block, input, first, count, out);
  for (; count >= 8; first += 8, count -= 8, out += 8)
    packed<F, 8>(matrix, block, input, first, out);
  for (; count >= 4; first += 4, count -= 4, out += 4)
    packed<F, 4>(matrix, block, input, first, out);
  for (; count >= 1; ++first, --count, ++out) packed<F, 1>(matrix, block, input, first, out);
}

}  // namespace

void multiply(const Matrix& matrix, int block, const Input& input, int first, int count,
              __m512* out) {
  for_format(
      matrix.format,
      [&](auto format) {
        multiply_packed<decltype(format)>(matrix, block, input, first, count, out);
      },
      [&] { multiply_plain(matrix, block, input, first, count, out); });
  if (!matrix.bias) return;
  const __m512 bias = to_float(
      _mm256_maskz_loadu_epi16(rows_of(matrix, block), matrix.bias + block * kBlock));
  for (int i = 0; i < count; ++i) out[i] = _mm512_add_ps(out[i], bias);
}

void unpack_block(const Matrix& matrix, int block, Bf16* out) {
  const int rows = std::min(kBlock, matrix.rows - block * kBlock);
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        const Place<F> place(matrix, block);
        for (int g = 0; g < matrix.columns / kGroup; ++g) {
          __m512i pairs[kPairs];
          round_group<F>(place, g, pairs);
          transpose(pairs);
          for (int r = 0; r < rows; ++r)
            _mm512_storeu_si512(out + static_cast<long>(r) * matrix.columns + g * kGroup, pairs[r]);
        }
      },
      [&] {
        for (int r = 0; r < rows; ++r)
          unpack_row(matrix, block * kBlock + r, out + static_cast<long>(r) * matrix.columns);
      });
}

void unpack_row(const Matrix& matrix, int row, Bf16* out) {
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        const Place<F> place(matrix, row / kBlock);
        for (int g = 0; g < matrix.columns / kGroup; ++g) {
          alignas(64) __m512i pairs[kPairs];
          round_group<F>(place, g, pairs);
          for (int p = 0; p < kPairs; ++p)
            std::memcpy(out + g * kGroup + 2 * p,
                        reinterpret_cast<const Bf16*>(pairs + p) + 2 * (row % kBlock),
                        2 * sizeof(Bf16));
        }
      },
      [&] {
        for_numbers(matrix.format, [&](auto numbers) {
          using Row = decltype(numbers);
          const auto* from = static_cast<const typename Row::Number*>(matrix.data) +
                             static_cast<long>(row) * matrix.columns;
          for (int c = 0; c < matrix.columns; c += kGroup)
            _mm512_storeu_si512(out + c, Row::rounded(from + c));
        });
      });
}

}  // namespace kvkeep
