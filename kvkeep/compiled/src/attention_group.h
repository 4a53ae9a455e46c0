// The attention of one group of layers in a decode step: it rotates queries, stores new cells, and
// attends. Groups may have different head widths, which this code is compiled for.
#pragma once

#include <algorithm>
#include <memory>

#include "decode.h"
#include "rotation.h"
#include "decode_attention.h"

namespace kvkeep {

// Queries, keys, values and gates of each sequence, one after the other. width: of all together.
struct ProjectedRows {
  float* x;
  int width;

  float* row(int i) const { return x + std::size_t(i) * width; }
};

class AttentionGroup {
 public:
  AttentionGroup(const Model& model, const LayerGroup& group, const GroupViews& views)
      : group(group),
        views(views),
        queries_width(model.heads * group.head_dim),
        keys_width(group.kv_heads * group.head_dim),
        gated_(model.gated_attention != 0) {}
  virtual ~AttentionGroup() = default;

  // Compute the angles of position i: first those of the sequences' new cells, then those of the
  // views.
  virtual void compute_angles(int i) = 0;

  // Store the new cell of sequence i, or rotate the queries of view i - sequences.
  virtual void store_or_rotate(const Layer& layer, const ProjectedRows& projected, int i) = 0;

  // Attention is divided into units; see DecodeAttention. me: the thread.
  virtual int units(const Layer& layer) const = 0;
  virtual void attend_unit(int me, const Layer& layer, int u) = 0;

  // Merge the results of sequence i's views. to: [queries_width].
  virtual void merge(const Layer& layer, int i, Activation* to) const = 0;

  // The width of ProjectedRows in this group.
  int projected_width() const { return (gated_ ? 2 : 1) * queries_width + 2 * keys_width; }

  // Multiply what sequence i attended to by the sigmoids of its gates. x: [queries_width].
  void apply_gates(const ProjectedRows& projected, int i, Activation* x) const {
    const float* gates = projected.row(i) + queries_width + 2 * keys_width;
    for (int c = 0; c < queries_width; c += kLanes)
      store_rounded(x + c, load(x + c) * sigmoid(load(gates + c)));
  }

  const LayerGroup& group;
  const GroupViews& views;
  const int queries_width, keys_width;

 private:
  const bool gated_;
};

template <int kDim>
class AttentionGroupOf final : public AttentionGroup {
 public:
  AttentionGroupOf(const Model& model, const LayerGroup& group, const GroupViews& views,
                   const DecodeStep& step)
      : AttentionGroup(model, group, views),
        heads_(model.heads),
        sequences_(step.sequence_count),
        angles_(std::size_t(step.sequence_count + views.view_count) * kDim),
        attention_(model, group, views, step) {
    std::fill_n(unrotated_, kDim / 2, 1.f);
    std::fill_n(unrotated_ + kDim / 2, kDim / 2, 0.f);
  }

  void compute_angles(int i) override {
    const int view = i - sequences_;
    const std::int64_t position =
        view < 0 ? views.sequences[i].position : views.views[view].position;
    angles(group.inverse_frequencies, kDim, position, angles_.get() + std::size_t(i) * kDim);
  }

  void store_or_rotate(const Layer& layer, const ProjectedRows& projected, int i) override {
    const float* angle = layer.rotated ? angles_.get() + std::size_t(i) * kDim : unrotated_;
    if (i >= sequences_) {
      const int view = i - sequences_;
      const float* from = projected.row(attention_.sequence_of(view));
      for (int head = 0; head < heads_; ++head) {
        Activation* query = attention_.query(view, head);
        rotate(from + head * kDim, angle, kDim, query);
        if (attention_.transformed(view)) hadamard_in_place(query);
      }
      return;
    }
    const Sequence& sequence = views.sequences[i];
    if (sequence.queries)
      for (int c = 0; c < queries_width; c += kLanes)
        store_rounded(sequence.queries + std::size_t(layer.cell_layer) * queries_width + c,
                      load(projected.row(i) + c));
    if (!layer.key.rows) return;
    const float* keys = projected.row(i) + queries_width;
    const float* values = keys + keys_width;
    for (int head = 0; head < group.kv_heads; ++head) {
      Bf16 key[kDim];
      rotate(keys + head * kDim, angle, kDim, key);
      keep(key, HeadCells(sequence.key, layer.cell_layer, head));
      keep(values + head * kDim, HeadCells(sequence.value, layer.cell_layer, head));
    }
  }

  int units(const Layer& layer) const override { return attention_.units(layer.cell_layer); }

  void attend_unit(int me, const Layer& layer, int u) override {
    attention_.attend_unit(me, layer.cell_layer, u);
  }

  void merge(const Layer& layer, int i, Activation* to) const override {
    attention_.merge(layer.cell_layer, i, layer.sinks, to);
  }

 private:
  void hadamard_in_place(Activation* query) const {
    Vector<kDim> x;
    load<kDim>(query, x);
    hadamard<kDim>(x);
    store_rounded<kDim>(query, x);
  }

  // Store one key or value into the first of the cells.
  template <typename Number>
  void keep(const Number* numbers, const HeadCells& to) const {
    Vector<kDim> x;
    load<kDim>(numbers, x);
    if (!to.quantised()) return store_rounded<kDim>(to.plain_data(), x);
    hadamard<kDim>(x);
    quantise<kDim>(x, to);
  }

  const int heads_, sequences_;
  Buffer<float> angles_;  // of the new cells, then of the views
  DecodeAttention<kDim> attention_;
  float unrotated_[kDim];  // angles of layers without RoPE
};

// Make the attention of a group; null for an unsupported head width.
inline std::unique_ptr<AttentionGroup> make_attention_group(const Model& model,
                                                            const LayerGroup& group,
                                                            const GroupViews& views,
                                                            const DecodeStep& step) {
  std::unique_ptr<AttentionGroup> result;
  for_head_dim(group.head_dim, [&](auto width) {
    result = std::make_unique<AttentionGroupOf<width.value>>(model, group, views, step);
  });
  return result;
}

}  // namespace kvkeep
