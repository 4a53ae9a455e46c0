#include "attention.h"

#include <algorithm>

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
  float less[kRows];
};

// Prefetch one of `parts` equal parts of the next block's keys, or of its values.
template <int kDim>
inline void prefetch_part(const Bf16* x, std::ptrdiff_t stride, int cells, int part, int parts) {
  constexpr int kLine = 32;
  const int lines = kBlockCells * (kDim / kLine) / parts;
  for (int i = part * lines; i < (part + 1) * lines; ++i) {
    const int cell = i / (kDim / kLine);
    if (cell < cells) prefetch(x + cell * stride + i % (kDim / kLine) * kLine);
  }
}

template <int kDim, int kCount>
void score(const PackedBlock<kDim>& block, const QueryRow* rows, Scores& scores,
           const Prefetch& ahead) {
  constexpr int kWide = vectors_per_row(kCount, kVectors);
  for (int first = 0; first < kBlockCells; first += kWide * kLanes) {
    Floats sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) sum[i][v] = zeros();
    for (int d = 0; d < kDim / 2; ++d) {
      if (ahead.cells && first == 0)
        prefetch_part<kDim>(ahead.keys, ahead.key_stride, ahead.cells, d, kDim / 2);
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
inline float online_softmax(const QueryRow& row, const ScoreParams& how, const float* scores,
                            Activation* shares) {
  Floats score[kVectors];
  Mask seen[kVectors];
  Floats most = splat(row.found->most);
  for (int v = 0; v < kVectors; ++v) {
    score[v] = load(scores + v * kLanes) * splat(how.scale * kLog2E);
    if (how.softcap) {
      const float cap = how.softcap * kLog2E;
      score[v] = tanh(score[v] * splat(1 / cap)) * splat(cap);
    }
    seen[v] = all_lanes();
    if constexpr (!kWhole) {
      seen[v] =
          mask_and_not(lanes_below(row.end - v * kLanes), lanes_below(row.begin - v * kLanes));
      for (const float* from : {row.bias, row.cell_bias}) {
        if (!from) continue;
        const Floats bias = masked_load(seen[v], from + v * kLanes);
        score[v] = multiply_add(bias, splat(kLog2E), score[v]);
        seen[v] = greater(seen[v], score[v], splat(kMaskedScore));
      }
    }
    most = masked_max(seen[v], most, score[v]);
  }
  const float greatest = reduce_max(most);
  most = splat(greatest);
  Floats total = zeros();
  for (int v = 0; v < kVectors; ++v) {
    const Floats share = select(seen[v], exp2(score[v] - most));
    total = total + share;
    store_rounded(shares + v * kLanes, share);
  }
  const float less = first_lane(exp2(splat(row.found->most - greatest)));
  row.found->most = greatest;
  row.found->sum = row.found->sum * less + reduce_add(total);
  return less;
}

template <int kDim, int kCount>
void weigh_values(const PackedBlock<kDim>& block, const QueryRow* rows,
                  const SoftmaxWeights& shares, int pairs, const Prefetch& ahead) {
  constexpr int kWide = vectors_per_row(kCount, kDim % 64 == 0 ? 4 : 2);
  for (int first = 0; first < kDim; first += kWide * kLanes) {
    Floats sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v)
        sum[i][v] = load(rows[i].out + first + v * kLanes) * splat(shares.less[i]);
    for (int c = 0; c < pairs; ++c) {
      if (ahead.cells && first == 0)
        prefetch_part<kDim>(ahead.values, ahead.value_stride, ahead.cells, c, kBlockCells / 2);
      Bf16Pairs values[kWide];
      for (int v = 0; v < kWide; ++v)
        values[v] = as_pairs(load_ints(block.values[c] + first + v * kLanes));
      for (int i = 0; i < kCount; ++i) {
        const Bf16Pairs share = splat_pair(shares.of[i] + 2 * c);
        for (int v = 0; v < kWide; ++v) sum[i][v] = dot(sum[i][v], values[v], share);
      }
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) store(rows[i].out + first + v * kLanes, sum[i][v]);
  }
}

template <int kDim, int kCount>
void attend_rows(const PackedBlock<kDim>& block, const ScoreParams& how, QueryRow* rows,
                 const Prefetch& ahead) {
  Scores scores;
  SoftmaxWeights shares;
  score<kDim, kCount>(block, rows, scores, ahead);
  int cells = 0;
  for (int i = 0; i < kCount; ++i) {
    const bool whole =
        rows[i].begin == 0 && rows[i].end == kBlockCells && !rows[i].bias && !rows[i].cell_bias;
    const auto softmax = whole ? online_softmax<true> : online_softmax<false>;
    shares.less[i] = softmax(rows[i], how, scores.of[i], shares.of[i]);
    cells = std::max(cells, rows[i].end);
  }
  weigh_values<kDim, kCount>(block, rows, shares, (std::min(cells, kBlockCells) + 1) / 2, ahead);
}

// Cells of a block in bf16, dequantised where they are quantised.
template <int kDim>
struct Bf16Cells {
  const Bf16* cells;
  std::ptrdiff_t stride;

  Bf16Cells(const HeadCells& from, int begin, int end, Hadamard how, Bf16* room)
      : cells(from.plain_data()), stride(from.plain_stride()) {
    if (!from.quantised()) return;
    cells = room, stride = kDim;
    for (int c = begin; c < end; ++c) {
      Vector<kDim> x;
      dequantise<kDim>(from.advanced(c), x);
      if (how == Hadamard::kUndone) hadamard<kDim>(x);
      store_rounded<kDim>(room + c * kDim, x);
    }
  }
};

template <int kDim>
void pack(const Bf16* keys, std::ptrdiff_t key_stride, const Bf16* values,
          std::ptrdiff_t value_stride, int begin, int end, PackedBlock<kDim>& to) {
  const auto there = [=](int c) { return begin <= c && c < end; };
  for (int c = 0; c < kBlockCells; c += kLanes) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      Ints square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = there(c + i) ? load_ints(keys + (c + i) * key_stride + d) : splat_int(0);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store_ints(to.keys[d / 2 + i] + c, square[i]);
    }
  }
  const Ints nothing = splat_int(0);
  for (int c = 0; c < kBlockCells; c += 2) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      const Ints even = there(c) ? load_ints(values + c * value_stride + d) : nothing;
      const Ints odd = there(c + 1) ? load_ints(values + (c + 1) * value_stride + d) : nothing;
      Ints first, second;
      interleave(even, odd, first, second);
      store_ints(to.values[c / 2] + d, first);
      store_ints(to.values[c / 2] + d + kLanes, second);
    }
  }
}

}  // namespace

