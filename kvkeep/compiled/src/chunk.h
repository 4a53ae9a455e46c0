// Attention of a chunk of tokens: prefill, one layer at a time. The structures are the interface to
// Python, as those of decode.h.
#pragma once

#include "cells.h"

namespace kvkeep {

// Cells of one layer that the chunk's queries see; of ragged ones `cells` are those of the head that
// has most.
struct Part {
  Kept keys, values;
  std::int32_t cells;
  std::int32_t rotation;  // which of the chunk's the queries take towards these
  std::int32_t causal;    // 1: query i sees cells 0 ... i
  std::int32_t bias_row;  // from one token's bias to the next one's; 0 where all have the same
  const float* bias;      // [tokens or 1, cells], or null
  const float* cell_bias;  // [kv_heads, cells] with heads `cell_bias_head` apart, or null
  std::int64_t cell_bias_head;
  Own own;  // by KV heads
};

// q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim], all dense and unrotated; k and v
// null where another layer has put its cells where these would go.
// angles: [rotations, tokens, head_dim], cosines and sines; rotation 0 is that of the new cells.
// new_keys, new_values: [kv_heads, tokens, head_dim], where they go.
// out: [tokens, heads * head_dim].
// log_sums: [heads, tokens], the natural log of each query's sum of exponentials; or null.
struct Chunk {
  std::int32_t tokens, heads, kv_heads, head_dim, rotations, parts, threads;
  float scale, softcap;  // of attention scores; softcap: 0 for none
  std::int32_t reserved;
  const float* sinks;  // [heads], logits that take their share of the softmax; or null
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;
  const float* angles;
  Bf16* new_keys;
  Bf16* new_values;
  std::int64_t new_key_head, new_value_head;
  const Part* part;
  Bf16* out;
  float* log_sums;
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// The size of Part and Chunk together: both sides must agree.
int kvkeep_chunk_interface();

// A status; see guard.h.
int kvkeep_attend_chunk(const kvkeep::Chunk* chunk);

// to: [rotations, tokens, head_dim] for positions: [rotations, tokens].
void kvkeep_angles(const double* frequencies, int head_dim, const std::int64_t* positions,
                   int count, float* to);
#pragma GCC visibility pop
}
