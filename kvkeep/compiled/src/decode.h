// One token of each of several sequences, through all layers. The structures are the interface to
// Python: kvkeep/compiled/binding.py has the same in ctypes.
#pragma once

#include "cells.h"
#include "matrix.h"

namespace kvkeep {

constexpr int kRevision = 8;  // raised where what a call does changes, and no structure

// What experts have that come beside an MLP (Gemma 4), each [hidden]. Norms: of what the MLP gives, of
// what experts read, and of what they give. router_scale: of what the router reads, once it is normed.
struct Beside {
  const Bf16* mlp_norm;
  const Bf16* norm;
  const Bf16* output_norm;
  const Bf16* router_scale;
};

// A mixture of experts (arXiv:1701.06538). Of one without a shared expert, whatever is shared is not
// read.
struct Mixture {
  Matrix router;         // [experts, hidden]
  Matrix shared_router;  // [1, hidden]
  Mlp shared;
  const Mlp* expert;     // [experts]
  const float* scales;   // [experts], of what each gives; or null
  const Beside* beside;  // null: in the place of the MLP
};

// The vectors that each layer has of each token (Gemma 4): what a table has, and what the embedding is
// projected to. factor: of the table's.
struct PerLayer {
  Matrix table;       // [vocab, layers * size]
  Matrix projection;  // [layers * size, hidden]
  const Bf16* norm;   // [size], of what is projected
  std::int32_t size;
  float factor;
};

// What a layer does with its own. norm: [hidden], of what is added.
struct OwnInput {
  Matrix gate;        // [size, hidden]
  Matrix projection;  // [hidden, size]
  const Bf16* norm;
};

// key: of no rows where a layer looks at the cells of another, and has none. value: of none there, too,
// and where values are keys, before these are normed and rotated.
// Norms of [hidden], or null: of what attention and MLP read, and of what they give. query_norm and
// key_norm: [head_dim], or of all heads together where the model says so; or null.
struct Layer {
  Matrix query, key, value, output;
  Mlp mlp;
  const Bf16* attention_norm;
  const Bf16* mlp_norm;
  const Bf16* query_norm;
  const Bf16* key_norm;
  const Bf16* attention_output_norm;
  const Bf16* mlp_output_norm;
  const Mixture* mixture;  // in the place of the MLP, or beside it; or null
  const OwnInput* own;     // or null
  const float* sinks;      // [heads], logits that take their share of the softmax; or null
  std::int32_t group;      // whose layers attend as this one does
  std::int32_t place;      // of the cells that it looks at, among those of the group's layers
  std::int32_t rotated;    // 0: without RoPE
  float scale;             // of all that it gives on
};

// Layers that attend alike. layers: those that have cells.
struct Group {
  std::int32_t layers, kv_heads, head_dim, reserved;
  float scale, softcap;       // of attention scores; softcap: 0 for none
  const float* query_scale;   // [head_dim], of each query; or null
  const double* frequencies;  // [head_dim / 2], radians per position
};

struct Model {
  std::int32_t layers, groups, hidden, inner, heads;  // inner: of the widest MLP
  std::int32_t values_normed;  // not 0: head by head, without a weight
  float norm_eps, norm_plus;  // norm_plus: what the weights of norms are more than is stored
  float embedding_multiplier, residual_multiplier;  // of what is looked up, and of what is added
  std::int32_t whole_norms;    // not 0: query_norm and key_norm are of all heads together
  std::int32_t centred_norms;  // not 0: LayerNorm, not RMSNorm
  std::int32_t parallel;       // not 0: the MLP reads what attention reads
  std::int32_t activation;     // an Activated, of the gates of MLPs and experts
  // Of mixtures; 0 where there are none. expert_inner, shared_inner: as inner, of an expert and of
  // the shared one. norm_topk: not 0: the weights of a token's experts add up to 1.
  std::int32_t experts, experts_per_token, expert_inner, shared_inner, norm_topk;
  const Bf16* norm;
  const PerLayer* per_layer;  // or null
  const Layer* layer;
  const Group* group;
  Matrix embedding;  // [vocab, hidden]
  Matrix head;
};

// A sequence of the step, in one group of layers. key, value: where its new cell goes, of the first layer and KV head.
struct Sequence {
  std::int32_t token;
  std::int32_t runs;        // how many of the step's runs are its own, in their order
  std::int64_t position;     // of its new cell
  Kept key, value;
  Bf16* queries;             // out: [layers, heads, head_dim], unrotated; or null
};

// Stored cells that some queries see. first, cells: the stretch of slots from `keys`, `values` on; of
// ragged ones `first` and `origin` are 0, and `cells` are those of the head that has most.
struct Sight {
  Kept keys, values;
  std::int32_t first, cells;
  std::int32_t runs;   // how many sequences look here; they are numbered within the sight
  std::int32_t origin;  // the place of slot 0: blocks are counted from place 0
  const float* bias;       // [runs, cells], or null
  const float* cell_bias;  // of the first slot, layer and KV head; or null
  std::int64_t cell_bias_layer, cell_bias_head;
  Own own;  // by layers and KV heads
};

// A sequence looking at a sight, from a position of its own. All runs of a sequence follow one
// another, in the order in which what they found is added up.
struct Run {
  std::int64_t position;
  std::int32_t sight;
  std::int32_t index;  // among the sight's runs
};

// What a step's time is counted under.
enum class Phase { kNorms, kProjections, kCells, kAttention, kOutput, kMlp };

// What the sequences of a step see in the layers of one group.
struct Seen {
  std::int32_t sights, runs;
  const Sequence* sequence;
  const Sight* sight;
  const Run* run;
};

struct Step {
  std::int32_t sequences, threads;
  const Seen* seen;  // by groups
  Bf16* hidden;     // out: [sequences, hidden], normed
  double* seconds;  // out: added up for each Phase; or null
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// The size of Model, Layer, Group, Mixture, Beside, PerLayer, OwnInput, Step, Seen, Sequence, Sight and Run together; kRevision. Both sides
// must agree.
int kvkeep_interface();
int kvkeep_revision();

// A status; see guard.h.
int kvkeep_decode(const kvkeep::Model* model, const kvkeep::Step* step);

// x: [count, columns of the matrix]. out: [count, rows of the matrix]. A status: kNotFinite where
// any of them is NaN or infinity, all being there.
int kvkeep_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count, float* out,
                   int threads);

// Blocks of 16 rows as bf16, from `first` on. out: [those rows that there are, columns]. A status.
int kvkeep_unpack(const kvkeep::Matrix* matrix, int first, int blocks, kvkeep::Bf16* out,
                  int threads);

// The same, rounded to bf16 and widened again.
int kvkeep_unpack_floats(const kvkeep::Matrix* matrix, int first, int blocks, float* out,
                         int threads);

// Some rows as bf16. out: [count, columns]. A status.
int kvkeep_rows(const kvkeep::Matrix* matrix, const std::int64_t* rows, int count,
                kvkeep::Bf16* out);
#pragma GCC visibility pop
}