template <int kDim>
void pack(const HeadCells& keys, const HeadCells& values, int begin, int end, Hadamard how,
          PackedBlock<kDim>& to) {
  Bf16 room[2][kBlockCells * kDim];
  const Bf16Cells<kDim> k(keys, begin, end, how, room[0]), v(values, begin, end, how, room[1]);
  pack<kDim>(k.cells, k.stride, v.cells, v.stride, begin, end, to);
}

template <int kDim>
void attend(const PackedBlock<kDim>& block, const ScoreParams& how, QueryRow* rows, int count,
            const Prefetch& ahead) {
  // Each pass over the block prefetches a part of the next block.
  const int passes = (count + kRows - 1) / kRows;
  const int cells = (ahead.cells + passes - 1) / std::max(passes, 1);
  Prefetch some = ahead;
  some.cells = std::min(cells, ahead.cells);
  for (int left = ahead.cells; count >= kRows; rows += kRows, count -= kRows) {
    attend_rows<kDim, kRows>(block, how, rows, some);
    some.keys += cells * some.key_stride, some.values += cells * some.value_stride;
    left -= some.cells;
    some.cells = std::min(cells, left);
  }
  switch (count) {
    case 1: return attend_rows<kDim, 1>(block, how, rows, some);
    case 2: return attend_rows<kDim, 2>(block, how, rows, some);
    case 3: return attend_rows<kDim, 3>(block, how, rows, some);
    case 4: return attend_rows<kDim, 4>(block, how, rows, some);
    case 5: return attend_rows<kDim, 5>(block, how, rows, some);
    default: return;
  }
}

#define KVKEEP_FOR(kDim)                                                                   \
  template void pack<kDim>(const HeadCells&, const HeadCells&, int, int, Hadamard,         \
                           PackedBlock<kDim>&);                                            \
  template void attend<kDim>(const PackedBlock<kDim>&, const ScoreParams&, QueryRow*, int, \
                             const Prefetch&);
KVKEEP_FOR(32)
KVKEEP_FOR(64)
KVKEEP_FOR(96)
KVKEEP_FOR(128)
KVKEEP_FOR(256)
KVKEEP_FOR(512)
#undef KVKEEP_FOR

}  // namespace kvkeep
