// The layers of one group in a decode step: how their queries and new cells stand, and what they see.
// Groups may have heads of different widths, which what is here is compiled for.
#pragma once

#include <algorithm>
#include <memory>

#include "decode.h"
#include "rotation.h"
#include "runs.h"

namespace kvkeep {

// Queries, keys and values of each sequence, one behind the other. width: of all of these.
struct Projected {
  float* x;
  int width;

  float* row(int i) const { return x + std::size_t(i) * width; }
};

class Looking {
 public:
  Looking(const Model& model, const Group& group, const Seen& seen)
      : group(group),
        seen(seen),
        queries_width(model.heads * group.head_dim),
        keys_width(group.kv_heads * group.head_dim) {}
  virtual ~Looking() = default;

  // Towards what: i is a sequence, for its new cell, or behind all of these a run.
  virtual void turn(int i) = 0;

  // A sequence's new cell into its slot, or the queries of one run as they stand there; i: as above.
  virtual void place(const Layer& layer, const Projected& projected, int i) = 0;

  // Attention is shared out in so many units; see AttentionRuns. me: the thread.
  virtual int units(const Layer& layer) const = 0;
  virtual void attend_unit(int me, const Layer& layer, int u) = 0;

  // What sequence i found. to: [queries_width].
  virtual void merge(const Layer& layer, int i, Activation* to) const = 0;

  const Group& group;
  const Seen& seen;
  const int queries_width, keys_width;
};

template <int kDim>
class LookingAt final : public Looking {
 public:
  LookingAt(const Model& model, const Group& group, const Seen& seen, const Step& step)
      : Looking(model, group, seen),
        heads_(model.heads),
        sequences_(step.sequences),
        angles_(std::size_t(step.sequences + seen.runs) * kDim),
        runs_(model, group, seen, step) {
    std::fill_n(unrotated_, kDim / 2, 1.f);
    std::fill_n(unrotated_ + kDim / 2, kDim / 2, 0.f);
  }

  void turn(int i) override {
    const int run = i - sequences_;
    const std::int64_t position = run < 0 ? seen.sequence[i].position : seen.run[run].position;
    angles(group.frequencies, kDim, position, angles_.get() + std::size_t(i) * kDim);
  }

  void place(const Layer& layer, const Projected& projected, int i) override {
    const float* angle =
        layer.rotated ? angles_.get() + std::size_t(i) * kDim : unrotated_;
    if (i >= sequences_) {
      const int run = i - sequences_;
      const float* from = projected.row(runs_.sequence_of(run));
      for (int head = 0; head < heads_; ++head) {
        Activation* query = runs_.query(run, head);
        rotate(from + head * kDim, angle, kDim, query);
        if (runs_.transformed(run)) hadamard_in_place(query);
      }
      return;
    }
    const Sequence& sequence = seen.sequence[i];
    if (sequence.queries)
      for (int c = 0; c < queries_width; c += kLanes)
        store_rounded(sequence.queries + std::size_t(layer.place) * queries_width + c,
                      load(projected.row(i) + c));
    if (!layer.key.rows) return;
    const float* keys = projected.row(i) + queries_width;
    const float* values = keys + keys_width;
    for (int head = 0; head < group.kv_heads; ++head) {
      Bf16 key[kDim];
      rotate(keys + head * kDim, angle, kDim, key);
      keep(key, Stretch(sequence.key, layer.place, head));
      keep(values + head * kDim, Stretch(sequence.value, layer.place, head));
    }
  }

  int units(const Layer& layer) const override { return runs_.units(layer.place); }

  void attend_unit(int me, const Layer& layer, int u) override {
    runs_.attend_unit(me, layer.place, u);
  }

  void merge(const Layer& layer, int i, Activation* to) const override {
    runs_.merge(layer.place, i, layer.sinks, to);
  }

 private:
  void hadamard_in_place(Activation* query) const {
    Vector<kDim> x;
    load<kDim>(query, x);
    hadamard<kDim>(x);
    store_rounded<kDim>(query, x);
  }

  // Into the first cell of a stretch.
  template <typename Number>
  void keep(const Number* numbers, const Stretch& to) const {
    Vector<kDim> x;
    load<kDim>(numbers, x);
    if (!to.quantised()) return store_rounded<kDim>(to.plain(), x);
    hadamard<kDim>(x);
    quantise<kDim>(x, to);
  }

  const int heads_, sequences_;
  Buffer<float> angles_;  // of the new cells, and of each run
  AttentionRuns<kDim> runs_;
  float unrotated_[kDim];  // angles of layers without RoPE
};

// Null for heads of a width that there are no kernels for.
inline std::unique_ptr<Looking> looking(const Model& model, const Group& group, const Seen& seen,
                                        const Step& step) {
  std::unique_ptr<Looking> found;
  for_width(group.head_dim, [&](auto width) {
    found = std::make_unique<LookingAt<width.value>>(model, group, seen, step);
  });
  return found;
}

}  // namespace kvkeep
