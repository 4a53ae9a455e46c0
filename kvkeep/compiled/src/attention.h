// Attention of query rows over blocks of 64 cells of one KV head, with an online softmax
// (arXiv:1805.02867; by blocks as in FlashAttention, arXiv:2205.14135).
#pragma once

#include <type_traits>

#include "cells.h"
#if defined(__AMX_BF16__)
#include "tiles_amx.h"
#endif

namespace kvkeep {

#if !defined(__AMX_BF16__)
struct TileScope {  // no tiles to configure
  TileScope() {}
};
#endif

constexpr int kBlockCells = 64;         // cells in a block
constexpr float kMaskedScore = -1e29f;  // lower scores are of masked cells
constexpr float kNoScore = -1e30f;      // the maximum score of a row that has seen no cell

// Keys and values of one block, laid out for the products: pairs of dimensions, and pairs of cells,
// side by side. Missing cells are zeros.
template <int kDim>
struct PackedBlock {
  alignas(64) std::uint32_t keys[kDim / 2][kBlockCells];
  alignas(64) std::uint32_t values[kBlockCells / 2][kDim];
};

// The online softmax of one row: `max` is its greatest score so far, `sum` the sum of 2 to the
// power of each score less `max`. The row's output is the sum of values weighted by these powers.
//
// For example, a row's scores are 3 and 1 in the first block, 5 and 3 in the second. After the
// first, `max` is 3 and `sum` 2^0 + 2^-2 = 1.25; `out` is v0 + v1 / 4. The second raises `max` to
// 5, which scales earlier results by 2^(3 - 5): `sum` becomes 1.25 / 4 + 2^0 + 2^-2 = 1.5625, and
// `out` (v0 + v1 / 4) / 4 + v2 + v3 / 4. Divided by `sum` at the end, that is the softmax over all
// four. Two threads that take a block each end with (3, 1.25) and (5, 1.25), which merge by the
// same rule. A block that a row does not see, [begin, end) empty, leaves `max` at kNoScore and
// `sum` at 0.
struct SoftmaxState {
  float max = kNoScore;
  float sum = 0.f;
};

// One query row and its view of a block. bias: of the block's cells for this query, or null.
// cell_bias: of the cells for all queries, or null. begin, end: the range of the block that the row
// sees; other cells do not exist or are masked.
struct QueryRow {
  const Activation* query;
  const float* bias;
  const float* cell_bias;
  int begin, end;
  SoftmaxState* state;
  float* out;  // [kDim]
};

// Whether quantised cells are packed in the Hadamard basis that they are stored in, or transformed
// back.
enum class Hadamard { kKept, kUndone };

// Pack a block's cells from `begin` to `end`; the others become zeros. keys, values: from the
// block's first cell on.
template <int kDim>
void pack(const HeadCells& keys, const HeadCells& values, int begin, int end, Hadamard params,
          PackedBlock<kDim>& to);

// Replace one cell of a packed block by the first of these cells.
template <int kDim>
void replace_cell(const HeadCells& key, const HeadCells& value, int cell, PackedBlock<kDim>& to);

// Cells of the next block, to be prefetched piece by piece during attention: long contexts are
// bound by memory, which this keeps busy.
struct Prefetch {
  const Bf16* keys;
  const Bf16* values;
  std::ptrdiff_t key_stride, value_stride;
  int cells;  // 0 for none
};

// How products of queries and keys become scores. softcap: c in c * tanh(x / c), of scaled products
// (arXiv:2408.00118); 0 for none.
struct ScoreParams {
  float scale, softcap;
};

// Call `with(width)` with a supported head width as a constant. Returns False for other widths.
template <typename With>
bool for_head_dim(int head_dim, With with) {
  switch (head_dim) {
    case 32: with(std::integral_constant<int, 32>{}); return true;
    case 64: with(std::integral_constant<int, 64>{}); return true;
    case 96: with(std::integral_constant<int, 96>{}); return true;
    case 128: with(std::integral_constant<int, 128>{}); return true;
    case 256: with(std::integral_constant<int, 256>{}); return true;
    case 512: with(std::integral_constant<int, 512>{}); return true;
    default: return false;
  }
}

template <int kDim>
void attend(const PackedBlock<kDim>& block, const ScoreParams& params, QueryRow* rows, int count,
            const Prefetch& next);

// Attend with rows of a prompt: by tiles where the set has them, else as `attend` does. The thread
// needs a TileScope. Queries of consecutive rows are kDim apart, and so are their outputs; both
// have memory for a multiple of 16 rows. Other rows do not change the bits of a row's result.
template <int kDim>
void attend_prompt(const PackedBlock<kDim>& block, const ScoreParams& params, QueryRow* rows,
                   int count);

}  // namespace kvkeep
