// Products of a prompt's rows with a packed matrix, as integers, by tiles of rows.
//
// Codes are unpacked once for many rows. A kernel is a representation of codes and rows, with their
// product: a type with
//
//   Format          a PackedFormat
//   kColumns        columns of a step: that share the scale of a row, kGroup or more
//   kCodes, kWords  how many registers the codes of a step take, and how many words its row
//   kScaleCount     how many scales of weights a step has
//   unpack          set the codes and scales of a step, see UnpackedGroups
//   quantise(x)     a step of a row, as RowStep<kWords, kColumns / kGroup>
//   multiply        see multiply_panel
#pragma once

#include <algorithm>

#include "buffer.h"
#include "decode.h"
#include "packed_block.h"
#include "status.h"
#include "thread_team.h"

namespace kvkeep {

constexpr int kPartBlocks = 2;  // of 16 rows of weights, for which a panel of rows stays in cache
constexpr int kBatchTiles = 256 / kPromptTile;  // of rows, multiplied with a panel
template <typename Kernel>
constexpr int kPanelSteps = 256 / Kernel::kCodes;  // unpacked at a time: 16 KiB of codes

// A step of a row. words: of 4 bytes, what an instruction multiplies with the codes of a lane, in
// order. scale: NaN where any number is not finite. sums: of the quantised numbers of each group.
template <int kWords, int kSums = 1>
struct RowStep {
  std::int32_t words[kWords];
  float scale, sums[kSums];
};

// Rows as integers, kPromptTile rows at a time: their words at the same columns lie side by side.
// A tile that has fewer rows ends with zeros.
template <typename Kernel>
struct PromptRows {
  PromptRows(int count, int columns)
      : columns(columns),
        steps(columns / Kernel::kColumns),
        tiles((count + kPromptTile - 1) / kPromptTile),
        words(std::size_t(tiles) * kPromptTile * steps * Kernel::kWords),
        scales(std::size_t(tiles) * kPromptTile * steps),
        sums(std::size_t(tiles) * kPromptTile * steps * kSums) {}

  // Of a tile, from step g on: [steps, kWords, kPromptTile], [steps, kPromptTile],
  // [steps, kSums, kPromptTile].
  const std::int32_t* tile_words(int tile, int g) const {
    return words.get() + at(tile, g) * Kernel::kWords;
  }
  const float* tile_scales(int tile, int g) const { return scales.get() + at(tile, g); }
  const float* tile_sums(int tile, int g) const { return sums.get() + at(tile, g) * kSums; }

  // Set a tile from `count` rows.
  void set_tile(int tile, const Bf16* from, int count) {
    for (int g = 0; g < steps; ++g)
      for (int i = 0; i < kPromptTile; ++i) {
        Activation x[Kernel::kColumns] = {};
        if (i < count)
          for (int c = 0; c < Kernel::kColumns; c += kLanes)
            store_rounded(x + c,
                          load(from + std::ptrdiff_t(i) * columns + g * Kernel::kColumns + c));
        const auto step = Kernel::quantise(x);
        scales[at(tile, g) + i] = step.scale;
        for (int s = 0; s < kSums; ++s)
          sums[at(tile, g) * kSums + s * kPromptTile + i] = step.sums[s];
        std::int32_t* to = words.get() + at(tile, g) * Kernel::kWords + i;
        for (int w = 0; w < Kernel::kWords; ++w) to[w * kPromptTile] = step.words[w];
      }
  }

  static constexpr int kSums = Kernel::kColumns / kGroup;
  const int columns, steps, tiles;

 private:
  // A panel of one tile follows that of the tile before, so that all of them are read in order.
  std::ptrdiff_t at(int tile, int g) const {
    const int first = g / kPanelSteps<Kernel> * kPanelSteps<Kernel>;
    const int width = std::min(kPanelSteps<Kernel>, steps - first);
    return (std::ptrdiff_t(tiles) * first + tile * width + g - first) * kPromptTile;
  }

  Buffer<std::int32_t> words;
  Buffer<float> scales, sums;
};

// Unpacks groups of 32 columns, each a step, whose codes Kernel::codes<n>(data) returns.
template <typename F, typename Kernel>
struct UnpackedGroups {
  using Scales = typename F::Scales;
  static constexpr int kColumns = kGroup, kScaleCount = kGroup / Scales::kScaleColumns;

  // Set the codes, the scales and, if there are any, the minima of a step.
  static void unpack(const BlockPointers<F>& from, int group, Ints* codes, Floats* scales,
                     Floats* minima) {
    const char *data = from.codes(group), *tile = from.tile(group);
    const int index = from.group_in_tile(group);
    unroll([&](auto n) __attribute__((
               always_inline)) { codes[n.value] = Kernel::template codes<n.value>(data); },
           std::make_integer_sequence<int, Kernel::kCodes>{});
    for (int s = 0; s < kScaleCount; ++s) scales[s] = Scales::scale(tile, index, s);
    if constexpr (Scales::kHasMinima) minima[0] = Scales::minimum(tile, index);
  }
};

// Some columns of a block of 16 rows of weights.
template <typename Kernel>
struct Panel {
  using F = typename Kernel::Format;
  using Scales = typename F::Scales;

  Ints codes[kPanelSteps<Kernel>][Kernel::kCodes];
  Floats scales[kPanelSteps<Kernel>][Kernel::kScaleCount];
  Floats minima[kPanelSteps<Kernel>][Kernel::kColumns / kGroup];

