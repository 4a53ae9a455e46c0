#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace kvkeep {
namespace {

// Bytes that are asked for before they are needed: what follows lies in other pages, where the
// processor by itself does not look.
constexpr int kAhead = 8192;

const bool kPastSecond = fetches_past_second();

inline void prefetch_weights(const char* x) {
  if (kPastSecond)
    prefetch_past_second(x);
  else
    prefetch(x);
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

template <typename F, int kCount>
void packed(const Matrix& matrix, int block, const Input& input, int first, Floats* out) {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  constexpr int kSharing = Scales::kShared / 2;  // pairs that share a scale
  constexpr int kScaleBytes = Scales::kTileBytes * kGroup / Scales::kSpan;
  const int groups = matrix.columns / kGroup, columns = matrix.columns;
  const Place<F> place(matrix, block);
  const Activation* x = input.row(first);
  Floats total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = zeros();
  for (int g = 0; g < groups; ++g, x += kGroup) {
    const char *data = place.codes(g), *tile = place.tile(g);
    const int within = place.within(g);
    for (int line = 0; line < Codes::kBytes; line += 64) prefetch_weights(data + kAhead + line);
    prefetch_weights(tile + within * kScaleBytes + kAhead * kScaleBytes / Codes::kBytes);
    Floats sum[2][kCount];  // of every other pair: one waits while the other adds
    each_of(
        [&](auto p) __attribute__((always_inline)) {
          const Paired weights = Codes::template pair<p.value>(data);
#pragma GCC unroll 8
          for (int i = 0; i < kCount; ++i) {
            Floats& own = sum[p.value % 2][i];
            if constexpr (p.value % kSharing < 2) own = zeros();
            own = dot(own, weights, spread(x + static_cast<long>(i) * columns + 2 * p.value));
          }
          if constexpr (p.value % kSharing == kSharing - 1) {
            const Floats scale = Scales::scale(tile, within, p.value / kSharing);
            for (int i = 0; i < kCount; ++i)
              total[i] = multiply_add(sum[0][i] + sum[1][i], scale, total[i]);
          }
        },
        std::make_integer_sequence<int, kPairs>{});
    if constexpr (Scales::kMinima) {
      const Floats minimum = Scales::minimum(tile, within);
      for (int i = 0; i < kCount; ++i)
        total[i] =
            multiply_add(all(input.row_sums(first + i)[g]), minimum, total[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) out[i] = total[i];
}

// The same of rows as integers, with codes that are integers.
template <typename F, int kCount>
void packed_integers(const Matrix& matrix, int block, const Input& input, int first, Floats* out) {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  constexpr int kScaleBytes = Scales::kTileBytes * kGroup / Scales::kSpan;
  const int groups = matrix.columns / kGroup;
  const Place<F> place(matrix, block);
  Floats total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = zeros();
  for (int g = 0; g < groups; ++g) {
    const char *data = place.codes(g), *tile = place.tile(g);
    const int within = place.within(g);
    for (int line = 0; line < Codes::kBytes; line += 64) prefetch_weights(data + kAhead + line);
    prefetch_weights(tile + within * kScaleBytes + kAhead * kScaleBytes / Codes::kBytes);
    const Integers* x[kCount];
    for (int i = 0; i < kCount; ++i) x[i] = input.row_integers(first + i) + g;
    each_of(
        [&](auto s) __attribute__((always_inline)) {
          Ints sums[kCount];
          multiply_integers<Codes, Scales::kShared, s.value>(data, x, sums);
          const Floats scale = Scales::scale(tile, within, s.value);
          for (int i = 0; i < kCount; ++i)
            total[i] = multiply_add(to_floats(sums[i]), scale * all(Codes::kStep * x[i]->scale), total[i]);
        },
        std::make_integer_sequence<int, kGroup / Scales::kShared>{});
    if constexpr (Scales::kMinima) {
      const Floats minimum = Scales::minimum(tile, within);
      for (int i = 0; i < kCount; ++i)
        total[i] = multiply_add(all(input.row_sums(first + i)[g]), minimum, total[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) out[i] = total[i];
}

// Calls `with(n, i)` for tiles of n rows from i on: as many as registers hold the sums of, and what
// is left over.
template <int kTile, typename With>
void in_tiles(int count, With with) {
  int i = 0;
  for (; i + kTile <= count; i += kTile) with(std::integral_constant<int, kTile>{}, i);
  if constexpr (kTile > 4)
    for (; i + 4 <= count; i += 4) with(std::integral_constant<int, 4>{}, i);
  for (; i < count; ++i) with(std::integral_constant<int, 1>{}, i);
}

// A group of 16 rows as bf16: of each pair of columns, those of row 0, those of row 1 and so on.
template <typename F>
inline __attribute__((always_inline)) void round_group(const Place<F>& place, int group,
                                                       Ints* out) {
  using Scales = typename F::Scales;
  constexpr int kSharing = Scales::kShared / 2;
  const char *data = place.codes(group), *tile = place.tile(group);
  const int within = place.within(group);
  const Floats minimum = Scales::minimum(tile, within);
  Floats scale = minimum;
  each_of(
      [&](auto p) __attribute__((always_inline)) {
        if constexpr (p.value % kSharing == 0)
          scale = Scales::scale(tile, within, p.value / kSharing);
        const Paired codes = F::Codes::template pair<p.value>(data);
        out[p.value] = rounded_in_pairs(multiply_add(evens(codes), scale, minimum),
                                        multiply_add(odds(codes), scale, minimum));
      },
      std::make_integer_sequence<int, kPairs>{});
}

// Adds to `out` the products of 16 rows of bf16, in pairs, with rows of input `stride` apart.
template <int kCount>
void add_paired(const Ints* weights, int pairs, const Activation* x, long stride, Floats* out) {
  Floats sum[kCount];
  for (int i = 0; i < kCount; ++i) sum[i] = out[i];
  for (int p = 0; p < pairs; ++p) {
    const Paired some = paired(weights[p]);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = dot(sum[i], some, spread(x + i * stride + 2 * p));
  }
  for (int i = 0; i < kCount; ++i) out[i] = sum[i];
}

constexpr int kStretch = 1024;  // columns that are unpacked before they are multiplied

template <typename F>
void rounded(const Matrix& matrix, int block, const Input& input, int first, int count,
             Floats* out) {
  alignas(64) Ints weights[kStretch / 2];
  const Place<F> place(matrix, block);
  const long columns = matrix.columns;
  for (int i = 0; i < count; ++i) out[i] = zeros();
  for (int begin = 0; begin < columns; begin += kStretch) {
    const int some = std::min<int>(kStretch, columns - begin);
    for (int g = 0; g < some / kGroup; ++g)
      round_group<F>(place, begin / kGroup + g, weights + g * kPairs);
    in_tiles<kTile>(count, [&](auto tile, int i) {
      add_paired<tile.value>(weights, some / 2, input.row(first + i) + begin, columns, out + i);
    });
  }
}

// Numbers that stand alone: 32 of a row as bf16, and 16 as floats.
struct Bf16Row {
  using Number = Bf16;
  static Ints rounded(const Number* x) { return load_ints(x); }
  static Floats floats(const Number* x) { return load(x); }
};

template <typename Of>
struct WiderRow {
  using Number = typename Of::Number;
  static Ints rounded(const Number* x) {
    return rounded_in_order(Of::floats(x), Of::floats(x + kLanes));
  }
  static Floats floats(const Number* x) { return Of::floats(x); }
};

struct Halves {
  using Number = std::uint16_t;
  static Floats floats(const Number* x) { return load_half(x); }
};

struct Singles {
  using Number = float;
  static Floats floats(const Number* x) { return load(x); }
};

// 16 rows by one, 32 columns at a time; of rows past the end the last one again, for nothing.
template <typename Row>
const typename Row::Number* row_of(const Matrix& matrix, int block, int r) {
  const int row = std::min(block * kBlock + r, matrix.rows - 1);
  return static_cast<const typename Row::Number*>(matrix.data) +
         static_cast<long>(row) * matrix.columns;
}

template <typename Row, bool kRounded>
Floats plain(const Matrix& matrix, int block, const Activation* x) {
  Floats sum[kBlock];
  for (int r = 0; r < kBlock; r += 4) {
    const typename Row::Number* row[4];
    Floats four[4];
    for (int i = 0; i < 4; ++i) {
      row[i] = row_of<Row>(matrix, block, r + i);
      four[i] = zeros();
    }
    for (int c = 0; c < matrix.columns; c += kGroup) {
      if constexpr (kRounded) {
        const Paired values = load_paired(x + c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) four[i] = dot(four[i], paired(Row::rounded(row[i] + c)), values);
      } else {
        const Floats low = load(x + c), high = load(x + c + kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          four[i] = multiply_add(Row::floats(row[i] + c), low, four[i]);
          four[i] = multiply_add(Row::floats(row[i] + c + kLanes), high, four[i]);
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
  if (format == kF32) return with(WiderRow<Singles>{});
  with(Bf16Row{});
}

void multiply_plain(const Matrix& matrix, int block, const Input& input, int first, int count,
                    Floats* out) {
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
                     Floats* out) {
  if (matrix.rounded) return rounded<F>(matrix, block, input, first, count, out);
  constexpr bool kIntegers = by_integers<typename F::Codes>();
  in_tiles<kIntegers ? kIntegerTile : kTile>(count, [&](auto tile, int i) {
    if constexpr (kIntegers)
      packed_integers<F, tile.value>(matrix, block, input, first + i, out + i);
    else
      packed<F, tile.value>(matrix, block, input, first + i, out + i);
  });
}

// 32 bf16, as they are or as floats.
void put(Bf16* to, Ints numbers) { store_ints(to, numbers); }
void put(float* to, Ints numbers) {
  Ints first, second;
  interleave(ints(0), numbers, first, second);
  store(to, as_floats(first));
  store(to + kLanes, as_floats(second));
}

}  // namespace

void multiply(const Matrix& matrix, int block, const Input& input, int first, int count,
              Floats* out) {
  for_format(
      matrix.format,
      [&](auto format) {
        multiply_packed<decltype(format)>(matrix, block, input, first, count, out);
      },
      [&] { multiply_plain(matrix, block, input, first, count, out); });
  if (!matrix.bias) return;
  const Floats bias = load_some(matrix.bias + block * kBlock, rows_of(matrix, block));
  for (int i = 0; i < count; ++i) out[i] = out[i] + bias;
}

template <typename To>
void unpack_block(const Matrix& matrix, int block, To* out) {
  const int rows = rows_of(matrix, block);
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        const Place<F> place(matrix, block);
        for (int g = 0; g < matrix.columns / kGroup; ++g) {
          Ints pairs[kPairs];
          round_group<F>(place, g, pairs);
          transpose(pairs);
          for (int r = 0; r < rows; ++r)
            put(out + static_cast<long>(r) * matrix.columns + g * kGroup, pairs[r]);
        }
      },
      [&] {
        for (int r = 0; r < rows; ++r)
          unpack_row(matrix, block * kBlock + r, out + static_cast<long>(r) * matrix.columns);
      });
}

template <typename To>
void unpack_row(const Matrix& matrix, int row, To* out) {
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        const Place<F> place(matrix, row / kBlock);
        for (int g = 0; g < matrix.columns / kGroup; ++g) {
          alignas(64) Ints pairs[kPairs];
          alignas(64) Bf16 line[kGroup];
          round_group<F>(place, g, pairs);
          for (int p = 0; p < kPairs; ++p)
            std::memcpy(line + 2 * p, reinterpret_cast<const Bf16*>(pairs + p) + 2 * (row % kBlock),
                        2 * sizeof(Bf16));
          put(out + g * kGroup, load_ints(line));
        }
      },
      [&] {
        for_numbers(matrix.format, [&](auto numbers) {
          using Row = decltype(numbers);
          const auto* from = static_cast<const typename Row::Number*>(matrix.data) +
                             static_cast<long>(row) * matrix.columns;
          for (int c = 0; c < matrix.columns; c += kGroup)
            put(out + c, Row::rounded(from + c));
        });
      });
}

template void unpack_block(const Matrix&, int, Bf16*);
template void unpack_block(const Matrix&, int, float*);
template void unpack_row(const Matrix&, int, Bf16*);

}  // namespace kvkeep
