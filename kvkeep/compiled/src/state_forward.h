// State layers in a step: some sequences with the same number of tokens each. A row is one token;
// those of a sequence follow one another. A row's results depend on its sequence only.
#pragma once

#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "activation_rows.h"
#include "normalise.h"
#include "recurrence.h"
#include "states.h"
#include "thread_team.h"

namespace kvkeep {

class StateForward {
 public:
  // first_sequences: the first of each run of sequences whose states are one after another, those
  // of one text, and the number of sequences. Empty where all are independent.
  StateForward(const StateShape& shape, int sequences, int tokens, int threads,
               std::vector<int> first_sequences = {})
      : shape_(shape),
        first_sequences_(std::move(first_sequences)),
        tokens_(tokens),
        rows_(sequences * tokens),
        padded_heads_(padded(shape.value_heads)),
        offsets_(offsets(shape)),
        projected_(std::size_t(rows_) * offsets_.end),
        inputs_(std::size_t(sequences) * window_tokens() * shape.channels),
        mixed_(shape.kind == kShortConvolution ? 0 : std::size_t(rows_) * shape.channels),
        decays_(std::size_t(rows_) * padded_heads_),
        rates_(std::size_t(rows_) * padded_heads_),
        scratch_size_(shape.key_dim * (2 * tokens + 2 * kLanes)),
        scratch_(std::size_t(threads) * scratch_size_) {
    if (!first_sequences_.empty()) return;
    first_sequences_.resize(sequences + 1);
    std::iota(first_sequences_.begin(), first_sequences_.end(), 0);
  }

  // Multiply rows of one token by a layer's input matrices, with all threads.
  void project(int me, ThreadTeam& team, const StateLayer& layer, const ActivationRows& input) {
    const Matrix* matrices[] = {&layer.input, &layer.gate, &layer.rate, &layer.decay};
    const int first[] = {0, offsets_.gate, offsets_.rate, offsets_.decay};
    int blocks = 0;
    for (const Matrix* matrix : matrices) blocks += matrix->blocks();
    const float* factors = shape_.input_factors;
    team.run_shared_then_wait(me, blocks, 4, [&](int block) {
      int part = 0;
      while (block >= matrices[part]->blocks()) block -= matrices[part++]->blocks();
      multiply_rows(*matrices[part], block, input, 0, rows_, [&](int i, int row, Floats products) {
        const bool scaled = factors && part == 0;
        store(projected(i) + first[part] + row, scaled ? products * load(factors + row) : products);
      });
    });
  }

  // Take projections that were computed elsewhere. Each part: [rows, width] bf16.
  void set_projected(int me, ThreadTeam& team, const StateChunk& chunk, int first_token) {
    const int heads = shape_.value_heads;
    const bool is_delta_net = shape_.kind == kDeltaNet;
    team.run_shared_then_wait(me, rows_, 1, [&](int row) {
      const std::size_t token = std::size_t(first_token) + row;
      widen_row(chunk.input, token, input_width(shape_), projected(row));
      if (!is_delta_net) return;
      widen_row(chunk.gate, token, shape_.value_width(), projected(row) + offsets_.gate);
      widen_row(chunk.rate, token, heads, projected(row) + offsets_.rate);
      widen_row(chunk.decay, token, heads, projected(row) + offsets_.decay);
    });
  }

