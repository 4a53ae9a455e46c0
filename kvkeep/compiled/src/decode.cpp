#include "decode.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "rotation.h"
#include "team.h"

namespace kvkeep {
namespace {

constexpr int kChunk = 256;  // cells that one thread takes at a time, counted from slot 0

// RMSNorm (arXiv:1910.07467) of `size` values, a multiple of 16.
template <typename From>
void norm(const float* x, const Bf16* weight, float eps, int size, From to) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const __m512 factor =
      _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
  for (int i = 0; i < size; i += kLanes)
    to(i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), load_bf16(weight + i)));
}

// Counts time under the phase that has just ended, where anyone wants to know.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds_(seconds) {
    if (seconds_) last_ = std::chrono::steady_clock::now();
  }
  void ends(Phase phase) {
    if (!seconds_) return;
    const auto now = std::chrono::steady_clock::now();
    seconds_[static_cast<int>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point last_;
};

// Everything that the threads of a step share.
template <int kDim>
class Run {
 public:
  Run(const Model& model, const Step& step)
      : model_(model),
        step_(step),
        team_(step.threads),
        groups_(model.heads / model.kv_heads),
        queries_width_(model.heads * kDim),
        keys_width_(model.kv_heads * kDim),
        residual_(std::size_t(step.sequences) * model.hidden),
        projected_(std::size_t(step.sequences) * (queries_width_ + 2 * keys_width_)),
        angles_(std::size_t(step.sequences + step.looks) * kDim),
        rotated_(std::size_t(step.looks) * queries_width_),
        normed_(step.sequences, model.hidden),
        attended_(step.sequences, queries_width_),
        activated_(step.sequences, model.inner) {
    for (int s = 0; s < step.sights; ++s) {
      const Sight& sight = step.sight[s];
      const int begin = sight.first / kChunk;
      const int end = (sight.first + sight.cells + kChunk - 1) / kChunk;
      first_found_.push_back(found_count_);
      chunks_.push_back(end - begin);
      for (int head = 0; head < model.kv_heads; ++head)
        for (int chunk = begin; chunk < end; ++chunk) units_.push_back({s, chunk, head});
      found_count_ += std::size_t(end - begin) * sight.looks * model.heads;
    }
    found_ = std::make_unique<Buffer<Found>>(found_count_);
    out_ = std::make_unique<Buffer<float>>(found_count_ * kDim);
    looker_.resize(step.sights);
    int look = 0;
    for (int i = 0; i < step.sequences; ++i)
      for (int j = 0; j < step.sequence[i].looks; ++j, ++look) {
        sequence_of_.push_back(i);
        auto& lookers = looker_[step.look[look].sight];
        lookers.resize(step.sight[step.look[look].sight].looks);
        lookers[step.look[look].index] = look;
      }
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
      Run(model_, single).run();
    }
  }

 private:
  struct Unit {
    int sight, chunk, head;
  };

  struct Rows : Input {
    Rows(int count, int columns)
        : Input{nullptr, nullptr, columns},
          x_(std::size_t(count) * columns),
          sums_(std::size_t(count) * (columns / kGroup)) {
      x = x_.get(), sums = sums_.get();
    }
    Buffer<Bf16> x_;
    Buffer<float> sums_;
  };

  void work(int me) {
    const int count = step_.sequences;
    Clock clock(me == 0 ? step_.seconds : nullptr);
    team_.share_and_meet(me, count + step_.looks, 1, [&](int i) { prepare(i); });
    for (int l = 0; l < model_.layers; ++l) {
      const Layer& layer = model_.layer[l];
      team_.share_and_meet(me, count, 1, [&](int i) { normalise(i, layer.attention_norm); });
      clock.ends(Phase::kNorms);
      project(me, layer);
      clock.ends(Phase::kProjections);
      team_.share_and_meet(me, count + step_.looks, 1, [&](int i) { place(l, i); });
      clock.ends(Phase::kCells);
      team_.share_and_meet(me, static_cast<int>(units_.size()), 1,
                           [&](int u) { look(l, units_[u]); });
      team_.share_and_meet(me, count, 1, [&](int i) { add_up(i); });
      clock.ends(Phase::kAttention);
      add_product(me, layer.output, attended_);
      clock.ends(Phase::kOutput);
      team_.share_and_meet(me, count, 1, [&](int i) { normalise(i, layer.mlp_norm); });
      clock.ends(Phase::kNorms);
      activate(me, layer);
      add_product(me, layer.down, activated_);
      clock.ends(Phase::kMlp);
    }
    team_.share_and_meet(me, count, 1, [&](int i) {
      norm(residual(i), model_.norm, model_.norm_eps, model_.hidden, [&](int c, __m512 value) {
        store_bf16(step_.hidden + std::size_t(i) * model_.hidden + c, value);
      });
    });
    clock.ends(Phase::kNorms);
  }

  float* residual(int i) { return residual_.get() + std::size_t(i) * model_.hidden; }

  // Queries, keys and values of a sequence, one behind the other.
  float* projected(int i) {
    return projected_.get() + std::size_t(i) * (queries_width_ + 2 * keys_width_);
  }

  void prepare(int i) {
    if (i < step_.sequences) {
      const Sequence& sequence = step_.sequence[i];
      const Bf16* from = model_.embedding + std::size_t(sequence.token) * model_.hidden;
      for (int c = 0; c < model_.hidden; c += kLanes)
        _mm512_storeu_ps(residual(i) + c, load_bf16(from + c));
      angles(model_.frequencies, kDim, sequence.position, angles_.get() + std::size_t(i) * kDim);
    } else {
      const Look& look = step_.look[i - step_.sequences];
      angles(model_.frequencies, kDim, look.position, angles_.get() + std::size_t(i) * kDim);
    }
  }

  void normalise(int i, const Bf16* weight) {
    norm(residual(i), weight, model_.norm_eps, model_.hidden,
         [&](int c, __m512 value) { store_bf16(normed_.row(i) + c, value); });
    normed_.sum_up(i);
  }

  // Calls `each(i, row, products)` for all sequences and blocks of 16 rows of a matrix.
  template <typename Each>
  void times(const Matrix& matrix, int block, const Input& input, Each each) {
    __m512 products[kMostRows];
    for (int first = 0; first < step_.sequences; first += kMostRows) {
      const int count = std::min(kMostRows, step_.sequences - first);
      multiply(matrix, block, input, first, count, products);
      for (int i = 0; i < count; ++i) each(first + i, block * kBlock, products[i]);
    }
  }

  void project(int me, const Layer& layer) {
    const int queries = layer.query.blocks(), keys = layer.key.blocks();
    team_.share_and_meet(me, queries + keys + layer.value.blocks(), 4, [&](int b) {
      const bool is_query = b < queries, is_key = !is_query && b < queries + keys;
      const Matrix& matrix = is_query ? layer.query : is_key ? layer.key : layer.value;
      const int block = is_query ? b : is_key ? b - queries : b - queries - keys;
      const int from = is_query ? 0 : is_key ? queries_width_ : queries_width_ + keys_width_;
      times(matrix, block, normed_, [&](int i, int row, __m512 products) {
        _mm512_storeu_ps(projected(i) + from + row, products);
      });
    });
    if (layer.query_norm)
      team_.share_and_meet(me, step_.sequences * (model_.heads + model_.kv_heads), 4, [&](int n) {
        const int head = n % (model_.heads + model_.kv_heads);
        float* x = projected(n / (model_.heads + model_.kv_heads)) + head * kDim;
        const Bf16* weight = head < model_.heads ? layer.query_norm : layer.key_norm;
        norm(x, weight, model_.norm_eps, kDim,
             [&](int c, __m512 value) { _mm512_storeu_ps(x + c, value); });
      });
  }

  // A sequence's new cell into its slot, or the queries of one look as they stand there.
  void place(int layer, int i) {
    const float* angle = angles_.get() + std::size_t(i) * kDim;
    if (i >= step_.sequences) {
      const int look = i - step_.sequences;
      const float* from = projected(sequence_of_[look]);
      Bf16* to = rotated_.get() + std::size_t(look) * queries_width_;
      for (int head = 0; head < model_.heads; ++head)
        rotate(from + head * kDim, angle, kDim, to + head * kDim);
      return;
    }
    const Sequence& sequence = step_.sequence[i];
    const float* keys = projected(i) + queries_width_;
    const float* values = keys + keys_width_;
    for (int head = 0; head < model_.kv_heads; ++head) {
      const Strides& k = sequence.key_strides;
      const Strides& v = sequence.value_strides;
      rotate(keys + head * kDim, angle, kDim, sequence.key + layer * k.layer + head * k.head);
      Bf16* to = sequence.value + layer * v.layer + head * v.head;
      for (int d = 0; d < kDim; d += kLanes)
        store_bf16(to + d, _mm512_loadu_ps(values + head * kDim + d));
    }
  }

  // Where what a look found in a chunk lies.
  std::size_t found_at(int sight, int index, int chunk, int head) const {
    const int from = step_.sight[sight].first / kChunk;
    return first_found_[sight] +
           (std::size_t(index) * chunks_[sight] + (chunk - from)) * model_.heads + head;
  }

  // All queries that see a chunk of cells of one KV head.
  void look(int layer, const Unit& unit) {
    static thread_local Packed<kDim> block;
    static thread_local std::vector<Row> rows;
    const Sight& sight = step_.sight[unit.sight];
    const int first = std::max(sight.first, unit.chunk * kChunk);
    const int end = std::min(sight.first + sight.cells, (unit.chunk + 1) * kChunk);
    rows.clear();
    for (int index = 0; index < sight.looks; ++index)
      for (int g = 0; g < groups_; ++g) {
        const int head = unit.head * groups_ + g;
        const std::size_t at = found_at(unit.sight, index, unit.chunk, head);
        float* out = out_->get() + at * kDim;
        (*found_)[at] = Found{};
        std::fill_n(out, kDim, 0.f);
        const int look = looker_[unit.sight][index];
        rows.push_back({rotated_.get() + std::size_t(look) * queries_width_ + head * kDim, nullptr,
                        0, 0, found_->get() + at, out});
      }
    const Strides& k = sight.key_strides;
    const Strides& v = sight.value_strides;
    const Bf16* keys = sight.keys + layer * k.layer + unit.head * k.head;
    const Bf16* values = sight.values + layer * v.layer + unit.head * v.head;
    // Blocks begin at multiples of their size, whichever cells are looked at: sums then come out
    // the same to the last bit, whoever else looks.
    for (int slot = first / kCells * kCells; slot < end; slot += kCells) {
      const int from = std::max(first - slot, 0), upto = std::min(kCells, end - slot);
      pack<kDim>(keys + slot * k.cell, k.cell, values + slot * v.cell, v.cell, from, upto, block);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].begin = from, rows[r].end = upto;
        if (sight.bias)
          rows[r].bias = sight.bias + static_cast<long>(r / groups_) * sight.cells + slot - sight.first;
      }
      const int next = slot + kCells;
      const Ahead ahead{keys + next * k.cell, values + next * v.cell, k.cell, v.cell,
                        std::clamp(sight.first + sight.cells - next, 0, kCells)};
      attend<kDim>(block, model_.scale, rows.data(), static_cast<int>(rows.size()), ahead);
    }
  }

  // What a sequence's looks found, as one softmax.
  void add_up(int i) {
    int begin = 0;
    for (int before = 0; before < i; ++before) begin += step_.sequence[before].looks;
    const int end = begin + step_.sequence[i].looks;
    for (int head = 0; head < model_.heads; ++head) {
      float most = kNothing;
      const auto each = [&](auto visit) {
        for (int l = begin; l < end; ++l) {
          const Look& look = step_.look[l];
          const int from = step_.sight[look.sight].first / kChunk;
          for (int chunk = from; chunk < from + chunks_[look.sight]; ++chunk) {
            const std::size_t at = found_at(look.sight, look.index, chunk, head);
            if ((*found_)[at].sum > 0.f) visit((*found_)[at], out_->get() + at * kDim);
          }
        }
      };
      each([&](const Found& found, const float*) { most = std::max(most, found.most); });
      float total = 0.f;
      __m512 sum[kDim / kLanes];
      for (auto& lanes : sum) lanes = _mm512_setzero_ps();
      each([&](const Found& found, const float* out) {
        const float share = std::exp2(found.most - most);
        total += share * found.sum;
        for (int d = 0; d < kDim / kLanes; ++d)
          sum[d] = _mm512_fmadd_ps(_mm512_set1_ps(share), _mm512_loadu_ps(out + d * kLanes), sum[d]);
      });
      for (int d = 0; d < kDim / kLanes; ++d)
        store_bf16(attended_.row(i) + head * kDim + d * kLanes,
                   _mm512_div_ps(sum[d], _mm512_set1_ps(total)));
    }
    attended_.sum_up(i);
  }

  void add_product(int me, const Matrix& matrix, const Input& input) {
    team_.share_and_meet(me, matrix.blocks(), 6, [&](int block) {
      times(matrix, block, input, [&](int i, int row, __m512 products) {
        float* to = residual(i) + row;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), products));
      });
    });
  }

  void activate(int me, const Layer& layer) {
    team_.share_and_meet(me, layer.gate.blocks(), 8, [&](int block) {
      __m512 gates[kMostRows], ups[kMostRows];
      for (int first = 0; first < step_.sequences; first += kMostRows) {
        const int count = std::min(kMostRows, step_.sequences - first);
        multiply(layer.gate, block, normed_, first, count, gates);
        multiply(layer.up, block, normed_, first, count, ups);
        for (int i = 0; i < count; ++i)
          store_bf16(activated_.row(first + i) + block * kBlock, sigmoid_times(gates[i], ups[i]));
      }
    });
    team_.share_and_meet(me, step_.sequences, 1, [&](int i) { activated_.sum_up(i); });
  }

  const Model& model_;
  const Step& step_;
  Team team_;
  const int groups_, queries_width_, keys_width_;
  Buffer<float> residual_, projected_, angles_;
  Buffer<Bf16> rotated_;
  Rows normed_, attended_, activated_;
  std::vector<Unit> units_;
  std::vector<std::size_t> first_found_;
  std::vector<int> chunks_, sequence_of_;
  std::vector<std::vector<int>> looker_;
  std::size_t found_count_ = 0;
  std::unique_ptr<Buffer<Found>> found_;
  std::unique_ptr<Buffer<float>> out_;
  bool alone_ = false;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_interface() {
  using namespace kvkeep;
  return sizeof(Model) + sizeof(Layer) + sizeof(Step) + sizeof(Sequence) + sizeof(Sight) +
         sizeof(Look);
}

