// The fields of all structures that Python hands over, in their order. kvkeep/compiled/binding.py
// compares this list with its ctypes structures before it calls any kernel.
#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>

#include "chunk.h"
#include "decode.h"
#include "similarity.h"
#include "status.h"

// X(structure, F(field) ...), with all fields of each structure in order.
// clang-format off
#define KVKEEP_STRUCTURES(X, F)                                                                   \
  X(Matrix, F(format) F(rows) F(columns) F(rounded) F(data) F(scales) F(bias))                    \
  X(Mlp, F(gate) F(up) F(down))                                                                   \
  X(ParallelExperts, F(mlp_norm) F(norm) F(output_norm) F(router_scale))                          \
  X(MixtureOfExperts, F(router) F(shared_router) F(shared) F(experts) F(selection_bias)           \
    F(expert_scales) F(parallel))                                                                 \
  X(PerLayerEmbedding, F(table) F(projection) F(norm) F(size) F(table_multiplier))                \
  X(PerLayerInput, F(gate) F(projection) F(norm))                                                 \
  X(StateShape, F(kind) F(channels) F(conv_width) F(key_heads) F(value_heads) F(key_dim)          \
    F(value_dim) F(tiled_output) F(mamba_norm) F(norm_eps) F(output_multiplier) F(input_factors)) \
  X(StateLayer, F(input) F(gate) F(rate) F(decay) F(output) F(taps) F(conv_bias) F(step_bias)     \
    F(decay_rates) F(skip) F(norm) F(index) F(reserved))                                          \
  X(LayerStates, F(inputs) F(matrices) F(new_inputs) F(new_matrices))                             \
  X(StateChunk, F(shape) F(layer) F(states) F(input) F(gate) F(rate) F(decay) F(out) F(tokens)    \
    F(threads))                                                                                   \
  X(Layer, F(query) F(key) F(value) F(output) F(mlp) F(attention_norm) F(mlp_norm) F(query_norm)  \
    F(key_norm) F(attention_output_norm) F(mlp_output_norm) F(experts) F(per_layer_input)         \
    F(state) F(sinks) F(group) F(cell_layer) F(rotated) F(output_scale))                          \
  X(LayerGroup, F(layer_count) F(kv_heads) F(head_dim) F(reserved) F(softmax_scale) F(softcap)    \
    F(query_scale) F(inverse_frequencies))                                                        \
  X(Model, F(layer_count) F(group_count) F(hidden_size) F(mlp_size) F(heads) F(values_normed)     \
    F(norm_eps) F(norm_offset) F(embedding_multiplier) F(residual_multiplier) F(qk_norm_whole)    \
    F(centred_norms) F(parallel) F(activation) F(expert_count) F(experts_per_token)               \
    F(expert_size) F(shared_expert_size) F(norm_topk) F(sigmoid_router) F(routed_scale)           \
    F(gated_attention) F(attention_input_multiplier) F(attention_output_multiplier)               \
    F(gate_multiplier) F(mlp_output_multiplier) F(norm) F(per_layer) F(states) F(layers)          \
    F(groups) F(embedding) F(head))                                                               \
  X(Strides, F(layer) F(head) F(cell))                                                            \
  X(StoredCells, F(data) F(scale) F(strides) F(scale_strides) F(bits) F(reserved))                \
  X(Sequence, F(token) F(view_count) F(position) F(key) F(value) F(queries) F(follows)            \
    F(reserved))                                                                                  \
  X(OverwrittenCells, F(keys) F(values) F(slots) F(first_rows) F(count) F(reserved))              \
  X(SharedView, F(keys) F(values) F(first) F(cells) F(view_count) F(origin) F(bias) F(cell_bias)  \
    F(cell_bias_layer) F(cell_bias_head) F(ragged) F(overwritten))                                \
  X(SequenceView, F(position) F(shared_view) F(row))                                              \
  X(GroupViews, F(shared_view_count) F(view_count) F(sequences) F(shared_views) F(views))         \
  X(DecodeStep, F(sequence_count) F(threads) F(groups) F(states) F(hidden) F(seconds))            \
  X(ChunkView, F(keys) F(values) F(cells) F(rotation) F(causal) F(bias_row) F(bias) F(cell_bias)  \
    F(cell_bias_head) F(ragged))                                                                  \
  X(Chunk, F(tokens) F(heads) F(kv_heads) F(head_dim) F(rotations) F(view_count) F(threads)       \
    F(softmax_scale) F(softcap) F(reserved) F(sinks) F(q) F(k) F(v) F(angles) F(new_keys)         \
    F(new_values) F(new_key_head) F(new_value_head) F(views) F(packed) F(out) F(log_sums))        \
  X(Similarity, F(heads) F(row_count) F(column_count) F(width) F(strictly_older) F(threads)       \
    F(rows) F(columns) F(max_products) F(argmax))
// clang-format on

namespace kvkeep {
namespace {

struct Field {
  const char* structure;
  const char* name;
  std::size_t offset, size, alignment;
};

constexpr std::size_t aligned(std::size_t offset, std::size_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

// Whether the listed fields are all that a structure has, in its order: each begins where the one
// before it ends, and the last one ends where the structure does.
template <std::size_t kCount>
constexpr bool complete(const Field (&fields)[kCount], std::size_t size, std::size_t alignment) {
  std::size_t end = 0;
  for (const Field& field : fields) {
    if (field.offset != aligned(end, field.alignment)) return false;
    end = field.offset + field.size;
  }
  return aligned(end, alignment) == size;
}

#define KVKEEP_FIELD(name)                                                \
  {kStructure, #name, offsetof(Structure, name), sizeof(Structure::name), \
   alignof(decltype(Structure::name))},

#define KVKEEP_STRUCTURE(name, fields)                                        \
  struct name##Layout {                                                       \
    using Structure = name;                                                   \
    static constexpr const char* kStructure = #name;                          \
    static constexpr Field kFields[] = {fields};                              \
  };                                                                          \
  static_assert(std::is_standard_layout_v<name>);                             \
  static_assert(complete(name##Layout::kFields, sizeof(name), alignof(name)), \
                "KVKEEP_STRUCTURES must list all fields of " #name " in order");

KVKEEP_STRUCTURES(KVKEEP_STRUCTURE, KVKEEP_FIELD)

void append(std::string& text, const Field& field) {
  char line[160];
  std::snprintf(line, sizeof line, "%s.%s %zu %zu\n", field.structure, field.name, field.offset,
                field.size);
  text += line;
}

// "Structure.field offset size", a line for each field.
std::string layout() {
  std::string text;
#define KVKEEP_APPEND(name, fields) \
  for (const Field& field : name##Layout::kFields) append(text, field);
  KVKEEP_STRUCTURES(KVKEEP_APPEND, KVKEEP_FIELD)
#undef KVKEEP_APPEND
  return text;
}

}  // namespace
}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// Write the layout as text, as much of it as `size` bytes hold, without a terminating zero. Returns
// the length of all of it; 0 without memory.
int kvkeep_layout(char* to, int size) {
  using namespace kvkeep;
  int length = 0;
  run_guarded([&] {
    const std::string text = layout();
    length = static_cast<int>(text.size());
    text.copy(to, static_cast<std::size_t>(size));
    return kDone;
  });
  return length;
}
#pragma GCC visibility pop
}
