#include "decode.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "buffer.h"
#include "clock.h"
#include "experts.h"
#include "guard.h"
#include "looking.h"
#include "norm.h"
#include "per_layer.h"
#include "rows.h"
#include "workers.h"

namespace kvkeep {
namespace {

// Everything that the threads of a step share.
class DecodeRun {
 public:
  DecodeRun(const Model& model, const Step& step)
      : model_(model),
        step_(step),
        workers_(step.threads),
        norming_{model.norm_eps, model.norm_plus, model.centred_norms != 0},
        residual_(std::size_t(step.sequences) * model.hidden),
        given_(std::size_t(step.sequences) * model.hidden),
        beside_(has_beside(model) ? std::size_t(step.sequences) * model.hidden : 0),
        normed_(step.sequences, model.hidden),
        activated_(step.sequences, model.inner),
        experts_(model, step.sequences),
        per_layer_(model, step.sequences) {
    int queries = 0, most = 0;
    for (int g = 0; g < model.groups; ++g) {
      looks_.push_back(looking(model, model.group[g], step.seen[g], step));
      known_ &= looks_.back() != nullptr;
      if (!known_) return;
      const Looking& in = *looks_.back();
      queries = std::max(queries, in.queries_width);
      most = std::max(most, in.queries_width + 2 * in.keys_width);
    }
    attended_ = std::make_unique<Rows>(step.sequences, queries);
    numbers_ = std::make_unique<Buffer<float>>(std::size_t(step.sequences) * most);
    projected_ = {numbers_->get(), most};
  }

  // Whether there are kernels for heads of all widths.
  bool known() const { return known_; }

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
  static bool has_beside(const Model& model) {
    const Mixture* mixture = model.layers ? model.layer[0].mixture : nullptr;
    return mixture && mixture->beside;
  }

