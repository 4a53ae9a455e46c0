// The experts of one layer in a decode step: routing, and their weighted outputs.
//
// An assignment is one expert of one sequence. Assignments of an expert are adjacent rows, so that
// its weights are read once for all of them:
//
//   sequence 0 chose experts 5, 2; sequence 1 chose 5, 7
//   assignment 0 is (0, 5), 1 is (0, 2), 2 is (1, 5), 3 is (1, 7)
//   row        0: assignment 1 | 1: assignment 0, 2: assignment 2 | 3: assignment 3
//              of expert 2       of expert 5                        of expert 7
//
// A sequence's outputs are added up in the order of its choices: the result depends neither on the
// other sequences nor on the number of threads.
#pragma once

#include <cmath>
#include <cstring>

#include "decode.h"
#include "activation_rows.h"
#include "expert_choice.h"
#include "thread_team.h"

namespace kvkeep {

class ExpertForward {
 public:
  ExpertForward(const Model& model, int sequences)
      : model_(model),
        sequences_(sequences),
        per_token_(model.experts_per_token),
        assignments_(sequences * model.experts_per_token),
        score_stride_((model.expert_count + kBlock - 1) / kBlock * kBlock),
        scores_(std::size_t(sequences) * score_stride_),
        taken_(std::size_t(sequences) * model.expert_count),
        chosen_(assignments_),
        row_(assignments_),
        weight_(assignments_),
        shared_weight_(sequences),
        first_(std::size_t(model.expert_count) + 1),
        active_(model.expert_count),
        inputs_(assignments_, model.expert_count ? model.hidden_size : 0),
        activated_(assignments_, model.expert_size),
        outputs_(std::size_t(assignments_) * model.hidden_size),
        shared_activated_(sequences, model.shared_expert_size),
        shared_outputs_(model.shared_expert_size ? std::size_t(sequences) * model.hidden_size : 0) {
    std::fill_n(shared_weight_.get(), sequences, 1.f);
  }

  // Choose the experts of each sequence, with all threads. input: [sequences, hidden].
  void route(int me, ThreadTeam& team, const MixtureOfExperts& mixture,
             const ActivationRows& input) {
    score_experts(me, team, mixture, input);
    team.run_shared_then_wait(me, sequences_, 1, [&](int i) { choose_experts(i, mixture); });
    team.run_shared_then_wait(me, 1, 1, [&](int) { group_by_expert(); });
  }

  // Run the chosen experts and call `consume(i, column, values)` for each 16 columns of the output
  // of sequence i. input: as above.
  template <typename Consume>
  void run(int me, ThreadTeam& team, const MixtureOfExperts& mixture, const ActivationRows& input,
           Consume consume) {
    const bool shared = model_.shared_expert_size;
    const auto activation = static_cast<GateActivation>(model_.activation);
    team.run_shared_then_wait(me, assignments_, 4, [&](int c) { gather(c, input); });
    for_active_experts(me, team, model_.expert_size, 8,
                       [&](int expert, int block, int first, int count) {
                         activate_rows(activation, mixture.experts[expert], block, inputs_, first,
                                       count, activated_);
                       });
    const int blocks = shared ? mixture.shared.up.blocks() : 0;
    team.run_shared_then_wait(me, blocks, 8, [&](int block) {
      activate_rows(activation, mixture.shared, block, input, 0, sequences_, shared_activated_);
    });
    team.run_shared_then_wait(me, assignments_ + (shared ? sequences_ : 0), 1, [&](int n) {
      n < assignments_ ? activated_.prepare_row(n)
                       : shared_activated_.prepare_row(n - assignments_);
    });
    for_active_experts(
        me, team, model_.hidden_size, 6, [&](int expert, int block, int first, int count) {
          project(mixture.experts[expert].down, block, activated_, first, count, outputs_);
        });
    team.run_shared_then_wait(me, shared ? mixture.shared.down.blocks() : 0, 6, [&](int block) {
      project(mixture.shared.down, block, shared_activated_, 0, sequences_, shared_outputs_);
    });
    const int pieces = model_.hidden_size / kLanes;
    team.run_shared_then_wait(me, sequences_ * pieces, 32, [&](int n) {
      consume(n / pieces, n % pieces * kLanes, combine(n / pieces, n % pieces * kLanes));
    });
  }

 private:
  float* scores(int i) { return scores_.get() + std::size_t(i) * score_stride_; }

