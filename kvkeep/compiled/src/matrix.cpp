#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "packed_block.h"

namespace kvkeep {
namespace {

// How far ahead weights are prefetched, in bytes: the data lies in other pages, which the hardware
// prefetcher does not cross.
constexpr int kPrefetchBytes = 8192;

const bool kSecondCache = prefetches_to_second_cache();

KVKEEP_INLINE void prefetch_weights(const char* x) {
  if (kSecondCache)
    prefetch_to_second_cache(x);
  else
    prefetch(x);
}

template <typename F, int kCount>
void dot_packed(const Matrix& matrix, int block, const ActivationRows& input, int first,
                Floats* out) {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  constexpr int kScalePairs = Scales::kScaleColumns / 2;  // pairs that share a scale
  constexpr int kScaleBytes = Scales::kTileBytes * kGroup / Scales::kTileColumns;
  const int groups = matrix.columns / kGroup, columns = matrix.columns;
  const BlockPointers<F> pointers(matrix, block);
  const Activation* x = input.row(first);
  Floats total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = zeros();
  for (int g = 0; g < groups; ++g, x += kGroup) {
    const char *data = pointers.codes(g), *tile = pointers.tile(g);
    const int group_in_tile = pointers.group_in_tile(g);
    for (int line = 0; line < Codes::kBytes; line += 64)
      prefetch_weights(data + kPrefetchBytes + line);
    prefetch_weights(tile + group_in_tile * kScaleBytes +
                     kPrefetchBytes * kScaleBytes / Codes::kBytes);
    Floats sum[2][kCount];  // alternating accumulators: one's latency hides the other's
    unroll(
        [&](auto p) __attribute__((always_inline)) {
          const Bf16Pairs weights = Codes::template pair<p.value>(data);
#pragma GCC unroll 8
          for (int i = 0; i < kCount; ++i) {
            Floats& accumulator = sum[p.value % 2][i];
            if constexpr (p.value % kScalePairs < 2) accumulator = zeros();
            accumulator =
                dot(accumulator, weights,
                    splat_pair(x + static_cast<std::ptrdiff_t>(i) * columns + 2 * p.value));
          }
          if constexpr (p.value % kScalePairs == kScalePairs - 1) {
            const Floats scale = Scales::scale(tile, group_in_tile, p.value / kScalePairs);
            for (int i = 0; i < kCount; ++i)
              total[i] = multiply_add(sum[0][i] + sum[1][i], scale, total[i]);
          }
        },
        std::make_integer_sequence<int, kPairs>{});
    if constexpr (Scales::kHasMinima) {
      const Floats minimum = Scales::minimum(tile, group_in_tile);
      for (int i = 0; i < kCount; ++i)
        total[i] = multiply_add(splat(input.row_sums(first + i)[g]), minimum, total[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) out[i] = total[i];
}

// As dot_packed, with rows and codes as integers.
template <typename F, int kCount>
void dot_packed_integers(const Matrix& matrix, int block, const ActivationRows& input, int first,
                         Floats* out) {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  constexpr int kScaleBytes = Scales::kTileBytes * kGroup / Scales::kTileColumns;
  const int groups = matrix.columns / kGroup;
  const BlockPointers<F> pointers(matrix, block);
  Floats total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = zeros();
  for (int g = 0; g < groups; ++g) {
    const char *data = pointers.codes(g), *tile = pointers.tile(g);
    const int group_in_tile = pointers.group_in_tile(g);
    for (int line = 0; line < Codes::kBytes; line += 64)
      prefetch_weights(data + kPrefetchBytes + line);
    prefetch_weights(tile + group_in_tile * kScaleBytes +
                     kPrefetchBytes * kScaleBytes / Codes::kBytes);
    const IntegerGroup* x[kCount];
    for (int i = 0; i < kCount; ++i) x[i] = input.row_integers(first + i) + g;
    unroll(
        [&](auto s) __attribute__((always_inline)) {
          Ints sums[kCount];
          multiply_group<Codes, Scales::kScaleColumns, s.value>(data, x, sums);
          const Floats scale = Scales::scale(tile, group_in_tile, s.value);
          for (int i = 0; i < kCount; ++i)
            total[i] = multiply_add(to_floats(sums[i]), scale * splat(Codes::kStep * x[i]->scale),
                                    total[i]);
        },
        std::make_integer_sequence<int, kGroup / Scales::kScaleColumns>{});
    if constexpr (Scales::kHasMinima) {
      const Floats minimum = Scales::minimum(tile, group_in_tile);
      for (int i = 0; i < kCount; ++i)
        total[i] = multiply_add(splat(input.row_sums(first + i)[g]), minimum, total[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) out[i] = total[i];
}

// Call `with(n, i)` for tiles of n rows from i on: as many rows as there are accumulators for, then
// the rest.
template <int kRowTile, typename With>
void for_row_tiles(int count, With with) {
  int i = 0;
  for (; i + kRowTile <= count; i += kRowTile) with(std::integral_constant<int, kRowTile>{}, i);
  if constexpr (kRowTile > 4)
    for (; i + 4 <= count; i += 4) with(std::integral_constant<int, 4>{}, i);
  for (; i < count; ++i) with(std::integral_constant<int, 1>{}, i);
}

// Unpack a group of 16 rows to bf16: out[p] holds columns 2 p and 2 p + 1 of row 0, of row 1, and
// so on.
template <typename F>
inline __attribute__((always_inline)) void unpack_group(const BlockPointers<F>& pointers, int group,
                                                        Ints* out) {
  using Scales = typename F::Scales;
  constexpr int kScalePairs = Scales::kScaleColumns / 2;
  const char *data = pointers.codes(group), *tile = pointers.tile(group);
  const int group_in_tile = pointers.group_in_tile(group);
  const Floats minimum = Scales::minimum(tile, group_in_tile);
  Floats scale = minimum;
  unroll(
      [&](auto p) __attribute__((always_inline)) {
        if constexpr (p.value % kScalePairs == 0)
          scale = Scales::scale(tile, group_in_tile, p.value / kScalePairs);
        const Bf16Pairs codes = F::Codes::template pair<p.value>(data);
        out[p.value] = round_interleaved(multiply_add(evens(codes), scale, minimum),
                                         multiply_add(odds(codes), scale, minimum));
      },
      std::make_integer_sequence<int, kPairs>{});
}

// Add to `out` the products of 16 rows of bf16 pairs with rows of input that are `stride` apart.
template <int kCount>
void accumulate_pairs(const Ints* weights, int pairs, const Activation* x, std::ptrdiff_t stride,
                      Floats* out) {
  Floats sum[kCount];
  for (int i = 0; i < kCount; ++i) sum[i] = out[i];
  for (int p = 0; p < pairs; ++p) {
    const Bf16Pairs part = as_pairs(weights[p]);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = dot(sum[i], part, splat_pair(x + i * stride + 2 * p));
  }
  for (int i = 0; i < kCount; ++i) out[i] = sum[i];
}

constexpr int kUnpackedColumns = 1024;  // columns that are unpacked before they are multiplied

template <typename F>
void multiply_rounded(const Matrix& matrix, int block, const ActivationRows& input, int first,
                      int count, Floats* out) {
  alignas(64) Ints weights[kUnpackedColumns / 2];
  const BlockPointers<F> pointers(matrix, block);
  const std::ptrdiff_t columns = matrix.columns;
  for (int i = 0; i < count; ++i) out[i] = zeros();
  for (int begin = 0; begin < columns; begin += kUnpackedColumns) {
    const int part = std::min<int>(kUnpackedColumns, columns - begin);
    for (int g = 0; g < part / kGroup; ++g)
      unpack_group<F>(pointers, begin / kGroup + g, weights + g * kPairs);
    for_row_tiles<kRowTile>(count, [&](auto tile, int i) {
      accumulate_pairs<tile.value>(weights, part / 2, input.row(first + i) + begin, columns,
                                   out + i);
    });
  }
}

// Numbers of a dense row: 32 as bf16, or 16 as floats.
struct Bf16Numbers {
  using Number = Bf16;
  static Ints load_rounded(const Number* x) { return load_ints(x); }
  static Floats floats(const Number* x) { return load(x); }
};

template <typename Of>
struct WiderNumbers {
  using Number = typename Of::Number;
  static Ints load_rounded(const Number* x) {
    return round_in_order(Of::floats(x), Of::floats(x + kLanes));
  }
  static Floats floats(const Number* x) { return Of::floats(x); }
};

struct Fp16Numbers {
  using Number = std::uint16_t;
  static Floats floats(const Number* x) { return load_fp16(x); }
};

struct Fp32Numbers {
  using Number = float;
  static Floats floats(const Number* x) { return load(x); }
};

// Row r of a block; past the end of the matrix the last row again, whose product is not used.
template <typename QueryRow>
const typename QueryRow::Number* dense_row(const Matrix& matrix, int block, int r) {
  const int row = std::min(block * kBlock + r, matrix.rows - 1);
  return static_cast<const typename QueryRow::Number*>(matrix.data) +
         static_cast<std::ptrdiff_t>(row) * matrix.columns;
}

template <typename QueryRow, bool kRounded>
Floats dot_dense(const Matrix& matrix, int block, const Activation* x) {
  Floats sum[kBlock];
  for (int r = 0; r < kBlock; r += 4) {
    const typename QueryRow::Number* row[4];
    Floats four[4];
    for (int i = 0; i < 4; ++i) {
      row[i] = dense_row<QueryRow>(matrix, block, r + i);
      four[i] = zeros();
    }
    for (int c = 0; c < matrix.columns; c += kGroup) {
      if constexpr (kRounded) {
        const Bf16Pairs values = load_pairs(x + c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          four[i] = dot(four[i], as_pairs(QueryRow::load_rounded(row[i] + c)), values);
      } else {
        const Floats low = load(x + c), high = load(x + c + kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          four[i] = multiply_add(QueryRow::floats(row[i] + c), low, four[i]);
          four[i] = multiply_add(QueryRow::floats(row[i] + c + kLanes), high, four[i]);
        }
      }
    }
    for (int i = 0; i < 4; ++i) sum[r + i] = four[i];
  }
  return reduce_add_each(sum);
}

// Call `with(Numbers{})` with the number type of a dense format.
template <typename With>
void for_dense_format(std::int32_t format, With with) {
  if (format == kF16) return with(WiderNumbers<Fp16Numbers>{});
  if (format == kF32) return with(WiderNumbers<Fp32Numbers>{});
  with(Bf16Numbers{});
}

void multiply_dense(const Matrix& matrix, int block, const ActivationRows& input, int first,
                    int count, Floats* out) {
  for_dense_format(matrix.format, [&](auto row) {
    using QueryRow = decltype(row);
    const bool exact = matrix.format == kBf16 || matrix.rounded;
    for (int i = 0; i < count; ++i)
      out[i] = exact ? dot_dense<QueryRow, true>(matrix, block, input.row(first + i))
                     : dot_dense<QueryRow, false>(matrix, block, input.row(first + i));
  });
}

template <typename F>
void multiply_packed(const Matrix& matrix, int block, const ActivationRows& input, int first,
                     int count, Floats* out) {
  if (matrix.rounded) return multiply_rounded<F>(matrix, block, input, first, count, out);
  constexpr bool kIntegers = multiplies_as_integers<typename F::Codes>();
  for_row_tiles<kIntegers ? kIntegerRowTile : kRowTile>(count, [&](auto tile, int i) {
    if constexpr (kIntegers)
      dot_packed_integers<F, tile.value>(matrix, block, input, first + i, out + i);
    else
      dot_packed<F, tile.value>(matrix, block, input, first + i, out + i);
  });
}

// Store 32 bf16 as they are, or as floats.
void store_unpacked(Bf16* to, Ints numbers) { store_ints(to, numbers); }
void store_unpacked(float* to, Ints numbers) {
  Ints first, second;
  interleave(splat_int(0), numbers, first, second);
  store(to, as_floats(first));
  store(to + kLanes, as_floats(second));
}

}  // namespace

void multiply(const Matrix& matrix, int block, const ActivationRows& input, int first, int count,
              Floats* out) {
  for_format(
      matrix.format,
      [&](auto format) {
        multiply_packed<decltype(format)>(matrix, block, input, first, count, out);
      },
      [&] { multiply_dense(matrix, block, input, first, count, out); });
  if (!matrix.bias) return;
  const Floats bias = load_first(matrix.bias + block * kBlock, rows_in_block(matrix, block));
  for (int i = 0; i < count; ++i) out[i] = out[i] + bias;
}

template <typename To>
void unpack_block(const Matrix& matrix, int block, To* out) {
  const int rows = rows_in_block(matrix, block);
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        const BlockPointers<F> pointers(matrix, block);
        for (int g = 0; g < matrix.columns / kGroup; ++g) {
          Ints pairs[kPairs];
          unpack_group<F>(pointers, g, pairs);
          transpose(pairs);
          for (int r = 0; r < rows; ++r)
            store_unpacked(out + static_cast<std::ptrdiff_t>(r) * matrix.columns + g * kGroup,
                           pairs[r]);
        }
      },
      [&] {
        for (int r = 0; r < rows; ++r)
          unpack_row(matrix, block * kBlock + r,
                     out + static_cast<std::ptrdiff_t>(r) * matrix.columns);
      });
}

template <typename To>
void unpack_row(const Matrix& matrix, int row, To* out) {
  for_format(
      matrix.format,
      [&](auto format) {
        using F = decltype(format);
        const BlockPointers<F> pointers(matrix, row / kBlock);
        for (int g = 0; g < matrix.columns / kGroup; ++g) {
          alignas(64) Ints pairs[kPairs];
          alignas(64) Bf16 line[kGroup];
          unpack_group<F>(pointers, g, pairs);
          for (int p = 0; p < kPairs; ++p)
            std::memcpy(line + 2 * p, reinterpret_cast<const Bf16*>(pairs + p) + 2 * (row % kBlock),
                        2 * sizeof(Bf16));
          store_unpacked(out + g * kGroup, load_ints(line));
        }
      },
      [&] {
        for_dense_format(matrix.format, [&](auto numbers) {
          using QueryRow = decltype(numbers);
          const auto* from = static_cast<const typename QueryRow::Number*>(matrix.data) +
                             static_cast<std::ptrdiff_t>(row) * matrix.columns;
          for (int c = 0; c < matrix.columns; c += kGroup)
            store_unpacked(out + c, QueryRow::load_rounded(from + c));
        });
      });
}

template void unpack_block(const Matrix&, int, Bf16*);
template void unpack_block(const Matrix&, int, float*);
template void unpack_row(const Matrix&, int, Bf16*);

}  // namespace kvkeep
