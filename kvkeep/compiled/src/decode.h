// A decode step: one token of each of several sequences, through all layers. The structures are the
// interface to Python: layout.cpp lists their fields, and kvkeep/compiled/structures.py has
// the same ones in ctypes.
#pragma once

#include "cells.h"
#include "matrix.h"
#include "states.h"

namespace kvkeep {

// To be raised where the meaning of a call changes while all structures stay as they are.
constexpr int kRevision = 17;

// The norms of experts that run in parallel with an MLP (Gemma 4), each [hidden]: of the MLP's
// output, of the experts' input, and of their output. router_scale: multiplies the router's normed
// input.
struct ParallelExperts {
  const Bf16* mlp_norm;
  const Bf16* norm;
  const Bf16* output_norm;
  const Bf16* router_scale;
};

// A mixture of experts (arXiv:1701.06538). shared is not read where the model has no shared expert;
// shared_router has no rows there, nor where the shared expert's output is added as it is.
struct MixtureOfExperts {
  Matrix router;         // [experts, hidden]
  Matrix shared_router;  // [1, hidden]
  Mlp shared;
  const Mlp* experts;               // [experts]
  const float* selection_bias;      // [experts], added to weights to choose by; or null
  const float* expert_scales;       // [experts], multiply each expert's output; or null
  const ParallelExperts* parallel;  // null: the experts replace the MLP
};

// Per-layer embeddings (Gemma 4): each layer has a vector for each token, the sum of a table row
// and of a projection of the token's embedding.
struct PerLayerEmbedding {
  Matrix table;       // [vocab, layers * size]
  Matrix projection;  // [layers * size, hidden]
  const Bf16* norm;   // [size], of the projection
  std::int32_t size;
  float table_multiplier;
};

// How one layer adds its per-layer embedding to the residual stream.
struct PerLayerInput {
  Matrix gate;        // [size, hidden]
  Matrix projection;  // [hidden, size]
  const Bf16* norm;   // [hidden], of the projection's output
};

// key has no rows where the layer attends to the cells of another layer and stores none. value has
// no rows there either, nor where values are keys before these are normed and rotated. With gates
// on attention, query has the rows of all heads' queries and then those of all heads' gates.
// A layer without attention has none of the three, no output and no cells. Where it has no state
// either, it is only an MLP; a layer without an MLP has neither mlp nor experts.
// Norms are [hidden], or null: of the inputs of attention and MLP, and of their outputs. query_norm
// and key_norm: [head_dim], or of all heads together (Model::qk_norm_whole); or null.
struct Layer {
  Matrix query, key, value, output;
  Mlp mlp;
  const Bf16* attention_norm;
  const Bf16* mlp_norm;
  const Bf16* query_norm;
  const Bf16* key_norm;
  const Bf16* attention_output_norm;
  const Bf16* mlp_output_norm;
  const MixtureOfExperts* experts;       // instead of the MLP, or in parallel with it; or null
  const PerLayerInput* per_layer_input;  // or null
  const StateLayer* state;               // in the place of attention or beside it; or null
  const float* sinks;                    // [heads], attention sink logits; or null
  std::int32_t group;                    // index of its LayerGroup
  std::int32_t cell_layer;               // index of its cells among those of the group's layers
  std::int32_t rotated;                  // 0: without RoPE
  float output_scale;                    // multiplies the residual stream behind this layer
};

// Layers whose attention has the same shape, scale and RoPE frequencies.
struct LayerGroup {
  std::int32_t layer_count;  // layers that store cells
  std::int32_t kv_heads, head_dim, reserved;
  float softmax_scale;
  float softcap;                      // of attention scores; 0 for none
  const float* query_scale;           // [head_dim], multiplies each query; or null
  const double* inverse_frequencies;  // [head_dim / 2], radians per position
};

struct Model {
  std::int32_t layer_count, group_count, hidden_size;
  std::int32_t mlp_size;  // of the widest MLP that is no expert
  std::int32_t heads;
  std::int32_t values_normed;  // not 0: values are normed head by head, without a weight
  float norm_eps;
  float norm_offset;           // added to every norm's weights
  float embedding_multiplier;  // of embeddings
  float residual_multiplier;   // of what attention and MLP add to the residual stream
  std::int32_t qk_norm_whole;  // not 0: query_norm and key_norm cover all heads together
  std::int32_t centred_norms;  // not 0: LayerNorm, not RMSNorm
  std::int32_t parallel;       // not 0: the MLP reads the same normed input as attention
  std::int32_t activation;     // a GateActivation, of MLPs and experts
  // Of mixtures of experts; 0 where there are none.
  std::int32_t expert_count, experts_per_token, expert_size, shared_expert_size;
  std::int32_t norm_topk;        // not 0: the weights of a token's experts add up to 1
  std::int32_t sigmoid_router;   // not 0: weights are sigmoids of scores, not a softmax
  float routed_scale;            // of these weights; with sigmoid_router only
  std::int32_t gated_attention;  // not 0: sigmoids of gates multiply what is attended
  // Of what attention reads and gives, of the gate values of MLPs, and of what MLPs give.
  float attention_input_multiplier, attention_output_multiplier;
  float gate_multiplier, mlp_output_multiplier;
  const Bf16* norm;                    // [hidden], of the final hidden state
  const PerLayerEmbedding* per_layer;  // or null
  const StateShape* states;            // of state layers; or null
  const Layer* layers;
  const LayerGroup* groups;
  Matrix embedding;  // [vocab, hidden]
  Matrix head;       // [vocab, hidden]
};

// One token of a step in one group of layers, and the sequence that it is the next token of. key,
// value: where its new cell goes, of the first layer and KV head.
struct Sequence {
  std::int32_t token;
  std::int32_t view_count;  // how many of the step's views are this sequence's, in order
  std::int64_t position;    // of its new cell
  StoredCells key, value;
  Bf16* queries;  // out: [layers, heads, head_dim], unrotated; or null
  // Not 0: this token follows the one before it in the step, in the same text.
  std::int32_t follows, reserved;
};

// Cells of a full ring whose slots the new cells of a step's tokens take, as they were before.
// Tokens of the same text that come earlier in the step still see them.
struct OverwrittenCells {
  StoredCells keys, values;   // [layers, kv_heads, count]
  const std::int32_t* slots;  // [count], of the shared view
  // [count], ascending: the first of the shared view's rows that sees the new cell in this slot.
  const std::int32_t* first_rows;
  std::int32_t count, reserved;
};

// Stored cells that one or several sequences attend to, read once for all of them. first, cells:
// the range of slots, counted from `keys` and `values`. Of ragged cells first and origin are 0, and
// cells is the count of the longest head.
struct SharedView {
  StoredCells keys, values;
  std::int32_t first, cells;
  std::int32_t view_count;  // how many sequences attend to it
  std::int32_t origin;      // the storage index of slot 0: blocks begin at multiples from index 0
  const float* bias;        // [view_count, cells], or null
  const float* cell_bias;   // of the first slot, layer and KV head; or null
  std::ptrdiff_t cell_bias_layer, cell_bias_head;  // strides
  RaggedOffsets ragged;                            // by layers and KV heads
  const OverwrittenCells* overwritten;             // or null
};

// One sequence's use of a SharedView, from a position of its own. The views of a sequence follow
// one another, in the order in which their results are added up.
struct SequenceView {
  std::int64_t position;
  std::int32_t shared_view;
  std::int32_t row;  // among those of the shared view
};

// The phases that a step's time is counted under.
enum class Phase { kNorms, kProjections, kCells, kAttention, kOutput, kMlp };

// What the sequences of a step attend to in the layers of one group.
struct GroupViews {
  std::int32_t shared_view_count, view_count;
  const Sequence* sequences;
  const SharedView* shared_views;
  const SequenceView* views;
};

struct DecodeStep {
  std::int32_t sequence_count, threads;
  const GroupViews* groups;   // [Model::group_count]
  const LayerStates* states;  // [state layers, sequences], or null
  Bf16* hidden;               // out: [sequences, hidden], normed
  double* seconds;            // out: added to for each Phase; or null
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
int kvkeep_revision();

// Run a decode step. Returns a Status.
int kvkeep_decode(const kvkeep::Model* model, const kvkeep::DecodeStep* step);

// Multiply rows by a matrix. x: [count, columns of the matrix]. out: [count, rows of the matrix].
// Returns a Status: kNotFinite, with all of `out` written, where any result is NaN or infinity.
int kvkeep_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count, float* out,
                   int threads);

// Multiply the rows of a prompt by a packed matrix, whose weights are not rounded. x: [count,
// columns of the matrix]. out: [count, rows of the matrix]. row_bits: 16, or 8 for rows of one byte
// for each number, with codes that can be multiplied so. Returns a Status: kNoKernel for dense
// matrices.
int kvkeep_prompt_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count,
                          kvkeep::Bf16* out, int threads, int row_bits);

// Unpack blocks of 16 rows to bf16, beginning with block `first`. out: [rows, columns], without the
// rows past the matrix's end. Returns a Status.
int kvkeep_unpack(const kvkeep::Matrix* matrix, int first, int blocks, kvkeep::Bf16* out,
                  int threads);

// The same, rounded to bf16 and widened to float32.
int kvkeep_unpack_floats(const kvkeep::Matrix* matrix, int first, int blocks, float* out,
                         int threads);

// Unpack single rows to bf16. out: [count, columns]. Returns a Status.
int kvkeep_rows(const kvkeep::Matrix* matrix, const std::int64_t* rows, int count,
                kvkeep::Bf16* out);
#pragma GCC visibility pop
}
