// Products of a prompt's rows with a packed matrix, as integers of 16 bits.
//
// The rows are those of integers.h, so that a row's products have the same bits as in decode steps.
// Codes are unpacked once for many rows, and an instruction multiplies two codes of each lane with
// two numbers of a row: AVX2 computes twice as many such products as of floats.
#include <algorithm>

#include "buffer.h"
#include "decode.h"
#include "packed_block.h"
#include "status.h"
#include "thread_team.h"

namespace kvkeep {
namespace {

constexpr int kPanelGroups = 16;  // of 32 columns, unpacked at a time: 16 KiB of codes
constexpr int kPartBlocks = 2;    // of 16 rows of weights, for which a panel of rows stays in cache
constexpr int kBatchTiles = 256 / kPromptTile;  // of rows, multiplied with a panel
// Where one instruction multiplies and adds, GCC would store the sums in each turn of a loop.
constexpr int kUnrolledPairs = kProductsPerByteSum == 4 ? kPairs : 2;

// Rows as integers, kPromptTile rows at a time: their numbers at two columns lie beside each other.
// A tile that has fewer rows ends with zeros. See IntegerGroup for scales and sums.
struct IntegerRows {
  IntegerRows(int count, int columns)
      : columns(columns),
        groups(columns / kGroup),
        tiles((count + kPromptTile - 1) / kPromptTile),
        integers(std::size_t(tiles) * kPromptTile * columns),
        scales(std::size_t(tiles) * kPromptTile * groups),
        sums(std::size_t(tiles) * kPromptTile * groups) {}

  // Of a tile, from group g on: [columns / 2, kPromptTile, 2], [groups, kPromptTile].
  const std::int16_t* tile_integers(int tile, int g) const {
    return integers.get() + at(tile, g) * kGroup;
  }
  const float* tile_scales(int tile, int g) const { return scales.get() + at(tile, g); }
  const float* tile_sums(int tile, int g) const { return sums.get() + at(tile, g); }

  // Set a tile from `count` rows.
  void set_tile(int tile, const Bf16* from, int count) {
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < kPromptTile; ++i) {
        IntegerGroup group{};
        Activation x[kGroup] = {};
        if (i < count)
          for (int c = 0; c < kGroup; c += kLanes)
            store_rounded(x + c, load(from + std::ptrdiff_t(i) * columns + g * kGroup + c));
        sums[at(tile, g) + i] = quantise_group(x, group);
        scales[at(tile, g) + i] = group.scale;
        std::int16_t* to = integers.get() + at(tile, g) * kGroup + 2 * i;
        for (int p = 0; p < kPairs; ++p)
          std::memcpy(to + 2 * kPromptTile * p, group.integer + 2 * p, 2 * sizeof *to);
      }
  }

  const int columns, groups, tiles;

 private:
  // A panel of one tile follows that of the tile before, so that all of them are read in order.
  std::ptrdiff_t at(int tile, int g) const {
    const int first = g / kPanelGroups * kPanelGroups;
    const int width = std::min(kPanelGroups, groups - first);
    return (std::ptrdiff_t(tiles) * first + tile * width + g - first) * kPromptTile;
  }

  Buffer<std::int16_t> integers;
  Buffer<float> scales, sums;
};

// Some columns of a block of 16 rows of weights: codes in steps of kStep, two for each lane.
template <typename F>
struct Panel {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  static constexpr int kScaleCount = kGroup / Scales::kScaleColumns;

  Ints codes[kPanelGroups][kPairs];
  Floats scales[kPanelGroups][kScaleCount];
  Floats minima[kPanelGroups];

