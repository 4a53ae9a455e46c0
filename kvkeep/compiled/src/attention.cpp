#include "attention.h"

#include <algorithm>

namespace kvkeep {
namespace {

constexpr int kVectors = kCells / kLanes;  // registers for the scores of one row
constexpr int kRows = 6;                   // rows at a time

// How many registers of sums each of so many rows has at a time, of `all`, a power of two.
constexpr int wide(int rows, int all) {
  while (all > 1 && rows * all > kSums) all /= 2;
  return all;
}

struct alignas(64) Scores {
  float of[kRows][kCells];
};

// less: what each row found before is scaled by, now that a greater score has come.
struct alignas(64) Shares {
  Activation of[kRows][kCells];
  float less[kRows];
};

// The `part`-th of `kDim / 2` parts of the keys, or of `kCells / 2` parts of the values.
template <int kDim>
inline void ask(const Bf16* x, long stride, int cells, int part, int parts) {
  constexpr int kLine = 32;
  const int lines = kCells * (kDim / kLine) / parts;
  for (int i = part * lines; i < (part + 1) * lines; ++i) {
    const int cell = i / (kDim / kLine);
    if (cell < cells) prefetch(x + cell * stride + i % (kDim / kLine) * kLine);
  }
}

template <int kDim, int kCount>
void score(const Packed<kDim>& block, const Row* rows, Scores& scores, const Ahead& ahead) {
  constexpr int kWide = wide(kCount, kVectors);
  for (int first = 0; first < kCells; first += kWide * kLanes) {
    Floats sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) sum[i][v] = zeros();
    for (int d = 0; d < kDim / 2; ++d) {
      if (ahead.cells && first == 0)
        ask<kDim>(ahead.keys, ahead.key_stride, ahead.cells, d, kDim / 2);
      Paired keys[kWide];
      for (int v = 0; v < kWide; ++v)
        keys[v] = paired(load_ints(block.keys[d] + first + v * kLanes));
      for (int i = 0; i < kCount; ++i) {
        const Paired query = spread(rows[i].query + 2 * d);
        for (int v = 0; v < kWide; ++v) sum[i][v] = dot(sum[i][v], keys[v], query);
      }
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v) store(scores.of[i] + first + v * kLanes, sum[i][v]);
  }
}

// Scores become shares relative to the greatest so far. Returns what was found before in units of
// that: 1 where no greater one has come. kWhole: the row sees all cells, without bias.
template <bool kWhole>
inline float online_softmax(const Row& row, const Scoring& how, const float* scores, Activation* shares) {
  Floats score[kVectors];
  Mask seen[kVectors];
  Floats most = all(row.found->most);
  for (int v = 0; v < kVectors; ++v) {
    score[v] = load(scores + v * kLanes) * all(how.scale * kLog2E);
    if (how.softcap) {
      const float cap = how.softcap * kLog2E;
      score[v] = tanh(score[v] * all(1 / cap)) * all(cap);
    }
    seen[v] = all_lanes();
    if constexpr (!kWhole) {
      seen[v] = without(lanes_below(row.end - v * kLanes), lanes_below(row.begin - v * kLanes));
      for (const float* from : {row.bias, row.cell_bias}) {
        if (!from) continue;
        const Floats bias = load_where(seen[v], from + v * kLanes);
        score[v] = multiply_add(bias, all(kLog2E), score[v]);
        seen[v] = greater(seen[v], score[v], all(kHidden));
      }
    }
    most = max_where(seen[v], most, score[v]);
  }
  const float greatest = greatest_of(most);
  most = all(greatest);
  Floats total = zeros();
  for (int v = 0; v < kVectors; ++v) {
    const Floats share = where(seen[v], exp2(score[v] - most));
    total = total + share;
    store_rounded(shares + v * kLanes, share);
  }
  const float less = first_of(exp2(all(row.found->most - greatest)));
  row.found->most = greatest;
  row.found->sum = row.found->sum * less + sum_of(total);
  return less;
}

template <int kDim, int kCount>
void weigh_values(const Packed<kDim>& block, const Row* rows, const Shares& shares, int pairs,
            const Ahead& ahead) {
  constexpr int kWide = wide(kCount, kDim % 64 == 0 ? 4 : 2);
  for (int first = 0; first < kDim; first += kWide * kLanes) {
    Floats sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v)
        sum[i][v] = load(rows[i].out + first + v * kLanes) * all(shares.less[i]);
    for (int c = 0; c < pairs; ++c) {
      if (ahead.cells && first == 0)
        ask<kDim>(ahead.values, ahead.value_stride, ahead.cells, c, kCells / 2);
      Paired values[kWide];
      for (int v = 0; v < kWide; ++v)
        values[v] = paired(load_ints(block.values[c] + first + v * kLanes));
      for (int i = 0; i < kCount; ++i) {
        const Paired share = spread(shares.of[i] + 2 * c);
        for (int v = 0; v < kWide; ++v) sum[i][v] = dot(sum[i][v], values[v], share);
      }
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v)
        store(rows[i].out + first + v * kLanes, sum[i][v]);
  }
}