  // Replace the states of a layer, and write what its output projection reads, with all threads.
  // states: of each sequence. out: [rows, output width], with rows `stride` apart.
  template <typename To>
  void mix(int me, ThreadTeam& team, const StateLayer& layer, const LayerStates* states, To* out,
           std::ptrdiff_t stride) {
    const int blocks = shape_.channels / kLanes;
    const int texts = static_cast<int>(first_sequences_.size()) - 1;
    const int rate_units = shape_.kind == kShortConvolution ? 0 : rows_;
    team.run_shared_then_wait(me, texts * blocks + rate_units, 8, [&](int n) {
      const int text = n / blocks, channel = n % blocks * kLanes;
      if (text >= texts) return compute_rates(layer, n - texts * blocks);
      for (int i = first_sequences_[text]; i < first_sequences_[text + 1]; ++i)
        if (shape_.kind == kShortConvolution)
          convolve_gated(layer, states[i], i, channel, out, stride);
        else
          convolve_activated(layer, states[i], i, channel);
    });
    if (shape_.kind == kShortConvolution) return;
    const int heads = shape_.value_heads;
    team.run_shared_then_wait(me, texts * heads, 1, [&](int n) {
      const int text = n / heads, head = n % heads;
      for (int i = first_sequences_[text]; i < first_sequences_[text + 1]; ++i)
        if (shape_.kind == kDeltaNet)
          apply_delta_rule(me, layer, states[i], i, head, out, stride);
        else
          scan(me, layer, states[i], i, head);
    });
    if (shape_.kind != kMamba2) return;
    team.run_shared_then_wait(me, rows_ * shape_.key_heads, 1, [&](int n) {
      normalise_group(layer, n / shape_.key_heads, n % shape_.key_heads, out, stride);
    });
  }

 private:
  // Where the parts of a projected row begin.
  struct Offsets {
    int gate, rate, decay, end;
  };

  static int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

  static int input_width(const StateShape& shape) {
    if (shape.kind == kShortConvolution) return 3 * shape.channels;
    if (shape.kind == kDeltaNet) return shape.channels;
    return shape.value_width() + shape.channels + shape.value_heads;
  }

  static Offsets offsets(const StateShape& shape) {
    const int input = padded(input_width(shape)), heads = padded(shape.value_heads);
    if (shape.kind == kShortConvolution) return {0, 0, 0, input};
    if (shape.kind == kMamba2) return {0, shape.value_width() + shape.channels, 0, input};
    const int rate = input + shape.value_width();
    return {input, rate, rate + heads, rate + 2 * heads};
  }

  // Tokens that a step's convolution reads.
  int window_tokens() const { return shape_.conv_width - 1 + tokens_; }

  float* projected(int row) const { return projected_.get() + std::size_t(row) * offsets_.end; }
  float* mixed(int row) const { return mixed_.get() + std::size_t(row) * shape_.channels; }

  static void widen_row(const Bf16* from, std::size_t row, int width, float* to) {
    from += row * width;
    int c = 0;
    for (; c + kLanes <= width; c += kLanes) store(to + c, load(from + c));
    if (c < width) store(to + c, load_first(from + c, width - c));
  }

  // Convolve 16 channels of sequence i. `input(row)` returns the inputs of a token, which are
  // rounded to bf16, and `take(row, sums)` takes its outputs.
  template <typename Input, typename Take>
  void convolve(const StateLayer& layer, const LayerStates& states, int i, int channel, Input input,
                Take take) {
    const int stored = shape_.conv_width - 1, channels = shape_.channels;
    Bf16* window = inputs_.get() + std::size_t(i) * window_tokens() * channels + channel;
    const auto at = [=](int token) { return std::ptrdiff_t(token) * channels; };
    for (int j = 0; j < stored; ++j)
      if (states.inputs)
        std::copy_n(states.inputs + at(j) + channel, kLanes, window + at(j));
      else
        std::fill_n(window + at(j), kLanes, Bf16{0});
    for (int t = 0; t < tokens_; ++t)
      store_rounded(window + at(stored + t), input(i * tokens_ + t));
    for (int t = 0; t < tokens_; ++t) {
      Floats sum = load(window + at(t)) * load(layer.taps + channel);
      for (int j = 1; j <= stored; ++j)
        sum = multiply_add(load(window + at(t + j)), load(layer.taps + at(j) + channel), sum);
      if (layer.conv_bias) sum = sum + load(layer.conv_bias + channel);
      take(i * tokens_ + t, sum);
    }
    for (int j = 0; j < stored; ++j)
      std::copy_n(window + at(tokens_ + j), kLanes, states.new_inputs + at(j) + channel);
  }

