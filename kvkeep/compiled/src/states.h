// Layers that keep a state, in the place of attention or beside it. The structures are part of the
// interface to Python (layout.cpp). kvkeep/models/layers/states.py, delta_net.py and mamba.py
// define the same layers in torch.
#pragma once

#include "matrix.h"

namespace kvkeep {

enum StateKind : std::int32_t {
  kShortConvolution,  // a gated convolution over the newest tokens
  kDeltaNet,          // Gated DeltaNet (arXiv:2412.06464)
  kMamba2,            // arXiv:2405.21060
};

// How the outputs of Mamba-2's heads are normed.
enum MambaNorm : std::int32_t { kNormAfterGate, kNormBeforeGate, kNoNorm };

// The sizes that all state layers of a model have. Widths of heads are multiples of 16.
struct StateShape {
  std::int32_t kind;        // a StateKind
  std::int32_t channels;    // that the convolution takes, a multiple of 16
  std::int32_t conv_width;  // tokens that it sees
  // Of Mamba-2: groups of heads, heads, the width of B and C, and that of a head.
  std::int32_t key_heads, value_heads, key_dim, value_dim;
  std::int32_t tiled_output;  // not 0: the first value head of each key head comes first
  std::int32_t mamba_norm;    // a MambaNorm
  float norm_eps;             // of the outputs
  float output_multiplier;    // of what the output projection gives
  const float*
      input_factors;  // [rows of StateLayer::input, a multiple of 16], of projections; or null

  int key_width() const { return key_heads * key_dim; }
  int value_width() const { return value_heads * value_dim; }
  int heads_per_key() const { return value_heads / key_heads; }

  // The number of columns of a layer's output projection.
  int output_width() const { return kind == kShortConvolution ? channels : value_width(); }
};

// The weights of one state layer.
//
// The rows of `input` are, of a short convolution, the gate of its input, that of its output, and
// its input, [3 * channels, hidden]; of DeltaNet queries, keys and values, [channels, hidden]; of
// Mamba-2 gates, values, B, C and steps, [value width + channels + heads, hidden].
struct StateLayer {
  Matrix input;
  Matrix gate, rate, decay;  // of DeltaNet: [value width, hidden], and twice [heads, hidden]
  Matrix output;             // [hidden, output width]
  const Bf16* taps;          // [conv_width, channels], those of the oldest token first
  const Bf16* conv_bias;     // [channels], or null
  const float* step_bias;    // [heads]
  const float* decay_rates;  // [heads], below 0
  const float* skip;         // [heads], of Mamba-2
  const float* norm;         // of outputs: [value_dim] of DeltaNet, [value width] of Mamba-2
  std::int32_t index;        // among the model's state layers
  std::int32_t reserved;
};

// The states of one layer and sequence before and after a step. States before a first token are
// null: zeros. Both may be the same memory.
struct LayerStates {
  const Bf16* inputs;     // of the convolution, [conv_width - 1, channels], the oldest first
  const float* matrices;  // [heads, key_dim, value_dim]
  Bf16* new_inputs;
  float* new_matrices;
};

// Several tokens of one sequence in one layer. Their projections were computed elsewhere: [tokens,
// rows of the matrix] each, those of matrices that the kind does not have null.
struct StateChunk {
  const StateShape* shape;
  const StateLayer* layer;  // its matrices are not read
  LayerStates states;
  const Bf16* input;
  const Bf16* gate;
  const Bf16* rate;
  const Bf16* decay;
  Bf16* out;  // [tokens, output width]
  std::int32_t tokens, threads;
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// Take tokens into a layer's states and compute what its output projection reads. Returns a Status.
int kvkeep_state_chunk(const kvkeep::StateChunk* chunk);
#pragma GCC visibility pop
}
