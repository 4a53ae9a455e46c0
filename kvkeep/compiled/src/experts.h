// Mixtures of experts in a decode step: which experts each sequence goes through, and what they give.
//
// A choice is one expert of one sequence. Those of an expert lie side by side, so that its weights are
// read once for all of them:
//
//   sequence 0 chose experts 5, 2; sequence 1 chose 5, 7
//   choice   0 is (0, 5), 1 is (0, 2), 2 is (1, 5), 3 is (1, 7)
//   row      0: choice 1 | 1: choice 0, 2: choice 2 | 3: choice 3     of experts 2 | 5 | 7
//
// A sequence's are added up in the order in which it chose them: what comes of it does not depend on
// the other sequences, nor on the number of threads.
#pragma once

#include <cmath>
#include <cstring>

#include "decode.h"
#include "rows.h"
#include "workers.h"

namespace kvkeep {

class ExpertRuns {
 public:
  ExpertRuns(const Model& model, int sequences)
      : model_(model),
        sequences_(sequences),
        per_token_(model.experts_per_token),
        choices_(sequences * model.experts_per_token),
        scored_((model.experts + kBlock - 1) / kBlock * kBlock),
        scores_(std::size_t(sequences) * scored_),
        taken_(std::size_t(sequences) * model.experts),
        chosen_(choices_),
        row_(choices_),
        weight_(choices_),
        shared_weight_(sequences),
        first_(std::size_t(model.experts) + 1),
        hit_(model.experts),
        read_(choices_, model.experts ? model.hidden : 0),
        activated_(choices_, model.expert_inner),
        given_(std::size_t(choices_) * model.hidden),
        shared_activated_(sequences, model.shared_inner),
        shared_given_(model.shared_inner ? std::size_t(sequences) * model.hidden : 0) {}

  // Which experts each sequence goes through, all threads together. input: [sequences, hidden].
  void route(int me, Workers& workers, const Mixture& mixture, const Input& input) {
    score(me, workers, mixture, input);
    workers.share_then_barrier(me, sequences_, 1, [&](int i) { choose(i, mixture.scales); });
    workers.share_then_barrier(me, 1, 1, [&](int) { sort(); });
  }

  // Calls `take(i, column, values)` for 16 columns at a time of what these give to sequence i. input: as
  // above.
  template <typename Take>
  void run(int me, Workers& workers, const Mixture& mixture, const Input& input, Take take) {
    const bool shared = model_.shared_inner;
    const auto how = static_cast<Activated>(model_.activation);
    workers.share_then_barrier(me, choices_, 4, [&](int c) { gather(c, input); });
    each_hit(me, workers, model_.expert_inner, 8, [&](int expert, int block, int first, int count) {
      activate_rows(how, mixture.expert[expert], block, read_, first, count, activated_);
    });
    const int blocks = shared ? mixture.shared.gate.blocks() : 0;
    workers.share_then_barrier(me, blocks, 8, [&](int block) {
      activate_rows(how, mixture.shared, block, input, 0, sequences_, shared_activated_);
    });
    workers.share_then_barrier(me, choices_ + (shared ? sequences_ : 0), 1, [&](int n) {
      n < choices_ ? activated_.sum_up(n) : shared_activated_.sum_up(n - choices_);
    });
    each_hit(me, workers, model_.hidden, 6, [&](int expert, int block, int first, int count) {
      give(mixture.expert[expert].down, block, activated_, first, count, given_);
    });
    workers.share_then_barrier(me, shared ? mixture.shared.down.blocks() : 0, 6, [&](int block) {
      give(mixture.shared.down, block, shared_activated_, 0, sequences_, shared_given_);
    });
    const int pieces = model_.hidden / kLanes;
    workers.share_then_barrier(me, sequences_ * pieces, 32, [&](int n) {
      take(n / pieces, n % pieces * kLanes, sum(n / pieces, n % pieces * kLanes));
    });
  }

 private:
  float* scores(int i) { return scores_.get() + std::size_t(i) * scored_; }

  void score(int me, Workers& workers, const Mixture& mixture, const Input& input) {
    const int blocks = mixture.router.blocks();
    workers.share_then_barrier(me, blocks + (model_.shared_inner ? 1 : 0), 1, [&](int block) {
      if (block < blocks)
        multiply_rows(mixture.router, block, input, 0, sequences_,
                      [&](int i, int row, Floats x) { store(scores(i) + row, x); });
      else
        multiply_rows(mixture.shared_router, 0, input, 0, sequences_, [&](int i, int, Floats x) {
          shared_weight_[i] = 1.f / (1.f + std::exp(-first_of(x)));
        });
    });
  }