template <int kDim, int kCount>
void attend_some(const Packed<kDim>& block, const Scoring& how, Row* rows, const Ahead& ahead) {
  Scores scores;
  Shares shares;
  score<kDim, kCount>(block, rows, scores, ahead);
  int cells = 0;
  for (int i = 0; i < kCount; ++i) {
    const bool whole =
        rows[i].begin == 0 && rows[i].end == kCells && !rows[i].bias && !rows[i].cell_bias;
    const auto softmax = whole ? online_softmax<true> : online_softmax<false>;
    shares.less[i] = softmax(rows[i], how, scores.of[i], shares.of[i]);
    cells = std::max(cells, rows[i].end);
  }
  weigh_values<kDim, kCount>(block, rows, shares, (std::min(cells, kCells) + 1) / 2, ahead);
}

// Cells of a block in bf16.
template <int kDim>
struct Plain {
  const Bf16* cells;
  long stride;

  Plain(const Stretch& from, int begin, int end, Hadamard how, Bf16* room)
      : cells(from.plain()), stride(from.plain_stride()) {
    if (!from.quantised()) return;
    cells = room, stride = kDim;
    for (int c = begin; c < end; ++c) {
      Vector<kDim> x;
      dequantise<kDim>(from.from(c), x);
      if (how == Hadamard::kUndone) hadamard<kDim>(x);
      store_rounded<kDim>(room + c * kDim, x);
    }
  }
};

template <int kDim>
void pack(const Bf16* keys, long key_stride, const Bf16* values, long value_stride, int begin,
          int end, Packed<kDim>& to) {
  const auto there = [=](int c) { return begin <= c && c < end; };
  for (int c = 0; c < kCells; c += kLanes) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      Ints square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = there(c + i) ? load_ints(keys + (c + i) * key_stride + d) : ints(0);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store_ints(to.keys[d / 2 + i] + c, square[i]);
    }
  }
  const Ints nothing = ints(0);
  for (int c = 0; c < kCells; c += 2) {
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
void pack(const Stretch& keys, const Stretch& values, int begin, int end, Hadamard how,
          Packed<kDim>& to) {
  Bf16 room[2][kCells * kDim];
  const Plain<kDim> k(keys, begin, end, how, room[0]), v(values, begin, end, how, room[1]);
  pack<kDim>(k.cells, k.stride, v.cells, v.stride, begin, end, to);
}

template <int kDim>
void attend(const Packed<kDim>& block, const Scoring& how, Row* rows, int count, const Ahead& ahead) {
  // Each pass over the block asks for a part of what comes next.
  const int passes = (count + kRows - 1) / kRows;
  const int cells = (ahead.cells + passes - 1) / std::max(passes, 1);
  Ahead some = ahead;
  some.cells = std::min(cells, ahead.cells);
  for (int left = ahead.cells; count >= kRows; rows += kRows, count -= kRows) {
    attend_some<kDim, kRows>(block, how, rows, some);
    some.keys += cells * some.key_stride, some.values += cells * some.value_stride;
    left -= some.cells;
    some.cells = std::min(cells, left);
  }
  switch (count) {
    case 1: return attend_some<kDim, 1>(block, how, rows, some);
    case 2: return attend_some<kDim, 2>(block, how, rows, some);
    case 3: return attend_some<kDim, 3>(block, how, rows, some);
    case 4: return attend_some<kDim, 4>(block, how, rows, some);
    case 5: return attend_some<kDim, 5>(block, how, rows, some);
    default: return;
  }
}

#define KVKEEP_FOR(kDim)                                                                     \
  template void pack<kDim>(const Stretch&, const Stretch&, int, int, Hadamard, Packed<kDim>&);  \
  template void attend<kDim>(const Packed<kDim>&, const Scoring&, Row*, int, const Ahead&);
KVKEEP_FOR(32)
KVKEEP_FOR(64)
KVKEEP_FOR(96)
KVKEEP_FOR(128)
KVKEEP_FOR(256)
KVKEEP_FOR(512)
#undef KVKEEP_FOR

}  // namespace kvkeep
