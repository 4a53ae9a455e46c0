#include "attention.h"

#include <algorithm>
#include <cstring>

namespace kvkeep {
namespace {

constexpr int kVectors = kBlockCells / kLanes;  // registers for the scores of one row
constexpr int kRows = 6;                        // rows attended at a time

// How many accumulators each of `rows` rows has at a time: at most `all`, a power of two.
constexpr int vectors_per_row(int rows, int all) {
  while (all > 1 && rows * all > kAccumulators) all /= 2;
  return all;
}

struct alignas(64) Scores {
  float of[kRows][kBlockCells];
};

// rescale: the factor of each row's earlier results, now that its maximum score has risen.
struct alignas(64) SoftmaxWeights {
  Activation of[kRows][kBlockCells];
  float rescale[kRows];
};

// Prefetch one of `parts` equal parts of the next block's keys, or of its values.
template <int kDim>
inline void prefetch_piece(const Bf16* x, std::ptrdiff_t stride, int cells, int piece, int pieces) {
  constexpr int kLine = 32;
  const int lines = kBlockCells * (kDim / kLine) / pieces;
  for (int i = piece * lines; i < (piece + 1) * lines; ++i) {
    const int cell = i / (kDim / kLine);
    if (cell < cells) prefetch(x + cell * stride + i % (kDim / kLine) * kLine);
  }
}

template <int kDim, int kCount>
void score(const PackedBlock<kDim>& block, const QueryRow* rows, Scores& scores,
           const Prefetch& next) {
  constexpr int kWide = vectors_per_row(kCount, kVectors);
  for (int first = 0; first < kBlockCells; first += kWide * kLanes) {
    Floats sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) sum[i][v] = zeros();
    for (int d = 0; d < kDim / 2; ++d) {
      if (next.cells && first == 0)
        prefetch_piece<kDim>(next.keys, next.key_stride, next.cells, d, kDim / 2);
      Bf16Pairs keys[kWide];
      for (int v = 0; v < kWide; ++v)
        keys[v] = as_pairs(load_ints(block.keys[d] + first + v * kLanes));
      for (int i = 0; i < kCount; ++i) {
        const Bf16Pairs query = splat_pair(rows[i].query + 2 * d);
        for (int v = 0; v < kWide; ++v) sum[i][v] = dot(sum[i][v], keys[v], query);
      }
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) store(scores.of[i] + first + v * kLanes, sum[i][v]);
  }
}

// Turn scores into softmax weights relative to the greatest score so far. Returns the factor of the
// row's earlier results: 1 where the maximum is unchanged. kWhole: the row sees all cells, without
// bias.
template <bool kWhole>
inline float online_softmax(const QueryRow& row, const ScoreParams& params, const float* scores,
                            Activation* weights) {
  Floats score[kVectors];
  Mask visible[kVectors];
  Floats highest = splat(row.state->max);
  for (int v = 0; v < kVectors; ++v) {
    score[v] = load(scores + v * kLanes) * splat(params.scale * kLog2E);
    if (params.softcap) {
      const float cap = params.softcap * kLog2E;
      score[v] = tanh(score[v] * splat(1 / cap)) * splat(cap);
    }
    visible[v] = all_lanes();
    if constexpr (!kWhole) {
      visible[v] =
          mask_and_not(lanes_below(row.end - v * kLanes), lanes_below(row.begin - v * kLanes));
      for (const float* from : {row.bias, row.cell_bias}) {
        if (!from) continue;
        const Floats bias = masked_load(visible[v], from + v * kLanes);
        score[v] = multiply_add(bias, splat(kLog2E), score[v]);
        visible[v] = greater(visible[v], score[v], splat(kMaskedScore));
      }
    }
    highest = masked_max(visible[v], highest, score[v]);
  }
  const float greatest = reduce_max(highest);
  highest = splat(greatest);
  Floats total = zeros();
  for (int v = 0; v < kVectors; ++v) {
    const Floats weight = select(visible[v], exp2(score[v] - highest));
    total = total + weight;
    store_rounded(weights + v * kLanes, weight);
  }
  const float rescale = first_lane(exp2(splat(row.state->max - greatest)));
  row.state->max = greatest;
  row.state->sum = row.state->sum * rescale + reduce_add(total);
  return rescale;
}

inline float online_softmax(const QueryRow& row, const ScoreParams& params, const float* scores,
                            Activation* weights) {
  const bool whole = row.begin == 0 && row.end == kBlockCells && !row.bias && !row.cell_bias;
  return whole ? online_softmax<true>(row, params, scores, weights)
               : online_softmax<false>(row, params, scores, weights);
}

template <int kDim, int kCount>
void weigh_values(const PackedBlock<kDim>& block, const QueryRow* rows,
                  const SoftmaxWeights& weights, int pairs, const Prefetch& next) {
  constexpr int kWide = vectors_per_row(kCount, kDim % 64 == 0 ? 4 : 2);
  for (int first = 0; first < kDim; first += kWide * kLanes) {
    Floats sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v)
        sum[i][v] = load(rows[i].out + first + v * kLanes) * splat(weights.rescale[i]);
    for (int c = 0; c < pairs; ++c) {
      if (next.cells && first == 0)
        prefetch_piece<kDim>(next.values, next.value_stride, next.cells, c, kBlockCells / 2);
      Bf16Pairs values[kWide];
      for (int v = 0; v < kWide; ++v)
        values[v] = as_pairs(load_ints(block.values[c] + first + v * kLanes));
      for (int i = 0; i < kCount; ++i) {
        const Bf16Pairs weight = splat_pair(weights.of[i] + 2 * c);
        for (int v = 0; v < kWide; ++v) sum[i][v] = dot(sum[i][v], values[v], weight);
      }
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) store(rows[i].out + first + v * kLanes, sum[i][v]);
  }
}