  // The experts of sequence i, that of the highest score first, of equal ones that of lower index.
  // scales: of what each expert gives, or null.
  void choose(int i, const float* scales) {
    const float* score = scores(i);
    bool* taken = taken_.get() + std::size_t(i) * model_.experts;
    std::int32_t* chosen = chosen_.get() + std::size_t(i) * per_token_;
    float* weight = weight_.get() + std::size_t(i) * per_token_;
    std::fill_n(taken, model_.experts, false);
    float total = 0;
    for (int j = 0; j < per_token_; ++j) {
      int best = -1;  // with a score of NaN, too, some expert that is not taken
      for (int e = 0; e < model_.experts; ++e)
        if (!taken[e] && (best < 0 || score[e] > score[best])) best = e;
      taken[best] = true;
      chosen[j] = best;
      weight[j] = std::exp(score[best] - score[chosen[0]]);
      total += weight[j];
    }
    if (!model_.norm_topk) {
      total = 0;
      for (int e = 0; e < model_.experts; ++e) total += std::exp(score[e] - score[chosen[0]]);
    }
    for (int j = 0; j < per_token_; ++j) weight[j] /= total;
    for (int j = 0; scales && j < per_token_; ++j) weight[j] *= scales[chosen[j]];
  }

  // All choices by their experts.
  void sort() {
    std::fill_n(first_.get(), model_.experts + 1, 0);
    for (int c = 0; c < choices_; ++c) ++first_[chosen_[c] + 1];
    hits_ = 0;
    for (int e = 0; e < model_.experts; ++e) {
      if (first_[e + 1]) hit_[hits_++] = e;
      first_[e + 1] += first_[e];
    }
    for (int c = 0; c < choices_; ++c) row_[c] = first_[chosen_[c]]++;
    // Each expert's first row is now that of the next one.
    for (int e = model_.experts; e > 0; --e) first_[e] = first_[e - 1];
    first_[0] = 0;
  }

  void gather(int choice, const Input& input) {
    read_.copy(row_[choice], input, choice / per_token_);
  }

  // Calls `work(expert, block, first, count)` for all blocks of `rows` rows of the matrices of all
  // experts that were chosen, with the rows of input that are its own.
  template <typename Work>
  void each_hit(int me, Workers& workers, int rows, int grain, Work work) {
    const int blocks = rows / kBlock;
    workers.share_then_barrier(me, hits_ * blocks, grain, [&](int unit) {
      const int expert = hit_[unit / blocks], first = first_[expert];
      work(expert, unit % blocks, first, first_[expert + 1] - first);
    });
  }

  // to: [rows of input, hidden].
  void give(const Matrix& matrix, int block, const Input& input, int first, int count,
            const Buffer<float>& to) {
    multiply_rows(matrix, block, input, first, count, [&](int i, int row, Floats products) {
      store(to.get() + std::size_t(i) * model_.hidden + row, products);
    });
  }

  Floats sum(int i, int column) {
    Floats total = zeros();
    const auto add = [&](float weight, const float* from) {
      total = multiply_add(all(weight), load(from + column), total);
    };
    for (int c = i * per_token_; c < (i + 1) * per_token_; ++c)
      add(weight_[c], given_.get() + std::size_t(row_[c]) * model_.hidden);
    if (model_.shared_inner)
      add(shared_weight_[i], shared_given_.get() + std::size_t(i) * model_.hidden);
    return total;
  }

  const Model& model_;
  const int sequences_, per_token_, choices_;
  const int scored_;  // experts, rounded up to whole blocks
  Buffer<float> scores_;
  Buffer<bool> taken_;
  Buffer<std::int32_t> chosen_, row_;  // of each choice
  Buffer<float> weight_, shared_weight_;
  Buffer<std::int32_t> first_;  // row of each expert's choices; [experts + 1]
  Buffer<std::int32_t> hit_;    // experts that were chosen, in their order
  int hits_ = 0;
  Rows read_, activated_;  // of each choice, by row
  Buffer<float> given_;
  Rows shared_activated_;
  Buffer<float> shared_given_;
};

}  // namespace kvkeep
