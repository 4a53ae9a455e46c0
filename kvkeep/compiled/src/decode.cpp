#include "decode.h"

#include <omp.h>

#include <algorithm>
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
        queries_width_(model.heads * kDim),
        keys_width_(model.kv_heads * kDim),
        residual_(std::size_t(step.sequences) * model.hidden),
        given_(std::size_t(step.sequences) * model.hidden),
        projected_(std::size_t(step.sequences) * (queries_width_ + 2 * keys_width_)),
        angles_(std::size_t(step.sequences + step.runs) * kDim),
        runs_(model, step),
        normed_(step.sequences, model.hidden),
        attended_(step.sequences, queries_width_),
        activated_(step.sequences, model.inner),
        experts_(model, step.sequences) {}

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
  void work(int me) {
    const int count = step_.sequences;
    Clock clock(me == 0 ? step_.seconds : nullptr);
    workers_.share_then_barrier(me, count + step_.runs, 1, [&](int i) { prepare(i); });
    for (int l = 0; l < model_.layers; ++l) {
      const Layer& layer = model_.layer[l];
      workers_.share_then_barrier(me, count, 1, [&](int i) { normalise(i, layer.attention_norm); });
      clock.ends(Phase::kNorms);
      project(me, layer);
      clock.ends(Phase::kProjections);
      workers_.share_then_barrier(me, count + step_.runs, 1, [&](int i) { place(l, i); });
      clock.ends(Phase::kCells);
      workers_.share_then_barrier(me, runs_.units(l), 1, [&](int u) { runs_.attend_unit(me, l, u); });
      workers_.share_then_barrier(me, count, 1, [&](int i) {
        runs_.merge(l, i, attended_.row(i));
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
      norm(residual(i), model_.norm, model_.norm_eps, model_.centred_norms, model_.hidden, [&](int c, __m512 value) {
        store_bf16(step_.hidden + std::size_t(i) * model_.hidden + c, value);
      });
    });
    clock.ends(Phase::kNorms);
  }

  float* residual(int i) { return residual_.get() + std::size_t(i) * model_.hidden; }

  // What attention or MLP gives, where it is normed before it is added.
  float* given(int i) { return given_.get() + std::size_t(i) * model_.hidden; }

  // Queries, keys and values of a sequence, one behind the other.
  float* projected(int i) {
    return projected_.get() + std::size_t(i) * (queries_width_ + 2 * keys_width_);
  }

  void prepare(int i) {
    if (i < step_.sequences) {
      const Sequence& sequence = step_.sequence[i];
      Bf16* from = normed_.row(i);  // which is not needed yet
      unpack_row(model_.embedding, sequence.token, from);
      const __m512 multiplier = _mm512_set1_ps(model_.embedding_multiplier);
      for (int c = 0; c < model_.hidden; c += kLanes)
        _mm512_storeu_ps(residual(i) + c, _mm512_mul_ps(load_bf16(from + c), multiplier));
      angles(model_.frequencies, kDim, sequence.position, angles_.get() + std::size_t(i) * kDim);
    } else {
      const Run& run = step_.run[i - step_.sequences];
      angles(model_.frequencies, kDim, run.position, angles_.get() + std::size_t(i) * kDim);
    }
  }

  // weight: null for the residual stream as it is.
  void normalise(int i, const Bf16* weight) {
    const auto to = [&](int c, __m512 value) { store_bf16(normed_.row(i) + c, value); };
    if (weight)
      norm(residual(i), weight, model_.norm_eps, model_.centred_norms, model_.hidden, to);
    else
      for (int c = 0; c < model_.hidden; c += kLanes) to(c, _mm512_loadu_ps(residual(i) + c));
    normed_.sum_up(i);
  }

  // Calls `each(i, row, products)` for all sequences and blocks of 16 rows of a matrix.
  template <typename Each>
  void multiply_all(const Matrix& matrix, int block, const Input& input, Each each) {
    multiply_rows(matrix, block, input, 0, step_.sequences, each);
  }

  void project(int me, const Layer& layer) {
    const int queries = layer.query.blocks(), keys = layer.key.blocks();
    workers_.share_then_barrier(me, queries + keys + layer.value.blocks(), 4, [&](int b) {
      const bool is_query = b < queries, is_key = !is_query && b < queries + keys;
      const Matrix& matrix = is_query ? layer.query : is_key ? layer.key : layer.value;
      const int block = is_query ? b : is_key ? b - queries : b - queries - keys;
      const int from = is_query ? 0 : is_key ? queries_width_ : queries_width_ + keys_width_;
      multiply_all(matrix, block, normed_, [&](int i, int row, __m512 products) {
        _mm512_storeu_ps(projected(i) + from + row, products);
      });
    });
    if (layer.query_norm) normalise_heads(me, layer);
    if (model_.query_scale)
      workers_.share_then_barrier(me, step_.sequences * model_.heads, 4, [&](int n) {
        float* x = projected(n / model_.heads) + n % model_.heads * kDim;
        for (int c = 0; c < kDim; c += kLanes)
          _mm512_storeu_ps(x + c, _mm512_mul_ps(_mm512_loadu_ps(x + c),
                                                _mm512_loadu_ps(model_.query_scale + c)));
      });
  }

  // Queries and keys, head by head, or all heads of each together.
  void normalise_heads(int me, const Layer& layer) {
    const int queries = model_.whole_norms ? 1 : model_.heads;
    const int keys = model_.whole_norms ? 1 : model_.kv_heads;
    workers_.share_then_barrier(me, step_.sequences * (queries + keys), 4, [&](int n) {
      const int unit = n % (queries + keys);
      const bool is_query = unit < queries;
      const int width = is_query ? queries_width_ / queries : keys_width_ / keys;
      const int from = is_query ? unit * width : queries_width_ + (unit - queries) * width;
      float* x = projected(n / (queries + keys)) + from;
      norm(x, is_query ? layer.query_norm : layer.key_norm, model_.norm_eps, model_.centred_norms, width,
           [&](int c, __m512 value) { _mm512_storeu_ps(x + c, value); });
    });
  }

  // A sequence's new cell into its slot, or the queries of one run as they stand there.
  void place(int layer, int i) {
    const float* angle = angles_.get() + std::size_t(i) * kDim;
    if (i >= step_.sequences) {
      const int run = i - step_.sequences;
      const float* from = projected(runs_.sequence_of(run));
      for (int head = 0; head < model_.heads; ++head) {
        Bf16* query = runs_.query(run, head);
        rotate(from + head * kDim, angle, kDim, query);
        if (runs_.transformed(run)) hadamard_in_place(query);
      }
      return;
    }
    const Sequence& sequence = step_.sequence[i];
    if (sequence.queries)
      for (int c = 0; c < queries_width_; c += kLanes)
        store_bf16(sequence.queries + std::size_t(layer) * queries_width_ + c,
                   _mm512_loadu_ps(projected(i) + c));
    const float* keys = projected(i) + queries_width_;
    const float* values = keys + keys_width_;
    for (int head = 0; head < model_.kv_heads; ++head) {
      Bf16 key[kDim];
      rotate(keys + head * kDim, angle, kDim, key);
      keep(key, Stretch(sequence.key, layer, head));
      keep(values + head * kDim, Stretch(sequence.value, layer, head));
    }
  }

  void hadamard_in_place(Bf16* query) const {
    Vector<kDim> x;
    load<kDim>(query, x);
    hadamard<kDim>(x);
    store<kDim>(query, x);
  }

  // Into the first cell of a stretch.
  template <typename Number>
  void keep(const Number* numbers, const Stretch& to) const {
    Vector<kDim> x;
    load<kDim>(numbers, x);
    if (!to.quantised()) return store<kDim>(to.plain(), x);
    hadamard<kDim>(x);
    quantise<kDim>(x, to);
  }

  // Adds what attention or MLP gives to the residual stream; weight: of its norm, or null.
  void add_product(int me, const Matrix& matrix, const Input& input, const Bf16* weight) {
    workers_.share_then_barrier(me, matrix.blocks(), 6, [&](int block) {
      multiply_all(matrix, block, input, [&](int i, int row, __m512 products) {
        take(i, row, products, weight);
      });
    });
    if (weight) add_given(me, weight);
  }

  void add_experts(int me, const Layer& layer) {
    const Bf16* weight = layer.mlp_output_norm;
    experts_.run(me, workers_, *layer.mixture, normed_,
                 [&](int i, int column, __m512 values) { take(i, column, values, weight); });
    if (weight) add_given(me, weight);
  }

  // Adds 16 values to the residual stream, or keeps them where they are to be normed before.
  void take(int i, int column, __m512 values, const Bf16* weight) {
    if (weight)
      _mm512_storeu_ps(given(i) + column, values);
    else
      add(residual(i) + column, values);
  }

  void add(float* to, __m512 values) const {
    const __m512 multiplier = _mm512_set1_ps(model_.residual_multiplier);
    _mm512_storeu_ps(to, _mm512_fmadd_ps(values, multiplier, _mm512_loadu_ps(to)));
  }

  void add_given(int me, const Bf16* weight) {
    workers_.share_then_barrier(me, step_.sequences, 1, [&](int i) {
      norm(given(i), weight, model_.norm_eps, model_.centred_norms, model_.hidden,
           [&](int c, __m512 values) { add(residual(i) + c, values); });
    });
  }

  void activate(int me, const Mlp& mlp) {
    workers_.share_then_barrier(me, mlp.gate.blocks(), 8, [&](int block) {
      activate_rows(mlp, block, normed_, 0, step_.sequences, activated_);
    });
    workers_.share_then_barrier(me, step_.sequences, 1, [&](int i) { activated_.sum_up(i); });
  }

  const Model& model_;
  const Step& step_;
  Workers workers_;
  const int queries_width_, keys_width_;
  Buffer<float> residual_, given_, projected_, angles_;
  AttentionRuns<kDim> runs_;
  Rows normed_, attended_, activated_;
  ExpertRuns experts_;
  bool alone_ = false;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_interface() {
  using namespace kvkeep;
  return sizeof(Model) + sizeof(Layer) + sizeof(Mixture) + sizeof(Step) + sizeof(Sequence) +
         sizeof(Sight) + sizeof(Run);
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
      default: return kNoKernel;
    }
  });
}
