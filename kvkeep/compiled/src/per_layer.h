// The vectors that each layer has of each token, in a decode step; kvkeep/models/layers/per_layer.py is the
// same in torch.
#pragma once

#include <cmath>

#include "decode.h"
#include "norm.h"
#include "rows.h"
#include "workers.h"

namespace kvkeep {

class PerLayerRuns {
 public:
  PerLayerRuns(const Model& model, int sequences)
      : model_(model),
        sequences_(sequences),
        size_(model.per_layer ? model.per_layer->size : 0),
        width_(model.layers * size_),
        looked_up_(std::size_t(sequences) * width_),
        vectors_(std::size_t(sequences) * width_),
        let_through_(sequences, size_) {}

  // All of them, all threads together. input: embeddings, [sequences, hidden].
  void start(int me, Workers& workers, const Norming& norming, const Input& input,
             const Sequence* sequence) {
    const PerLayer& of = *model_.per_layer;
    const Floats root = all(1.f / std::sqrt(static_cast<float>(model_.hidden)));
    workers.share_then_barrier(me, sequences_, 1, [&](int i) {
      unpack_row(of.table, sequence[i].token, looked_up_.get() + std::size_t(i) * width_);
    });
    workers.share_then_barrier(me, of.projection.blocks(), 4, [&](int block) {
      multiply_rows(of.projection, block, input, 0, sequences_, [&](int i, int row, Floats products) {
        store(vectors_.get() + std::size_t(i) * width_ + row, products * root);
      });
    });
    workers.share_then_barrier(me, sequences_ * model_.layers, 4, [&](int n) {
      float* vector = vectors_.get() + std::size_t(n) * size_;
      const Bf16* found = looked_up_.get() + std::size_t(n) * size_;
      norm(vector, of.norm, norming, size_, [&](int c, Floats value) {
        const Floats both = multiply_add(load(found + c), all(of.factor), value);
        store(vector + c, both * all(std::sqrt(0.5f)));
      });
    });
  }

  // What a layer's own vectors let through of the residual stream. input: as above. Returns
  // [sequences, size].
  const Input& let_through(int me, Workers& workers, int layer, const Matrix& gate,
                           const Input& input) {
    workers.share_then_barrier(me, gate.blocks(), 4, [&](int block) {
      multiply_rows(gate, block, input, 0, sequences_, [&](int i, int row, Floats products) {
        const float* own = vectors_.get() + std::size_t(i) * width_ + layer * size_ + row;
        store_rounded(let_through_.row(i) + row, activated(kGeluTanh, products, load(own)));
      });
    });
    workers.share_then_barrier(me, sequences_, 1, [&](int i) { let_through_.sum_up(i); });
    return let_through_;
  }

 private:
  const Model& model_;
  const int sequences_, size_, width_;  // width_: of all layers together
  Buffer<Bf16> looked_up_;              // [sequences, layers, size], as vectors_
  Buffer<float> vectors_;
  Rows let_through_;
};

}  // namespace kvkeep
