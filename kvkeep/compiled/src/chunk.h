// Attention of a chunk of prompt tokens, one layer at a time. The structures are part of the
// interface to Python; see decode.h.
#pragma once

#include "cells.h"

namespace kvkeep {

// Cells of one layer that the chunk's queries attend to. Of ragged cells `cells` is the count of
// the longest head.
struct ChunkView {
  StoredCells keys, values;
  std::int32_t cells;
  std::int32_t rotation;   // which of the chunk's rotations queries take for these cells
  std::int32_t causal;     // 1: query i sees cells 0 ... i
  std::int32_t bias_row;   // stride between tokens' biases; 0 where all tokens share one
  const float* bias;       // [tokens or 1, cells], or null
  const float* cell_bias;  // [kv_heads, cells], heads `cell_bias_head` apart; or null
  std::ptrdiff_t cell_bias_head;
  RaggedOffsets ragged;  // by KV heads
};

// q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim], all dense and unrotated. k
// and v are null where another layer has already stored this layer's cells. angles: [rotations,
// tokens, head_dim], cosines and sines; rotation 0 is that of the new cells. new_keys, new_values:
// [kv_heads, tokens, head_dim], where the new cells go. out: [tokens, heads * head_dim]. log_sums:
// [heads, tokens], the natural log of each query's sum of exponentials; or null. packed: scratch
// memory, 64-byte aligned, for the cells of all views in bf16: those of each view and KV head in
// blocks of 64. All layers may share it: the first use of new memory takes long.
struct Chunk {
  std::int32_t tokens, heads, kv_heads, head_dim, rotations, view_count, threads;
  float softmax_scale, softcap;  // softcap: of attention scores; 0 for none
  std::int32_t reserved;
  const float* sinks;  // [heads], attention sink logits; or null
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;
  const float* angles;
  Bf16* new_keys;
  Bf16* new_values;
  std::ptrdiff_t new_key_head, new_value_head;  // strides between heads
  const ChunkView* views;
  void* packed;
  Bf16* out;
  float* log_sums;
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// Store the chunk's new cells and attend to all views. Returns a Status.
int kvkeep_attend_chunk(const kvkeep::Chunk* chunk);

// Write the cosines and sines of `count` positions. to: [count, head_dim].
void kvkeep_angles(const double* inverse_frequencies, int head_dim, const std::int64_t* positions,
                   int count, float* to);
#pragma GCC visibility pop
}