  template <typename To>
  void convolve_gated(const StateLayer& layer, const LayerStates& states, int i, int channel,
                      To* out, std::ptrdiff_t stride) {
    const int channels = shape_.channels;
    convolve(
        layer, states, i, channel,
        [&](int row) {
          const float* from = projected(row) + channel;
          return load(from) * load(from + 2 * channels);
        },
        [&](int row, Floats sums) {
          const Floats gate = load(projected(row) + channels + channel);
          store_rounded(out + row * stride + channel, sums * gate);
        });
  }

  void convolve_activated(const StateLayer& layer, const LayerStates& states, int i, int channel) {
    const int first = shape_.kind == kMamba2 ? shape_.value_width() : 0;
    convolve(
        layer, states, i, channel, [&](int row) { return load(projected(row) + first + channel); },
        [&](int row, Floats sums) {
          store(mixed(row) + channel, sigmoid_times(sums, splat(1.f)));
        });
  }

  // Compute by how much the states of a row's heads fade, and the rates of DeltaNet or the sizes of
  // Mamba-2's steps.
  void compute_rates(const StateLayer& layer, int row) {
    const bool is_delta_net = shape_.kind == kDeltaNet;
    const float* steps = projected(row) + (is_delta_net ? offsets_.decay : offsets_.rate);
    const float* rates = projected(row) + offsets_.rate;
    const std::size_t first = std::size_t(row) * padded_heads_;
    for (int head = 0; head < shape_.value_heads; ++head) {
      const float x = steps[head] + layer.step_bias[head];
      const float step = x > 20.f ? x : std::log1p(std::exp(x));  // softplus, as torch has it
      decays_[first + head] = std::exp(layer.decay_rates[head] * step);
      rates_[first + head] = is_delta_net ? 1.f / (1.f + std::exp(-rates[head])) : step;
    }
  }

  float* scratch(int me) const { return scratch_.get() + std::size_t(me) * scratch_size_; }

  HeadTokens tokens_of(int i, int head, int value_offset) const {
    HeadTokens tokens{};
    tokens.count = tokens_, tokens.key_dim = shape_.key_dim;
    tokens.values = mixed(i * tokens_) + value_offset + head * shape_.value_dim;
    tokens.value_stride = shape_.channels;
    const std::size_t first = std::size_t(i) * tokens_ * padded_heads_ + head;
    tokens.decays = decays_.get() + first, tokens.rates = rates_.get() + first;
    tokens.rate_stride = padded_heads_;
    return tokens;
  }

  // Call `apply(width, column, columns)` for all columns of a head's state.
  template <typename Apply>
  void for_columns(int me, const LayerStates& states, int head, Apply apply) {
    const std::size_t size = std::size_t(shape_.key_dim) * shape_.value_dim;
    const float* from = states.matrices ? states.matrices + head * size : nullptr;
    float* to = states.new_matrices + head * size;
    for_state_columns(shape_.value_dim, [&](auto width, int column) {
      apply(
          width, column,
          StateColumns{from ? from + column : nullptr, to + column, shape_.value_dim, scratch(me)});
    });
  }

