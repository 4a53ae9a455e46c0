#include "decode.h"

#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "buffer.h"
#include "clock.h"
#include "experts.h"
#include "guard.h"
#include "norm.h"
#include "rotation.h"
#include "rows.h"
#include "runs.h"
#include "workers.h"

namespace kvkeep {
namespace {

// Everything that the threads of a step share.
template <int kDim>
class DecodeRun {
 public:
  DecodeRun(const Model& model, const Step& step)
      : model_(model),
        step_(step),
        workers_(step.threads),
        norming_{model.norm_eps, model.norm_plus, model.centred_norms != 0},
        queries_width_(model.heads * kDim),
        residual_(std::size_t(step.sequences) * model.hidden),
        given_(std::size_t(step.sequences) * model.hidden),
        projected_(std::size_t(step.sequences) * projected_width()),
        normed_(step.sequences, model.hidden),
        attended_(step.sequences, queries_width_),
        activated_(step.sequences, model.inner),
        experts_(model, step.sequences) {
    for (int g = 0; g < model.groups; ++g)
      looks_.push_back(std::make_unique<Looking>(model, model.group[g], step.seen[g], step));
    std::fill_n(unrotated_, kDim / 2, 1.f);
    std::fill_n(unrotated_ + kDim / 2, kDim / 2, 0.f);
  }

  void run() {
    int threads = step_.threads;
#pragma omp parallel num_threads(threads)
    {
      if (omp_get_num_threads() == threads)
        work(omp_get_thread_num());
      else if (omp_get_thread_num() == 0)
        alone_ = true;
    }
    if (alone_) {
      Step single = step_;
      single.threads = 1;
      DecodeRun(model_, single).run();
    }
  }

 private:
  // A group's layers in this step. angles: of the new cells, and of each run.
  struct Looking {
    Looking(const Model& model, const Group& group, const Seen& seen, const Step& step)
        : group(group),
          seen(seen),
          keys_width(group.kv_heads * kDim),
          angles(std::size_t(step.sequences + seen.runs) * kDim),
          runs(model, group, seen, step) {}

    const Group& group;
    const Seen& seen;
    const int keys_width;
    Buffer<float> angles;
    AttentionRuns<kDim> runs;
  };

  int projected_width() const {
    int most = 0;
    for (int g = 0; g < model_.groups; ++g) most = std::max(most, model_.group[g].kv_heads);
    return queries_width_ + 2 * most * kDim;
  }