  void work(int me) {
    const int count = step_.sequences;
    Clock clock(me == 0 ? step_.seconds : nullptr);
    workers_.share_then_barrier(me, count, 1, [&](int i) { embed(i); });
    for (auto& in : looks_)
      workers_.share_then_barrier(me, count + in->seen.runs, 1, [&](int i) { in->turn(i); });
    if (model_.per_layer) {
      workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, nullptr); });
      per_layer_.start(me, workers_, norming_, normed_, step_.seen[0].sequence);
    }
    for (int l = 0; l < model_.layers; ++l) {
      const Layer& layer = model_.layer[l];
      Looking& in = *looks_[layer.group];
      Input attended = narrower(*attended_, in.queries_width);
      workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, layer.attention_norm); });
      clock.ends(Phase::kNorms);
      project(me, layer, in);
      clock.ends(Phase::kProjections);
      workers_.share_then_barrier(me, count + in.seen.runs, 1,
                                  [&](int i) { in.place(layer, projected_, i); });
      clock.ends(Phase::kCells);
      workers_.share_then_barrier(me, in.units(layer), 1,
                                  [&](int u) { in.attend_unit(me, layer, u); });
      workers_.share_then_barrier(me, count, 1, [&](int i) {
        in.merge(layer, i, attended.row(i));
        attended.sum_up(i);
      });
      clock.ends(Phase::kAttention);
      add_product(me, layer.output, attended, layer.attention_output_norm);
      clock.ends(Phase::kOutput);
      if (!model_.parallel)
        workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, layer.mlp_norm); });
      clock.ends(Phase::kNorms);
      add_mlp(me, layer);
      if (layer.own) add_own(me, l, *layer.own);
      if (layer.scale != 1.f)
        workers_.share_then_barrier(me, count, 1, [&](int i) { scale(i, layer.scale); });
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

  // What an MLP and the experts beside it give together.
  float* both(int i) { return beside_.get() + std::size_t(i) * model_.hidden; }

  void embed(int i) {
    auto* from = reinterpret_cast<Bf16*>(normed_.row(i));  // which is not needed yet
    unpack_row(model_.embedding, step_.seen[0].sequence[i].token, from);
    const Floats multiplier = all(model_.embedding_multiplier);
    for (int c = 0; c < model_.hidden; c += kLanes)
      store(residual(i) + c, load(from + c) * multiplier);
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

  // Matrices of no rows give nothing; see Layer.
  void project(int me, const Layer& layer, const Looking& in) {
    const int queries = layer.query.blocks(), keys = layer.key.blocks();
    const bool twice = layer.key.rows && !layer.value.rows;  // keys are values, too
    workers_.share_then_barrier(me, queries + keys + layer.value.blocks(), 4, [&](int b) {
      const bool is_query = b < queries, is_key = !is_query && b < queries + keys;
      const Matrix& matrix = is_query ? layer.query : is_key ? layer.key : layer.value;
      const int block = is_query ? b : is_key ? b - queries : b - queries - keys;
      const int from = is_query ? 0 : is_key ? in.queries_width : in.queries_width + in.keys_width;
      multiply_all(matrix, block, normed_, [&](int i, int row, Floats products) {
        float* to = projected_.row(i) + from + row;
        store(to, products);
        if (twice && is_key) store(to + in.keys_width, products);
      });
    });
    if (layer.query_norm) normalise_heads(me, layer, in);
    if (in.group.query_scale) scale_queries(me, in);
  }

  // Queries and keys, head by head, or all heads of each together; and values, where they are normed.
  void normalise_heads(int me, const Layer& layer, const Looking& in) {
    const int queries = model_.whole_norms ? 1 : model_.heads, there = layer.key.rows ? 1 : 0;
    const int keys = there * (model_.whole_norms ? 1 : in.group.kv_heads);
    const int values = model_.values_normed ? there * in.group.kv_heads : 0;
    const int units = queries + keys + values;
    workers_.share_then_barrier(me, step_.sequences * units, 4, [&](int n) {
      const int unit = n % units;
      const bool is_query = unit < queries;
      float* x = projected_.row(n / units);
      const auto put = [&](int c, Floats value) { store(x + c, value); };
      if (unit >= queries + keys) {
        const int head = unit - queries - keys;
        x += in.queries_width + in.keys_width + head * in.group.head_dim;
        return norm(x, norming_, in.group.head_dim, put);
      }
      const int width = is_query ? in.queries_width / queries : in.keys_width / keys;
      x += is_query ? unit * width : in.queries_width + (unit - queries) * width;
      norm(x, is_query ? layer.query_norm : layer.key_norm, norming_, width, put);
    });
  }

  void scale_queries(int me, const Looking& in) {
    const int width = in.group.head_dim;
    workers_.share_then_barrier(me, step_.sequences * model_.heads, 4, [&](int n) {
      float* x = projected_.row(n / model_.heads) + n % model_.heads * width;
      for (int c = 0; c < width; c += kLanes)
        store(x + c, load(x + c) * load(in.group.query_scale + c));
    });
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

  // Of the MLP, of experts in its place, or of both.
  void add_mlp(int me, const Layer& layer) {
    if (layer.mixture && layer.mixture->beside) return add_both(me, layer, *layer.mixture->beside);
    if (layer.mixture) return add_experts(me, layer);
    const Input activated = activate(me, layer.mlp);
    add_product(me, layer.mlp.down, activated, layer.mlp_output_norm);
  }

  void add_experts(int me, const Layer& layer) {
    const Bf16* weight = layer.mlp_output_norm;
    experts_.route(me, workers_, *layer.mixture, normed_);
    experts_.run(me, workers_, *layer.mixture, normed_,
                 [&](int i, int column, Floats values) { take(i, column, values, weight); });
    if (weight) add_given(me, weight);
  }

  // The MLP's and the experts', each normed by itself. The router reads the residual stream, normed
  // without a weight and scaled.
  void add_both(int me, const Layer& layer, const Beside& beside) {
    const int count = step_.sequences, hidden = model_.hidden;
    const Input activated = activate(me, layer.mlp);
    give_product(me, layer.mlp.down, activated);
    const Floats root = all(1.f / std::sqrt(static_cast<float>(hidden)));
    workers_.share_then_barrier(me, count, 1, [&](int i) {
      float* sum = both(i);
      norm(given(i), beside.mlp_norm, norming_, hidden,
           [&](int c, Floats value) { store(sum + c, value); });
      norm(residual(i), norming_, hidden, [&](int c, Floats value) {
        store_rounded(normed_.row(i) + c, value * load(beside.router_scale + c) * root);
      });
      normed_.sum_up(i);
    });
    experts_.route(me, workers_, *layer.mixture, normed_);
    workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, beside.norm); });
    experts_.run(me, workers_, *layer.mixture, normed_,
                 [&](int i, int column, Floats values) { store(given(i) + column, values); });
    const Bf16* weight = layer.mlp_output_norm;
    workers_.share_then_barrier(me, count, 1, [&](int i) {
      norm(given(i), beside.output_norm, norming_, hidden, [&](int c, Floats value) {
        take(i, c, value + load(both(i) + c), weight);
      });
    });
    if (weight) add_given(me, weight);
  }

  // What the layer's own vectors let through of the residual stream.
  void add_own(int me, int layer, const OwnInput& own) {
    workers_.share_then_barrier(me, step_.sequences, 1, [&](int i) { normalise(i, nullptr); });
    const Input& through = per_layer_.let_through(me, workers_, layer, own.gate, normed_);
    add_product(me, own.projection, through, own.norm);
  }

  void scale(int i, float factor) {
    for (int c = 0; c < model_.hidden; c += kLanes)
      store(residual(i) + c, load(residual(i) + c) * all(factor));
  }

  void give_product(int me, const Matrix& matrix, const Input& input) {
    workers_.share_then_barrier(me, matrix.blocks(), 6, [&](int block) {
      multiply_all(matrix, block, input, [&](int i, int row, Floats products) {
        store(given(i) + row, products);
      });
    });
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

  // [sequences, the MLP's inner].
  Input activate(int me, const Mlp& mlp) {
    Input activated = narrower(activated_, mlp.down.columns);
    workers_.share_then_barrier(me, mlp.gate.blocks(), 8, [&](int block) {
      activate_rows(static_cast<Activated>(model_.activation), mlp, block, normed_, 0,
                    step_.sequences, activated);
    });
    workers_.share_then_barrier(me, step_.sequences, 1, [&](int i) { activated.sum_up(i); });
    return activated;
  }

  // Rows of fewer columns in the same memory.
  static Input narrower(const Input& rows, int columns) {
    return {rows.x, rows.sums, columns, rows.integers};
  }

  const Model& model_;
  const Step& step_;
  Workers workers_;
  const Norming norming_;
  Buffer<float> residual_, given_, beside_;
  Rows normed_, activated_;
  ExpertRuns experts_;
  PerLayerRuns per_layer_;
  std::vector<std::unique_ptr<Looking>> looks_;  // by groups
  std::unique_ptr<Rows> attended_;
  std::unique_ptr<Buffer<float>> numbers_;
  Projected projected_{};
  bool known_ = true;
  bool alone_ = false;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_interface() {
  using namespace kvkeep;
  return sizeof(Model) + sizeof(Layer) + sizeof(Group) + sizeof(Mixture) + sizeof(Beside) +
         sizeof(PerLayer) + sizeof(OwnInput) + sizeof(Step) + sizeof(Seen) + sizeof(Sequence) +
         sizeof(Sight) + sizeof(Run);
}

int kvkeep_revision() { return kvkeep::kRevision; }

int kvkeep_decode(const kvkeep::Model* model, const kvkeep::Step* step) {
  using namespace kvkeep;
  return guarded([=] {
    DecodeRun run(*model, *step);
    if (!run.known()) return kNoKernel;
    run.run();
    return kDone;
  });
}
