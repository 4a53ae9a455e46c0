// How a router's scores choose a token's experts and their weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kvkeep {

// The chosen experts of one token, in the order of the choice. chosen, weight: [count]. taken:
// [experts], scratch.
struct Choice {
  std::int32_t* chosen;
  float* weight;
  int count;
  bool* taken;
  int experts;
};

// Choose the experts with the highest rank, equal ranks by ascending index. `rank(e)` is that of an
// expert.
template <typename Rank>
void choose_highest(Rank rank, Choice& choice) {
  std::fill_n(choice.taken, choice.experts, false);
  for (int j = 0; j < choice.count; ++j) {
    int best = -1;  // where ranks are NaN, any expert that is not taken yet
    for (int e = 0; e < choice.experts; ++e)
      if (!choice.taken[e] && (best < 0 || rank(e) > rank(best))) best = e;
    choice.taken[best] = true;
    choice.chosen[j] = best;
  }
}

// Weights are shares of the softmax over all experts, or over the chosen ones (norm_topk).
inline void choose_by_softmax(const float* score, bool norm_topk, Choice& choice) {
  choose_highest([=](int e) { return score[e]; }, choice);
  const float highest = score[choice.chosen[0]];
  float total = 0;
  for (int j = 0; j < choice.count; ++j) {
    choice.weight[j] = std::exp(score[choice.chosen[j]] - highest);
    total += choice.weight[j];
  }
  if (!norm_topk) {
    total = 0;
    for (int e = 0; e < choice.experts; ++e) total += std::exp(score[e] - highest);
  }
  for (int j = 0; j < choice.count; ++j) choice.weight[j] /= total;
}

// Weights are the sigmoids of scores, divided by their sum (norm_topk), times `scale`. bias: added
// to the sigmoids to choose by, or null. Scores are overwritten.
inline void choose_by_sigmoid(float* score, const float* bias, bool norm_topk, float scale,
                              Choice& choice) {
  for (int e = 0; e < choice.experts; ++e) score[e] = 1.f / (1.f + std::exp(-score[e]));
  choose_highest([=](int e) { return bias ? score[e] + bias[e] : score[e]; }, choice);
  float total = 0;
  for (int j = 0; j < choice.count; ++j) total += score[choice.chosen[j]];
  const float factor = norm_topk ? scale / (total + 1e-6f) : scale;
  for (int j = 0; j < choice.count; ++j) choice.weight[j] = score[choice.chosen[j]] * factor;
}

}  // namespace kvkeep