  void score_experts(int me, ThreadTeam& team, const MixtureOfExperts& mixture,
                     const ActivationRows& input) {
    const int blocks = mixture.router.blocks();
    team.run_shared_then_wait(me, blocks + mixture.shared_router.blocks(), 1, [&](int block) {
      if (block < blocks)
        multiply_rows(mixture.router, block, input, 0, sequences_,
                      [&](int i, int row, Floats x) { store(scores(i) + row, x); });
      else
        multiply_rows(mixture.shared_router, 0, input, 0, sequences_, [&](int i, int, Floats x) {
          shared_weight_[i] = 1.f / (1.f + std::exp(-first_lane(x)));
        });
    });
  }

  // Choose the experts of sequence i and their weights.
  void choose_experts(int i, const MixtureOfExperts& mixture) {
    const std::size_t experts = std::size_t(i) * model_.expert_count;
    const std::size_t assignments = std::size_t(i) * per_token_;
    Choice choice{chosen_.get() + assignments, weight_.get() + assignments, per_token_,
                  taken_.get() + experts, model_.expert_count};
    if (model_.sigmoid_router)
      choose_by_sigmoid(scores(i), mixture.selection_bias, model_.norm_topk, model_.routed_scale,
                        choice);
    else
      choose_by_softmax(scores(i), model_.norm_topk, choice);
    for (int j = 0; mixture.expert_scales && j < per_token_; ++j)
      choice.weight[j] *= mixture.expert_scales[choice.chosen[j]];
  }

  // Sort all assignments by expert.
  void group_by_expert() {
    std::fill_n(first_.get(), model_.expert_count + 1, 0);
    for (int c = 0; c < assignments_; ++c) ++first_[chosen_[c] + 1];
    active_count_ = 0;
    for (int e = 0; e < model_.expert_count; ++e) {
      if (first_[e + 1]) active_[active_count_++] = e;
      first_[e + 1] += first_[e];
    }
    for (int c = 0; c < assignments_; ++c) row_[c] = first_[chosen_[c]]++;
    // Each expert's first row is now that of the next expert: shift back.
    for (int e = model_.expert_count; e > 0; --e) first_[e] = first_[e - 1];
    first_[0] = 0;
  }

  void gather(int assignment, const ActivationRows& input) {
    inputs_.copy(row_[assignment], input, assignment / per_token_);
  }

  // Call `work(expert, block, first, count)` for all chosen experts and all blocks of their
  // matrices' `rows` rows; first, count: the expert's own rows of input.
  template <typename Work>
  void for_active_experts(int me, ThreadTeam& team, int rows, int grain, Work work) {
    const int blocks = rows / kBlock;
    team.run_shared_then_wait(me, active_count_ * blocks, grain, [&](int unit) {
      const int expert = active_[unit / blocks], first = first_[expert];
      work(expert, unit % blocks, first, first_[expert + 1] - first);
    });
  }

  // Store the products of one block. to: [rows of input, hidden].
  void project(const Matrix& matrix, int block, const ActivationRows& input, int first, int count,
               const Buffer<float>& to) {
    multiply_rows(matrix, block, input, first, count, [&](int i, int row, Floats products) {
      store(to.get() + std::size_t(i) * model_.hidden_size + row, products);
    });
  }

  Floats combine(int i, int column) {
    Floats total = zeros();
    const auto add = [&](float weight, const float* from) {
      total = multiply_add(splat(weight), load(from + column), total);
    };
    for (int c = i * per_token_; c < (i + 1) * per_token_; ++c)
      add(weight_[c], outputs_.get() + std::size_t(row_[c]) * model_.hidden_size);
    if (model_.shared_expert_size)
      add(shared_weight_[i], shared_outputs_.get() + std::size_t(i) * model_.hidden_size);
    return total;
  }

  const Model& model_;
  const int sequences_, per_token_, assignments_;
  const int score_stride_;  // expert count, rounded up to whole blocks
  Buffer<float> scores_;
  Buffer<bool> taken_;
  Buffer<std::int32_t> chosen_, row_;  // of each assignment
  Buffer<float> weight_, shared_weight_;
  Buffer<std::int32_t> first_;   // first row of each expert; [experts + 1]
  Buffer<std::int32_t> active_;  // the chosen experts, ascending
  int active_count_ = 0;
  ActivationBuffer inputs_, activated_;  // of each assignment, by row
  Buffer<float> outputs_;
  ActivationBuffer shared_activated_;
  Buffer<float> shared_outputs_;
};

}  // namespace kvkeep