  void unpack(const BlockPointers<F>& from, int first, int count) {
    for (int g = 0; g < count; ++g) Kernel::unpack(from, first + g, codes[g], scales[g], minima[g]);
  }
};

// Add to `totals` the products of a tile of rows with a panel, whose first step is `first`.
// Kernel::multiply sets `products` to the integers' products over the columns of one scale, and
// returns where the words of the next one begin.
// Not inlined: some of its accumulators would be kept in memory.
template <typename Kernel>
__attribute__((noinline)) void multiply_panel(const Panel<Kernel>& panel, int first, int steps,
                                              const PromptRows<Kernel>& rows, int tile,
                                              Floats* totals) {
  using P = Panel<Kernel>;
  constexpr int kScaleCodes = Kernel::kCodes / Kernel::kScaleCount;
  constexpr int kSums = PromptRows<Kernel>::kSums;
  const std::int32_t* words = rows.tile_words(tile, first);
  const float *scales = rows.tile_scales(tile, first), *sums = rows.tile_sums(tile, first);
  for (int g = 0; g < steps; ++g, scales += kPromptTile) {
    for (int s = 0; s < Kernel::kScaleCount; ++s) {
      Ints products[kPromptTile];
      words = Kernel::multiply(panel.codes[g] + s * kScaleCodes, words, products);
      const Floats scale = panel.scales[g][s];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i)
        totals[i] = multiply_add(to_floats(products[i]),
                                 scale * splat(P::F::Codes::kStep * scales[i]), totals[i]);
    }
    if constexpr (P::Scales::kHasMinima) {
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i) {
        Floats total = totals[i];
#pragma GCC unroll 8
        for (int s = 0; s < kSums; ++s)
          total = multiply_add(splat(sums[s * kPromptTile + i]), panel.minima[g][s], total);
        totals[i] = total;
      }
      sums += kSums * kPromptTile;
    }
  }
}

// Multiply tiles of rows from `first` on with some blocks. totals: [blocks, rows of the tiles].
template <typename Kernel>
void multiply_blocks(const Matrix& matrix, int block, int blocks, const PromptRows<Kernel>& rows,
                     int first, int tiles, Floats* totals) {
  Panel<Kernel> panel;
  for (int i = 0; i < blocks * tiles * kPromptTile; ++i) totals[i] = zeros();
  for (int g = 0; g < rows.steps; g += kPanelSteps<Kernel>) {
    const int steps = std::min(kPanelSteps<Kernel>, rows.steps - g);
    Floats* to = totals;
    for (int b = 0; b < blocks; ++b) {
      panel.unpack(BlockPointers<typename Kernel::Format>(matrix, block + b), g, steps);
      for (int t = 0; t < tiles; ++t, to += kPromptTile)
        multiply_panel<Kernel>(panel, g, steps, rows, first + t, to);
    }
  }
}

// Add the bias and store the products of `count` rows with a block, rounded to bf16.
inline void store_products(const Matrix& matrix, int block, const Floats* totals, int count,
                           Bf16* out) {
  const int rows = rows_in_block(matrix, block);
  const Floats bias = matrix.bias ? load_first(matrix.bias + block * kBlock, rows) : zeros();
  for (int i = 0; i < count; ++i) {
    Bf16 line[kLanes];
    store_rounded(line, matrix.bias ? totals[i] + bias : totals[i]);
    std::memcpy(out + std::ptrdiff_t(i) * matrix.rows + block * kBlock, line, rows * sizeof *line);
  }
}

// See kvkeep_prompt_product. The result of a row does not depend on the others.
template <typename Kernel>
int multiply_prompt(const Matrix& matrix, const Bf16* x, int count, Bf16* out, int threads) {
  PromptRows<Kernel> rows(count, matrix.columns);
  const int batches = (rows.tiles + kBatchTiles - 1) / kBatchTiles;
  const int parts = (matrix.blocks() + kPartBlocks - 1) / kPartBlocks;
  ThreadTeam team(threads);
  team.run([&](int me) {
    team.run_shared_then_wait(me, rows.tiles, 2, [&](int tile) {
      const int first = tile * kPromptTile;
      rows.set_tile(tile, x + std::ptrdiff_t(first) * matrix.columns,
                    std::min(kPromptTile, count - first));
    });
    team.run_shared(me, batches * parts, 1, [&](int piece) {
      Floats totals[kPartBlocks * kBatchTiles * kPromptTile];
      const int block = piece % parts * kPartBlocks, tile = piece / parts * kBatchTiles;
      const int blocks = std::min(kPartBlocks, matrix.blocks() - block);
      const int first = tile * kPromptTile, tiles = std::min(kBatchTiles, rows.tiles - tile);
      multiply_blocks<Kernel>(matrix, block, blocks, rows, tile, tiles, totals);
      for (int b = 0; b < blocks; ++b)
        store_products(matrix, block + b, totals + b * tiles * kPromptTile,
                       std::min(tiles * kPromptTile, count - first),
                       out + std::ptrdiff_t(first) * matrix.rows);
    });
  });
  return kDone;
}

// The products of rows of 8 bits, of which 32 columns share a scale (byte_rows.cpp), or 256
// (byte_tiles.cpp). kNoKernel: not of this format.
int multiply_byte_rows(const Matrix& matrix, const Bf16* x, int count, Bf16* out, int threads);
int multiply_byte_tiles(const Matrix& matrix, const Bf16* x, int count, Bf16* out, int threads);

}  // namespace kvkeep