template <int kDim, int kCount>
void attend_rows(const PackedBlock<kDim>& block, const ScoreParams& params, QueryRow* rows,
                 const Prefetch& next) {
  Scores scores;
  SoftmaxWeights weights;
  score<kDim, kCount>(block, rows, scores, next);
  int cells = 0;
  for (int i = 0; i < kCount; ++i) {
    weights.rescale[i] = online_softmax(rows[i], params, scores.of[i], weights.of[i]);
    cells = std::max(cells, rows[i].end);
  }
  weigh_values<kDim, kCount>(block, rows, weights, (std::min(cells, kBlockCells) + 1) / 2, next);
}

#if defined(__AMX_BF16__)
// Attend with at most 16 rows. Rows beyond `count` get no weights.
template <int kDim>
void attend_tile_rows(const PackedBlock<kDim>& block, const ScoreParams& params, QueryRow* rows,
                      int count) {
  alignas(64) float scores[kTileRows][kBlockCells];
  alignas(64) Activation weights[kTileRows][kBlockCells];
  multiply_keys<kDim>(rows[0].query, block.keys, scores);
  for (int i = 0; i < count; ++i) {
    const float rescale = online_softmax(rows[i], params, scores[i], weights[i]);
    if (rescale == 1.f) continue;
    for (int d = 0; d < kDim; d += kLanes)
      store(rows[i].out + d, load(rows[i].out + d) * splat(rescale));
  }
  std::fill_n(weights[0] + count * kBlockCells, (kTileRows - count) * kBlockCells, Activation{});
  add_weighted_values<kDim>(weights, block.values, rows[0].out);
}
#endif

// Cells of a block in bf16, dequantised where they are quantised.
template <int kDim>
struct Bf16Cells {
  const Bf16* cells;
  std::ptrdiff_t stride;

  Bf16Cells(const HeadCells& from, int begin, int end, Hadamard params, Bf16* scratch)
      : cells(from.plain_data()), stride(from.plain_stride()) {
    if (!from.quantised()) return;
    cells = scratch, stride = kDim;
    for (int c = begin; c < end; ++c) {
      Vector<kDim> x;
      dequantise<kDim>(from.advanced(c), x);
      if (params == Hadamard::kUndone) hadamard<kDim>(x);
      store_rounded<kDim>(scratch + c * kDim, x);
    }
  }
};

template <int kDim>
void pack(const Bf16* keys, std::ptrdiff_t key_stride, const Bf16* values,
          std::ptrdiff_t value_stride, int begin, int end, PackedBlock<kDim>& to) {
  const auto exists = [=](int c) { return begin <= c && c < end; };
  for (int c = 0; c < kBlockCells; c += kLanes) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      Ints square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = exists(c + i) ? load_ints(keys + (c + i) * key_stride + d) : splat_int(0);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store_ints(to.keys[d / 2 + i] + c, square[i]);
    }
  }
  const Ints nothing = splat_int(0);
  for (int c = 0; c < kBlockCells; c += 2) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      const Ints even = exists(c) ? load_ints(values + c * value_stride + d) : nothing;
      const Ints odd = exists(c + 1) ? load_ints(values + (c + 1) * value_stride + d) : nothing;
      Ints first, second;
      interleave(even, odd, first, second);
      store_ints(to.values[c / 2] + d, first);
      store_ints(to.values[c / 2] + d + kLanes, second);
    }
  }
}

}  // namespace