int kvkeep_decode(const kvkeep::Model* model, const kvkeep::Step* step) {
  using namespace kvkeep;
  switch (model->head_dim) {
    case 32: Run<32>(*model, *step).run(); return 0;
    case 64: Run<64>(*model, *step).run(); return 0;
    case 96: Run<96>(*model, *step).run(); return 0;
    case 128: Run<128>(*model, *step).run(); return 0;
    default: return 1;
  }
}

void kvkeep_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count, float* out,
                    int threads) {
  using namespace kvkeep;
  std::vector<float> sums(std::size_t(count) * (matrix->columns / kGroup));
  const Input input{const_cast<Bf16*>(x), sums.data(), matrix->columns};
  for (int i = 0; i < count; ++i) input.sum_up(i);
  Team team(threads);
#pragma omp parallel num_threads(threads)
  team.share(omp_get_thread_num(), matrix->blocks(), 16, [&](int block) {
    __m512 products[kMostRows];
    const int rows = std::min(kBlock, matrix->rows - block * kBlock);
    const auto mask = static_cast<__mmask16>((1u << rows) - 1);
    for (int first = 0; first < count; first += kMostRows) {
      const int some = std::min(kMostRows, count - first);
      multiply(*matrix, block, input, first, some, products);
      for (int i = 0; i < some; ++i)
        _mm512_mask_storeu_ps(
            out + std::size_t(first + i) * matrix->rows + block * kBlock, mask, products[i]);
    }
  });
}