  void unpack(const BlockPointers<F>& from, int first, int count) {
    for (int g = 0; g < count; ++g) {
      const char *data = from.codes(first + g), *tile = from.tile(first + g);
      const int index = from.group_in_tile(first + g);
      unroll([&](auto p) __attribute__((
                 always_inline)) { codes[g][p.value] = Codes::template halves<p.value>(data); },
             std::make_integer_sequence<int, kPairs>{});
      for (int s = 0; s < kScaleCount; ++s) scales[g][s] = Scales::scale(tile, index, s);
      if constexpr (Scales::kHasMinima) minima[g] = Scales::minimum(tile, index);
    }
  }
};

// Add to `totals` the products of a tile of rows with a panel, whose first group is `first`.
// Not inlined: some of its accumulators would be kept in memory.
template <typename F>
__attribute__((noinline)) void multiply_panel(const Panel<F>& panel, int first, int groups,
                                              const IntegerRows& rows, int tile, Floats* totals) {
  using P = Panel<F>;
  constexpr int kScalePairs = kPairs / P::kScaleCount;
  const std::int16_t* x = rows.tile_integers(tile, first);
  const float *scales = rows.tile_scales(tile, first), *sums = rows.tile_sums(tile, first);
  for (int g = 0; g < groups; ++g, scales += kPromptTile, sums += kPromptTile) {
    for (int s = 0; s < P::kScaleCount; ++s) {
      Ints products[kPromptTile];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i) products[i] = splat_int(0);
#pragma GCC unroll kUnrolledPairs
      for (int p = s * kScalePairs; p < (s + 1) * kScalePairs; ++p, x += 2 * kPromptTile) {
        const Ints codes = panel.codes[g][p];
#pragma GCC unroll 16
        for (int i = 0; i < kPromptTile; ++i)
          products[i] = add_int16_products(products[i], codes, splat_bytes(x + 2 * i));
      }
      const Floats scale = panel.scales[g][s];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i)
        totals[i] = multiply_add(to_floats(products[i]), scale * splat(P::Codes::kStep * scales[i]),
                                 totals[i]);
    }
    if constexpr (P::Scales::kHasMinima) {
      const Floats minimum = panel.minima[g];
#pragma GCC unroll 16
      for (int i = 0; i < kPromptTile; ++i)
        totals[i] = multiply_add(splat(sums[i]), minimum, totals[i]);
    }
  }
}

// Multiply tiles of rows from `first` on with some blocks. totals: [blocks, rows of the tiles].
template <typename F>
void multiply_blocks(const Matrix& matrix, int block, int blocks, const IntegerRows& rows,
                     int first, int tiles, Floats* totals) {
  Panel<F> panel;
  for (int i = 0; i < blocks * tiles * kPromptTile; ++i) totals[i] = zeros();
  for (int g = 0; g < rows.groups; g += kPanelGroups) {
    const int groups = std::min(kPanelGroups, rows.groups - g);
    Floats* to = totals;
    for (int b = 0; b < blocks; ++b) {
      panel.unpack(BlockPointers<F>(matrix, block + b), g, groups);
      for (int t = 0; t < tiles; ++t, to += kPromptTile)
        multiply_panel<F>(panel, g, groups, rows, first + t, to);
    }
  }
}

// Add the bias and store the products of `count` rows with a block, rounded to bf16.
void store_products(const Matrix& matrix, int block, const Floats* totals, int count, Bf16* out) {
  const int rows = rows_in_block(matrix, block);
  const Floats bias = matrix.bias ? load_first(matrix.bias + block * kBlock, rows) : zeros();
  for (int i = 0; i < count; ++i) {
    Bf16 line[kLanes];
    store_rounded(line, matrix.bias ? totals[i] + bias : totals[i]);
    std::memcpy(out + std::ptrdiff_t(i) * matrix.rows + block * kBlock, line, rows * sizeof *line);
  }
}

template <typename F>
int multiply_prompt(const Matrix& matrix, const Bf16* x, int count, Bf16* out, int threads) {
  IntegerRows rows(count, matrix.columns);
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
      multiply_blocks<F>(matrix, block, blocks, rows, tile, tiles, totals);
      for (int b = 0; b < blocks; ++b)
        store_products(matrix, block + b, totals + b * tiles * kPromptTile,
                       std::min(tiles * kPromptTile, count - first),
                       out + std::ptrdiff_t(first) * matrix.rows);
    });
  });
  return kDone;
}

}  // namespace
}  // namespace kvkeep

int kvkeep_prompt_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count,
                          kvkeep::Bf16* out, int threads) {
  using namespace kvkeep;
  return run_guarded([=] {
    int status = kNoKernel;
    for_format(
        matrix->format,
        [&](auto format) {
          status = multiply_prompt<decltype(format)>(*matrix, x, count, out, threads);
        },
        [] {});
    return status;
  });
}
