// The recurrences of heads with a matrix [key_dim, value_dim] as their state, token by token.
//
// Each column of a state changes by itself. Columns are computed 32 or 16 at a time; of several
// tokens in a buffer that stays in the first cache.
#pragma once

#include <cmath>

#include "buffer.h"
#include "lanes.h"

namespace kvkeep {

// Vectors of one head for `count` tokens. keys, queries: of Mamba-2 B and C. values: replaced by
// the outputs.
struct HeadTokens {
  int count, key_dim;
  const float* keys;
  const float* queries;
  std::ptrdiff_t key_stride;
  float* values;
  std::ptrdiff_t value_stride;
  const float* decays;  // by which the state fades
  const float* rates;   // of Mamba-2: the sizes of steps
  std::ptrdiff_t rate_stride;

  const float* key(int t) const { return keys + t * key_stride; }
  const float* query(int t) const { return queries + t * key_stride; }
  float* value(int t) const { return values + t * value_stride; }
  float decay(int t) const { return decays[t * rate_stride]; }
  float rate(int t) const { return rates[t * rate_stride]; }
};

// Some columns of a state: rows of `stride` floats. from: null for zeros.
struct StateColumns {
  const float* from;
  float* to;
  std::ptrdiff_t stride;
  float* scratch;  // [key_dim, 32], for states between tokens
};

// Call `update(t, from, from_stride, to, to_stride)` for each token: the first one reads
// `columns.from`, the last one writes to `columns.to`.
template <int kWide, typename Update>
KVKEEP_INLINE void for_each_token(int count, const StateColumns& columns, Update update) {
  for (int t = 0; t < count; ++t) {
    const bool is_first = t == 0, is_last = t == count - 1;
    update(t, is_first ? columns.from : columns.scratch, is_first ? columns.stride : kWide * kLanes,
           is_last ? columns.to : columns.scratch, is_last ? columns.stride : kWide * kLanes);
  }
}

KVKEEP_INLINE Floats load_state(const float* from, std::ptrdiff_t at) {
  return from ? load(from + at) : zeros();
}

inline float dot_product(const float* a, const float* b, int size) {
  Floats sum = zeros();
  for (int i = 0; i < size; i += kLanes) sum = multiply_add(load(a + i), load(b + i), sum);
  return reduce_add(sum);
}

// The delta rule: S <- a S; S <- S + b k (v - S^T k)^T; out = S^T q. The update of a token and the
// products of the next one with the state are one pass, since
//
//   S^T q after the update = a S^T q before it + (k . q) b (v - a S^T k before it)
template <int kWide>
void apply_delta_rule(const HeadTokens& tokens, int column, const StateColumns& columns) {
  Floats by_key[kWide], by_query[kWide];
  const auto clear = [&] {
    for (int w = 0; w < kWide; ++w) by_key[w] = by_query[w] = zeros();
  };
  const auto read = [&](int t, int row, int w, Floats state) {
    by_key[w] = multiply_add(splat(tokens.key(t)[row]), state, by_key[w]);
    by_query[w] = multiply_add(splat(tokens.query(t)[row]), state, by_query[w]);
  };
  clear();
  if (columns.from)
    for (int row = 0; row < tokens.key_dim; ++row)
      for (int w = 0; w < kWide; ++w)
        read(0, row, w, load(columns.from + row * columns.stride + w * kLanes));
  for_each_token<kWide>(
      tokens.count, columns,
      [&](int t, const float* from, std::ptrdiff_t from_stride, float* to,
          std::ptrdiff_t to_stride) {
        const Floats decay = splat(tokens.decay(t)), rate = splat(tokens.rate(t));
        const Floats overlap = splat(dot_product(tokens.key(t), tokens.query(t), tokens.key_dim));
        float* value = tokens.value(t) + column;
        Floats added[kWide];
        for (int w = 0; w < kWide; ++w) {
          added[w] = subtract_product(load(value + w * kLanes), decay, by_key[w]) * rate;
          store(value + w * kLanes, multiply_add(overlap, added[w], decay * by_query[w]));
        }
        const float* key = tokens.key(t);
        const bool has_next = t + 1 < tokens.count;
        clear();
        for (int row = 0; row < tokens.key_dim; ++row)
          for (int w = 0; w < kWide; ++w) {
            const Floats before = load_state(from, row * from_stride + w * kLanes);
            const Floats after = multiply_add(splat(key[row]), added[w], before * decay);
            store(to + row * to_stride + w * kLanes, after);
            if (has_next) read(t + 1, row, w, after);
          }
      });
}

// Mamba-2: S <- a S + d B x^T; out = S^T C + skip * x.
template <int kWide>
void scan(const HeadTokens& tokens, float skip, int column, const StateColumns& columns) {
  for_each_token<kWide>(
      tokens.count, columns,
      [&](int t, const float* from, std::ptrdiff_t from_stride, float* to,
          std::ptrdiff_t to_stride) {
        const Floats decay = splat(tokens.decay(t)), step = splat(tokens.rate(t));
        float* value = tokens.value(t) + column;
        Floats added[kWide], read[kWide];
        for (int w = 0; w < kWide; ++w)
          added[w] = load(value + w * kLanes) * step, read[w] = zeros();
        for (int row = 0; row < tokens.key_dim; ++row)
          for (int w = 0; w < kWide; ++w) {
            const Floats before = load_state(from, row * from_stride + w * kLanes);
            const Floats after = multiply_add(splat(tokens.key(t)[row]), added[w], before * decay);
            store(to + row * to_stride + w * kLanes, after);
            read[w] = multiply_add(splat(tokens.query(t)[row]), after, read[w]);
          }
        for (int w = 0; w < kWide; ++w)
          store(value + w * kLanes, multiply_add(load(value + w * kLanes), splat(skip), read[w]));
      });
}

// Call `work(width, column)` for all columns of a state: 32 at a time, and the last 16 of an odd
// number of sixteens. width: a constant, in lanes.
template <typename Work>
void for_state_columns(int value_dim, Work work) {
  int column = 0;
  for (; column + 2 * kLanes <= value_dim; column += 2 * kLanes)
    work(std::integral_constant<int, 2>{}, column);
  if (column < value_dim) work(std::integral_constant<int, 1>{}, column);
}

}  // namespace kvkeep