  template <typename To>
  void apply_delta_rule(int me, const StateLayer& layer, const LayerStates& states, int i, int head,
                        To* out, std::ptrdiff_t stride) {
    const int key_dim = shape_.key_dim, key_head = head / shape_.heads_per_key();
    float* keys = scratch(me) + 2 * kLanes * key_dim;
    float* queries = keys + tokens_ * key_dim;
    const float scale = 1.f / std::sqrt(static_cast<float>(key_dim));
    for (int t = 0; t < tokens_; ++t) {
      const float* query = mixed(i * tokens_ + t) + key_head * key_dim;
      scale_to_length(query, scale, queries + t * key_dim);
      scale_to_length(query + shape_.key_width(), 1.f, keys + t * key_dim);
    }
    HeadTokens tokens = tokens_of(i, head, 2 * shape_.key_width());
    tokens.keys = keys, tokens.queries = queries, tokens.key_stride = key_dim;
    for_columns(me, states, head, [&](auto width, int column, const StateColumns& columns) {
      kvkeep::apply_delta_rule<width.value>(tokens, column, columns);
    });
    const int tile = head % shape_.heads_per_key() * shape_.key_heads + key_head;
    const int to = (shape_.tiled_output ? tile : head) * shape_.value_dim;
    const int gates = offsets_.gate + head * shape_.value_dim;
    for (int t = 0; t < tokens_; ++t) {
      const int row = i * tokens_ + t;
      normalise_by([&](int c) { return load(layer.norm + c); }, tokens.value(t), norm_params(),
                   shape_.value_dim,
                   [&](int c, Floats value) {
                     const Floats gate = load(projected(row) + gates + c);
                     store_rounded(out + row * stride + to + c, sigmoid_times(gate, value));
                   });
    }
  }

  // Scale a vector of key_dim numbers to a length.
  void scale_to_length(const float* x, float length, float* to) const {
    constexpr float kEps = 1e-6f;
    const float squares = dot_product(x, x, shape_.key_dim);
    const Floats factor = splat(length / std::sqrt(squares + kEps));
    for (int c = 0; c < shape_.key_dim; c += kLanes) store(to + c, load(x + c) * factor);
  }

  NormParams norm_params() const { return {shape_.norm_eps, 0.f, false}; }

  // Scan the tokens of sequence i with one head, and gate its outputs if they are not normed first.
  void scan(int me, const StateLayer& layer, const LayerStates& states, int i, int head) {
    HeadTokens tokens = tokens_of(i, head, 0);
    tokens.keys =
        mixed(i * tokens_) + shape_.value_width() + head / shape_.heads_per_key() * shape_.key_dim;
    tokens.queries = tokens.keys + shape_.key_width(), tokens.key_stride = shape_.channels;
    for_columns(me, states, head, [&](auto width, int column, const StateColumns& columns) {
      kvkeep::scan<width.value>(tokens, layer.skip[head], column, columns);
    });
    if (shape_.mamba_norm == kNormBeforeGate) return;
    for (int t = 0; t < tokens_; ++t) {
      const float* gates = projected(i * tokens_ + t) + head * shape_.value_dim;
      for (int c = 0; c < shape_.value_dim; c += kLanes)
        store(tokens.value(t) + c, sigmoid_times(load(gates + c), load(tokens.value(t) + c)));
    }
  }

  // Norm the outputs of a group of heads, and gate them if they are not gated yet.
  template <typename To>
  void normalise_group(const StateLayer& layer, int row, int group, To* out,
                       std::ptrdiff_t stride) {
    const int width = shape_.value_width() / shape_.key_heads, first = group * width;
    const float *x = mixed(row) + first, *gates = projected(row) + first;
    To* to = out + row * stride + first;
    if (shape_.mamba_norm == kNoNorm) {
      for (int c = 0; c < width; c += kLanes) store_rounded(to + c, load(x + c));
      return;
    }
    const bool gated = shape_.mamba_norm == kNormAfterGate;
    normalise_by([&](int c) { return load(layer.norm + first + c); }, x, norm_params(), width,
                 [&](int c, Floats value) {
                   store_rounded(to + c, gated ? value : sigmoid_times(load(gates + c), value));
                 });
  }

  const StateShape& shape_;
  std::vector<int> first_sequences_;
  const int tokens_, rows_, padded_heads_;
  const Offsets offsets_;
  Buffer<float> projected_;
  Buffer<Bf16> inputs_;           // of the convolution: [sequences, window tokens, channels]
  Buffer<float> mixed_;           // the convolution's outputs; values become the heads' outputs
  Buffer<float> decays_, rates_;  // [rows, padded heads]
  const int scratch_size_;
  Buffer<float> scratch_;  // of each thread: columns of a state, then keys and queries
};

}  // namespace kvkeep