template <int kDim>
void pack(const HeadCells& keys, const HeadCells& values, int begin, int end, Hadamard params,
          PackedBlock<kDim>& to) {
  Bf16 scratch[2][kBlockCells * kDim];
  const Bf16Cells<kDim> k(keys, begin, end, params, scratch[0]),
      v(values, begin, end, params, scratch[1]);
  pack<kDim>(k.cells, k.stride, v.cells, v.stride, begin, end, to);
}

template <int kDim>
void replace_cell(const HeadCells& key, const HeadCells& value, int cell, PackedBlock<kDim>& to) {
  Bf16 scratch[2][kDim];
  const Bf16Cells<kDim> k(key, 0, 1, Hadamard::kKept, scratch[0]),
      v(value, 0, 1, Hadamard::kKept, scratch[1]);
  for (int d = 0; d < kDim; d += 2)
    std::memcpy(&to.keys[d / 2][cell], k.cells + d, sizeof to.keys[0][0]);
  // A pair of cells lies side by side for each dimension.
  auto* values = reinterpret_cast<char*>(to.values[cell / 2]) + cell % 2 * sizeof(Bf16);
  for (int d = 0; d < kDim; ++d)
    std::memcpy(values + d * sizeof to.values[0][0], v.cells + d, sizeof(Bf16));
}

template <int kDim>
void attend(const PackedBlock<kDim>& block, const ScoreParams& params, QueryRow* rows, int count,
            const Prefetch& next) {
  // Each pass over the block prefetches a part of the next block.
  const int passes = (count + kRows - 1) / kRows;
  const int cells = (next.cells + passes - 1) / std::max(passes, 1);
  Prefetch pieces_ahead = next;
  pieces_ahead.cells = std::min(cells, next.cells);
  for (int left = next.cells; count >= kRows; rows += kRows, count -= kRows) {
    attend_rows<kDim, kRows>(block, params, rows, pieces_ahead);
    pieces_ahead.keys += cells * pieces_ahead.key_stride,
        pieces_ahead.values += cells * pieces_ahead.value_stride;
    left -= pieces_ahead.cells;
    pieces_ahead.cells = std::min(cells, left);
  }
  switch (count) {
    case 1: return attend_rows<kDim, 1>(block, params, rows, pieces_ahead);
    case 2: return attend_rows<kDim, 2>(block, params, rows, pieces_ahead);
    case 3: return attend_rows<kDim, 3>(block, params, rows, pieces_ahead);
    case 4: return attend_rows<kDim, 4>(block, params, rows, pieces_ahead);
    case 5: return attend_rows<kDim, 5>(block, params, rows, pieces_ahead);
    default: return;
  }
}

template <int kDim>
void attend_prompt(const PackedBlock<kDim>& block, const ScoreParams& params, QueryRow* rows,
                   int count) {
#if defined(__AMX_BF16__)
  for (; count > 0; rows += kTileRows, count -= kTileRows)
    attend_tile_rows<kDim>(block, params, rows, std::min(count, kTileRows));
#else
  attend<kDim>(block, params, rows, count, Prefetch{});
#endif
}

#define KVKEEP_FOR(kDim)                                                                         \
  template void pack<kDim>(const HeadCells&, const HeadCells&, int, int, Hadamard,               \
                           PackedBlock<kDim>&);                                                  \
  template void replace_cell<kDim>(const HeadCells&, const HeadCells&, int, PackedBlock<kDim>&); \
  template void attend<kDim>(const PackedBlock<kDim>&, const ScoreParams&, QueryRow*, int,       \
                             const Prefetch&);                                                   \
  template void attend_prompt<kDim>(const PackedBlock<kDim>&, const ScoreParams&, QueryRow*, int);
KVKEEP_FOR(32)
KVKEEP_FOR(64)
KVKEEP_FOR(96)
KVKEEP_FOR(128)
KVKEEP_FOR(256)
KVKEEP_FOR(512)
#undef KVKEEP_FOR

}  // namespace kvkeep