  void work(int me) {
    const int count = step_.sequences;
    Clock clock(me == 0 ? step_.seconds : nullptr);
    workers_.share_then_barrier(me, count, 1, [&](int i) { embed(i); });
    for (auto& in : looks_)
      workers_.share_then_barrier(me, count + in->seen.runs, 1, [&](int i) { turn(*in, i); });
    for (int l = 0; l < model_.layers; ++l) {
      const Layer& layer = model_.layer[l];
      Looking& in = *looks_[layer.group];
      const int at = layer.place;
      workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, layer.attention_norm); });
      clock.ends(Phase::kNorms);
      project(me, layer, in);
      clock.ends(Phase::kProjections);
      workers_.share_then_barrier(me, count + in.seen.runs, 1, [&](int i) { place(layer, in, i); });
      clock.ends(Phase::kCells);
      workers_.share_then_barrier(me, in.runs.units(at), 1,
                                  [&](int u) { in.runs.attend_unit(me, at, u); });
      workers_.share_then_barrier(me, count, 1, [&](int i) {
        in.runs.merge(at, i, layer.sinks, attended_.row(i));
        attended_.sum_up(i);
      });
      clock.ends(Phase::kAttention);
      add_product(me, layer.output, attended_, layer.attention_output_norm);
      clock.ends(Phase::kOutput);
      if (!model_.parallel)
        workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, layer.mlp_norm); });
      clock.ends(Phase::kNorms);
      if (layer.mixture) {
        add_experts(me, layer);
      } else {
        activate(me, layer.mlp);
        add_product(me, layer.mlp.down, activated_, layer.mlp_output_norm);
      }
      clock.ends(Phase::kMlp);
    }
    workers_.share_then_barrier(me, count, 1, [&](int i) {
      norm(residual(i), model_.norm, norming_, model_.hidden, [&](int c, Floats value) {
        store_rounded(step_.hidden + std::size_t(i) * model_.hidden + c, value);
      });
    });
    clock.ends(Phase::kNorms);
  }

  float* residual(int i) { return residual_.get() + std::size_t(i) * model_.hidden; }

  // What attention or MLP gives, where it is normed before it is added.
  float* given(int i) { return given_.get() + std::size_t(i) * model_.hidden; }

  // Queries, keys and values of a sequence, one behind the other.
  float* projected(int i) {
    return projected_.get() + std::size_t(i) * projected_width();
  }

  void embed(int i) {
    auto* from = reinterpret_cast<Bf16*>(normed_.row(i));  // which is not needed yet
    unpack_row(model_.embedding, step_.seen[0].sequence[i].token, from);
    const Floats multiplier = all(model_.embedding_multiplier);
    for (int c = 0; c < model_.hidden; c += kLanes)
      store(residual(i) + c, load(from + c) * multiplier);
  }

  // Towards a sequence's new cell, or what a run looks at.
  void turn(Looking& in, int i) {
    const int run = i - step_.sequences;
    const std::int64_t position =
        run < 0 ? in.seen.sequence[i].position : in.seen.run[run].position;
    angles(in.group.frequencies, kDim, position, in.angles.get() + std::size_t(i) * kDim);
  }

  // weight: null for the residual stream as it is.
  void normalise(int i, const Bf16* weight) {
    const auto to = [&](int c, Floats value) { store_rounded(normed_.row(i) + c, value); };
    if (weight)
      norm(residual(i), weight, norming_, model_.hidden, to);
    else
      for (int c = 0; c < model_.hidden; c += kLanes) to(c, load(residual(i) + c));
    normed_.sum_up(i);
  }

  // Calls `each(i, row, products)` for all sequences and blocks of 16 rows of a matrix.
  template <typename Each>
  void multiply_all(const Matrix& matrix, int block, const Input& input, Each each) {
    multiply_rows(matrix, block, input, 0, step_.sequences, each);
  }

  void project(int me, const Layer& layer, const Looking& in) {
    const int queries = layer.query.blocks(), keys = layer.key.blocks();
    workers_.share_then_barrier(me, queries + keys + layer.value.blocks(), 4, [&](int b) {
      const bool is_query = b < queries, is_key = !is_query && b < queries + keys;
      const Matrix& matrix = is_query ? layer.query : is_key ? layer.key : layer.value;
      const int block = is_query ? b : is_key ? b - queries : b - queries - keys;
      const int from = is_query ? 0 : is_key ? queries_width_ : queries_width_ + in.keys_width;
      multiply_all(matrix, block, normed_, [&](int i, int row, Floats products) {
        store(projected(i) + from + row, products);
      });
    });
    if (layer.query_norm) normalise_heads(me, layer, in);
    if (in.group.query_scale)
      workers_.share_then_barrier(me, step_.sequences * model_.heads, 4, [&](int n) {
        float* x = projected(n / model_.heads) + n % model_.heads * kDim;
        for (int c = 0; c < kDim; c += kLanes)
          store(x + c, load(x + c) * load(in.group.query_scale + c));
      });
  }

  // Queries and keys, head by head, or all heads of each together.
  void normalise_heads(int me, const Layer& layer, const Looking& in) {
    const int queries = model_.whole_norms ? 1 : model_.heads;
    const int keys = model_.whole_norms ? 1 : in.group.kv_heads;
    workers_.share_then_barrier(me, step_.sequences * (queries + keys), 4, [&](int n) {
      const int unit = n % (queries + keys);
      const bool is_query = unit < queries;
      const int width = is_query ? queries_width_ / queries : in.keys_width / keys;
      const int from = is_query ? unit * width : queries_width_ + (unit - queries) * width;
      float* x = projected(n / (queries + keys)) + from;
      norm(x, is_query ? layer.query_norm : layer.key_norm, norming_, width,
           [&](int c, Floats value) { store(x + c, value); });
    });
  }

  // A sequence's new cell into its slot, or the queries of one run as they stand there.
  void place(const Layer& layer, Looking& in, int i) {
    const float* angle =
        layer.rotated ? in.angles.get() + std::size_t(i) * kDim : unrotated_;
    if (i >= step_.sequences) {
      const int run = i - step_.sequences;
      const float* from = projected(in.runs.sequence_of(run));
      for (int head = 0; head < model_.heads; ++head) {
        Activation* query = in.runs.query(run, head);
        rotate(from + head * kDim, angle, kDim, query);
        if (in.runs.transformed(run)) hadamard_in_place(query);
      }
      return;
    }
    const Sequence& sequence = in.seen.sequence[i];
    if (sequence.queries)
      for (int c = 0; c < queries_width_; c += kLanes)
        store_rounded(sequence.queries + std::size_t(layer.place) * queries_width_ + c,
                      load(projected(i) + c));
    const float* keys = projected(i) + queries_width_;
    const float* values = keys + in.keys_width;
    for (int head = 0; head < in.group.kv_heads; ++head) {
      Bf16 key[kDim];
      rotate(keys + head * kDim, angle, kDim, key);
      keep(key, Stretch(sequence.key, layer.place, head));
      keep(values + head * kDim, Stretch(sequence.value, layer.place, head));
    }
  }

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

  // Adds what attention or MLP gives to the residual stream; weight: of its norm, or null.
  void add_product(int me, const Matrix& matrix, const Input& input, const Bf16* weight) {
    workers_.share_then_barrier(me, matrix.blocks(), 6, [&](int block) {
      multiply_all(matrix, block, input, [&](int i, int row, Floats products) {
        take(i, row, products, weight);
      });
    });
    if (weight) add_given(me, weight);
  }

  void add_experts(int me, const Layer& layer) {
    const Bf16* weight = layer.mlp_output_norm;
    experts_.run(me, workers_, *layer.mixture, normed_,
                 [&](int i, int column, Floats values) { take(i, column, values, weight); });
    if (weight) add_given(me, weight);
  }

  // Adds 16 values to the residual stream, or keeps them where they are to be normed before.
  void take(int i, int column, Floats values, const Bf16* weight) {
    if (weight)
      store(given(i) + column, values);
    else
      add(residual(i) + column, values);
  }

  void add(float* to, Floats values) const {
    const Floats multiplier = all(model_.residual_multiplier);
    store(to, multiply_add(values, multiplier, load(to)));
  }

  void add_given(int me, const Bf16* weight) {
    workers_.share_then_barrier(me, step_.sequences, 1, [&](int i) {
      norm(given(i), weight, norming_, model_.hidden,
           [&](int c, Floats values) { add(residual(i) + c, values); });
    });
  }

  void activate(int me, const Mlp& mlp) {
    workers_.share_then_barrier(me, mlp.gate.blocks(), 8, [&](int block) {
      activate_rows(static_cast<Activated>(model_.activation), mlp, block, normed_, 0, step_.sequences, activated_);
    });
    workers_.share_then_barrier(me, step_.sequences, 1, [&](int i) { activated_.sum_up(i); });
  }

  const Model& model_;
  const Step& step_;
  Workers workers_;
  const Norming norming_;
  const int queries_width_;
  Buffer<float> residual_, given_, projected_;
  std::vector<std::unique_ptr<Looking>> looks_;  // by groups
  float unrotated_[kDim];                         // angles of layers without RoPE
  Rows normed_, attended_, activated_;
  ExpertRuns experts_;
  bool alone_ = false;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_interface() {
  using namespace kvkeep;
  return sizeof(Model) + sizeof(Layer) + sizeof(Group) + sizeof(Mixture) + sizeof(Step) +
         sizeof(Seen) + sizeof(Sequence) + sizeof(Sight) + sizeof(Run);
}

int kvkeep_revision() { return kvkeep::kRevision; }

int kvkeep_decode(const kvkeep::Model* model, const kvkeep::Step* step) {
  using namespace kvkeep;
  return guarded([=] {
    switch (model->head_dim) {
      case 32: DecodeRun<32>(*model, *step).run(); return kDone;
      case 64: DecodeRun<64>(*model, *step).run(); return kDone;
      case 96: DecodeRun<96>(*model, *step).run(); return kDone;
      case 128: DecodeRun<128>(*model, *step).run(); return kDone;
      case 256: DecodeRun<256>(*model, *step).run(); return kDone;
      default: return kNoKernel;
    }
  });
}
