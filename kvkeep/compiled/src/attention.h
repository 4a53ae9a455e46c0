// Attention of some query rows over blocks of 64 cells of one KV head, with a running softmax
// (arXiv:1805.02867; by blocks as in flash attention, arXiv:2205.14135).
#pragma once

#include <type_traits>

#include "cells.h"

namespace kvkeep {

constexpr int kBlockCells = 64;         // cells in a block
constexpr float kMaskedScore = -1e29f;  // scores below it are of hidden cells
constexpr float kNoScore = -1e30f;      // the greatest score of a row that has seen no cell

// Keys and values of one block, laid out for the products: pairs of dimensions, and pairs of cells,
// side by side. Cells that are not there are zeros.
template <int kDim>
struct PackedBlock {
  alignas(64) std::uint32_t keys[kDim / 2][kBlockCells];
  alignas(64) std::uint32_t values[kBlockCells / 2][kDim];
};

// What a row has found so far: `sum` of 2 to the power of its scores less `most`, and values
// weighted by these powers.
//
// For example, a row's scores are 3 and 1 in the first block, 5 and 3 in the second. After the
// first `most` is 3 and `sum` 2^0 + 2^-2 = 1.25; `out` is v0 + v1 / 4. The second raises `most` to
// 5: what was found is worth 2^(3 - 5) of itself, so `sum` becomes 1.25 / 4 + 2^0 + 2^-2 = 1.5625,
// and `out` (v0 + v1 / 4) / 4 + v2 + v3 / 4. Divided by `sum` at the end, that is the softmax over
// all four. Two threads that took a block each find (3, 1.25) and (5, 1.25), and are merged by the
// same rule. A block of which a row sees nothing, [begin, end) empty, leaves `most` at kNothing and
// `sum` at 0.
struct SoftmaxState {
  float most = kNoScore;
  float sum = 0.f;
};

// One row's part in a call. bias: for the cells of the block, or null; cell_bias: likewise, of the
// cells themselves. begin, end: the stretch of
// the block that it sees; other cells do not exist, or are not for it.
struct QueryRow {
  const Activation* query;
  const float* bias;
  const float* cell_bias;
  int begin, end;
  SoftmaxState* found;
  float* out;  // [kDim]
};

// What becomes of quantised cells: they stay transformed, or they are what they were before.
enum class Hadamard { kKept, kUndone };

// keys, values: from the block's first cell on. Of the block, the cells from `begin` up to `end`
// are there.
template <int kDim>
void pack(const HeadCells& keys, const HeadCells& values, int begin, int end, Hadamard how,
          PackedBlock<kDim>& to);

// Cells that will be packed next. Asking for them bit by bit while others are attended to keeps the
// memory busy, which is what a long context waits for.
struct Prefetch {
  const Bf16* keys;
  const Bf16* values;
  std::ptrdiff_t key_stride, value_stride;
  int cells;  // 0 where there are none
};

// What becomes of the products of queries and keys. softcap: c in c * tanh(x / c), of scaled ones
// (arXiv:2408.00118); 0 for none.
struct ScoreParams {
  float scale, softcap;
};

// Calls `with(width)`, a constant, for a width of heads that there are kernels for. False for
// others.
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
void attend(const PackedBlock<kDim>& block, const ScoreParams& how, QueryRow* rows, int count,
            const Prefetch& ahead);

}  // namespace kvkeep
