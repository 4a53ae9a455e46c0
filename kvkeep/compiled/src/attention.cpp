#include "attention.h"

#include <algorithm>

namespace kvkeep {
namespace {

constexpr int kVectors = kCells / kLanes;  // registers for the scores of one row
constexpr int kRows = 6;                   // rows at a time: 24 registers of sums

struct alignas(64) Scores {
  float of[kRows][kCells];
};

// less: what each row found before is scaled by, now that a greater score has come.
struct alignas(64) Shares {
  Bf16 of[kRows][kCells];
  float less[kRows];
};

__mmask16 lanes_below(int lane) {
  return static_cast<__mmask16>((1u << std::clamp(lane, 0, kLanes)) - 1);
}

// The `part`-th of `kDim / 2` parts of the keys, or of `kCells / 2` parts of the values.
template <int kDim>
inline void ask(const Bf16* x, long stride, int cells, int part, int parts) {
  constexpr int kLine = 32;
  const int lines = kCells * (kDim / kLine) / parts;
  for (int i = part * lines; i < (part + 1) * lines; ++i) {
    const int cell = i / (kDim / kLine);
    if (cell < cells)
      _mm_prefetch(reinterpret_cast<const char*>(x + cell * stride + i % (kDim / kLine) * kLine),
                   _MM_HINT_T0);
  }
}

template <int kDim, int kCount>
void score(const Packed<kDim>& block, const Row* rows, Scores& scores, const Ahead& ahead) {
  __m512 sum[kCount][kVectors];
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kVectors; ++v) sum[i][v] = _mm512_setzero_ps();
  for (int d = 0; d < kDim / 2; ++d) {
    if (ahead.cells) ask<kDim>(ahead.keys, ahead.key_stride, ahead.cells, d, kDim / 2);
    __m512i keys[kVectors];
    for (int v = 0; v < kVectors; ++v) keys[v] = load(block.keys[d] + v * kLanes);
    for (int i = 0; i < kCount; ++i) {
      const __m512i query = pair(rows[i].query + 2 * d);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = dot(sum[i][v], keys[v], query);
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(scores.of[i] + v * kLanes, sum[i][v]);
}

// Scores become shares relative to the greatest so far. Returns what was found before in units of
// that: 1 where no greater one has come. kWhole: the row sees all cells, without bias.
template <bool kWhole>
inline float online_softmax(const Row& row, float scale, const float* scores, Bf16* shares) {
  __m512 score[kVectors];
  __mmask16 seen[kVectors];
  __m512 most = _mm512_set1_ps(row.found->most);
  for (int v = 0; v < kVectors; ++v) {
    score[v] = _mm512_mul_ps(_mm512_load_ps(scores + v * kLanes), _mm512_set1_ps(scale * kLog2E));
    seen[v] = 0xffff;
    if constexpr (!kWhole) {
      seen[v] = lanes_below(row.end - v * kLanes) & ~lanes_below(row.begin - v * kLanes);
      for (const float* from : {row.bias, row.cell_bias}) {
        if (!from) continue;
        const __m512 bias = _mm512_maskz_loadu_ps(seen[v], from + v * kLanes);
        score[v] = _mm512_fmadd_ps(bias, _mm512_set1_ps(kLog2E), score[v]);
        seen[v] = _mm512_mask_cmp_ps_mask(seen[v], score[v], _mm512_set1_ps(kHidden), _CMP_GT_OQ);
      }
    }
    most = _mm512_mask_max_ps(most, seen[v], most, score[v]);
  }
  const float greatest = _mm512_reduce_max_ps(most);
  most = _mm512_set1_ps(greatest);
  __m512 total = _mm512_setzero_ps();
  for (int v = 0; v < kVectors; ++v) {
    const __m512 share = _mm512_maskz_mov_ps(seen[v], exp2(_mm512_sub_ps(score[v], most)));
    total = _mm512_add_ps(total, share);
    store_bf16(shares + v * kLanes, share);
  }
  const float less = _mm512_cvtss_f32(exp2(_mm512_set1_ps(row.found->most - greatest)));
  row.found->most = greatest;
  row.found->sum = row.found->sum * less + _mm512_reduce_add_ps(total);
  return less;
}

template <int kDim, int kCount>
void weigh_values(const Packed<kDim>& block, const Row* rows, const Shares& shares, int pairs,
            const Ahead& ahead) {
  constexpr int kWide = kDim % 64 == 0 ? 4 : 2;  // registers of dimensions at a time
  for (int first = 0; first < kDim; first += kWide * kLanes) {
    __m512 sum[kCount][kWide];
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v)
        sum[i][v] = _mm512_mul_ps(_mm512_loadu_ps(rows[i].out + first + v * kLanes),
                                  _mm512_set1_ps(shares.less[i]));
    for (int c = 0; c < pairs; ++c) {
      if (ahead.cells && first == 0)
        ask<kDim>(ahead.values, ahead.value_stride, ahead.cells, c, kCells / 2);
      __m512i values[kWide];
      for (int v = 0; v < kWide; ++v) values[v] = load(block.values[c] + first + v * kLanes);
      for (int i = 0; i < kCount; ++i) {
        const __m512i share = pair(shares.of[i] + 2 * c);
        for (int v = 0; v < kWide; ++v) sum[i][v] = dot(sum[i][v], values[v], share);
      }
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kWide; ++v)
        _mm512_storeu_ps(rows[i].out + first + v * kLanes, sum[i][v]);
  }
}

template <int kDim, int kCount>
void attend_some(const Packed<kDim>& block, float scale, Row* rows, const Ahead& ahead) {
  Scores scores;
  Shares shares;
  score<kDim, kCount>(block, rows, scores, ahead);
  int cells = 0;
  for (int i = 0; i < kCount; ++i) {
    const bool whole =
        rows[i].begin == 0 && rows[i].end == kCells && !rows[i].bias && !rows[i].cell_bias;
    const auto how = whole ? online_softmax<true> : online_softmax<false>;
    shares.less[i] = how(rows[i], scale, scores.of[i], shares.of[i]);
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
      store<kDim>(room + c * kDim, x);
    }
  }
};

template <int kDim>
void pack(const Bf16* keys, long key_stride, const Bf16* values, long value_stride, int begin,
          int end, Packed<kDim>& to) {
  const auto there = [=](int c) { return begin <= c && c < end; };
  for (int c = 0; c < kCells; c += kLanes) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      __m512i square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = there(c + i) ? load(keys + (c + i) * key_stride + d) : _mm512_setzero_si512();
      transpose(square);
      for (int i = 0; i < kLanes; ++i) _mm512_store_si512(to.keys[d / 2 + i] + c, square[i]);
    }
  }
  const __m512i nothing = _mm512_setzero_si512();
  for (int c = 0; c < kCells; c += 2) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      const __m512i even = there(c) ? load(values + c * value_stride + d) : nothing;
      const __m512i odd = there(c + 1) ? load(values + (c + 1) * value_stride + d) : nothing;
      // Halves of each are dimensions d ... d + 15 and d + 16 ... d + 31.
      const auto widen = [](__m512i x, bool upper) {
        return _mm512_cvtepu16_epi32(upper ? _mm512_extracti64x4_epi64(x, 1)
                                           : _mm512_castsi512_si256(x));
      };
      for (const bool upper : {false, true})
        _mm512_store_si512(
            to.values[c / 2] + d + (upper ? kLanes : 0),
            _mm512_or_si512(widen(even, upper), _mm512_slli_epi32(widen(odd, upper), 16)));
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
void attend(const Packed<kDim>& block, float scale, Row* rows, int count, const Ahead& ahead) {
  // Each pass over the block asks for a part of what comes next.
  const int passes = (count + kRows - 1) / kRows;
  const int cells = (ahead.cells + passes - 1) / std::max(passes, 1);
  Ahead some = ahead;
  some.cells = std::min(cells, ahead.cells);
  for (int left = ahead.cells; count >= kRows; rows += kRows, count -= kRows) {
    attend_some<kDim, kRows>(block, scale, rows, some);
    some.keys += cells * some.key_stride, some.values += cells * some.value_stride;
    left -= some.cells;
    some.cells = std::min(cells, left);
  }
  switch (count) {
    case 1: return attend_some<kDim, 1>(block, scale, rows, some);
    case 2: return attend_some<kDim, 2>(block, scale, rows, some);
    case 3: return attend_some<kDim, 3>(block, scale, rows, some);
    case 4: return attend_some<kDim, 4>(block, scale, rows, some);
    case 5: return attend_some<kDim, 5>(block, scale, rows, some);
    default: return;
  }
}

#define KVKEEP_FOR(kDim)                                                                     \
  template void pack<kDim>(const Stretch&, const Stretch&, int, int, Hadamard, Packed<kDim>&);  \
  template void attend<kDim>(const Packed<kDim>&, float, Row*, int, const Ahead&);
KVKEEP_FOR(32)
KVKEEP_FOR(64)
KVKEEP_FOR(96)
KVKEEP_FOR(128)
#undef KVKEEP_FOR

}  // namespace kvkeep
