// Per-layer embeddings of a decode step; kvkeep/models/layers/per_layer.py is the same in torch.
#pragma once

#include <cmath>

#include "decode.h"
#include "normalise.h"
#include "activation_rows.h"
#include "thread_team.h"

namespace kvkeep {

class PerLayerForward {
 public:
  PerLayerForward(const Model& model, int sequences)
      : model_(model),
        sequences_(sequences),
        size_(model.per_layer ? model.per_layer->size : 0),
        width_(model.layer_count * size_),
        table_rows_(std::size_t(sequences) * width_),
        vectors_(std::size_t(sequences) * width_),
        gated_(sequences, size_) {}

  // Compute the vectors of all layers, with all threads. input: embeddings, [sequences, hidden].
  void compute(int me, ThreadTeam& team, const NormParams& norm_params, const ActivationRows& input,
               const Sequence* sequences) {
    const PerLayerEmbedding& embedding = *model_.per_layer;
    const Floats root = splat(1.f / std::sqrt(static_cast<float>(model_.hidden_size)));
    team.run_shared_then_wait(me, sequences_, 1, [&](int i) {
      unpack_row(embedding.table, sequences[i].token, table_rows_.get() + std::size_t(i) * width_);
    });
    team.run_shared_then_wait(me, embedding.projection.blocks(), 4, [&](int block) {
      multiply_rows(embedding.projection, block, input, 0, sequences_,
                    [&](int i, int row, Floats products) {
                      store(vectors_.get() + std::size_t(i) * width_ + row, products * root);
                    });
    });
    team.run_shared_then_wait(me, sequences_ * model_.layer_count, 4, [&](int n) {
      float* vector = vectors_.get() + std::size_t(n) * size_;
      const Bf16* table_row = table_rows_.get() + std::size_t(n) * size_;
      normalise(vector, embedding.norm, norm_params, size_, [&](int c, Floats value) {
        const Floats combined =
            multiply_add(load(table_row + c), splat(embedding.table_multiplier), value);
        store(vector + c, combined * splat(std::sqrt(0.5f)));
      });
    });
  }

  // Gate a layer's vectors by the residual stream. input: as above. Returns [sequences, size].
  const ActivationRows& gate_residual(int me, ThreadTeam& team, int layer, const Matrix& gate,
                                      const ActivationRows& input) {
    team.run_shared_then_wait(me, gate.blocks(), 4, [&](int block) {
      multiply_rows(gate, block, input, 0, sequences_, [&](int i, int row, Floats products) {
        const float* vector = vectors_.get() + std::size_t(i) * width_ + layer * size_ + row;
        store_rounded(gated_.row(i) + row, activate_gate(kGeluTanh, products, load(vector)));
      });
    });
    team.run_shared_then_wait(me, sequences_, 1, [&](int i) { gated_.prepare_row(i); });
    return gated_;
  }

 private:
  const Model& model_;
  const int sequences_, size_, width_;  // width_: of all layers together
  Buffer<Bf16> table_rows_;             // [sequences, layers, size], as vectors_
  Buffer<float> vectors_;
  ActivationBuffer gated_;
};

}  // namespace kvkeep
