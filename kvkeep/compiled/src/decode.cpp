#include "decode.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "buffer.h"
#include "phase_clock.h"
#include "experts.h"
#include "status.h"
#include "attention_group.h"
#include "normalise.h"
#include "per_layer.h"
#include "state_forward.h"
#include "activation_rows.h"
#include "thread_team.h"

namespace kvkeep {
namespace {

// One decode step: the state that its threads share.
class DecodeForward {
 public:
  DecodeForward(const Model& model, const DecodeStep& step)
      : model_(model),
        step_(step),
        team_(step.threads),
        norm_params_{model.norm_eps, model.norm_offset, model.centred_norms != 0},
        residual_(std::size_t(step.sequence_count) * model.hidden_size),
        residual_update_(std::size_t(step.sequence_count) * model.hidden_size),
        mlp_and_experts_(
            has_parallel_experts(model) ? std::size_t(step.sequence_count) * model.hidden_size : 0),
        normed_(step.sequence_count, model.hidden_size),
        activated_(step.sequence_count, model.mlp_size),
        experts_(model, step.sequence_count),
        per_layer_(model, step.sequence_count) {
    int mixed = 0, widest = 0;  // mixed: the inputs of output projections
    if (model.states) {
      states_ = std::make_unique<StateForward>(*model.states, step.sequence_count, 1, step.threads,
                                               first_rows_of_texts(step));
      mixed = model.states->output_width();
    }
    for (int g = 0; g < model.group_count; ++g) {
      groups_.push_back(make_attention_group(model, model.groups[g], step.groups[g], step));
      supported_ &= groups_.back() != nullptr;
      if (!supported_) return;
      const AttentionGroup& in = *groups_.back();
      mixed = std::max(mixed, in.queries_width);
      widest = std::max(widest, in.projected_width());
    }
    mixed_ = std::make_unique<ActivationBuffer>(step.sequence_count, mixed);
    projected_values_ = std::make_unique<Buffer<float>>(std::size_t(step.sequence_count) * widest);
    projected_ = {projected_values_->get(), widest};
  }

  // Whether the heads of all groups have a supported width.
  bool supported() const { return supported_; }

  void run() {
    team_.run([this](int me) { work(me); });
  }

 private:
  static bool has_parallel_experts(const Model& model) {
    const MixtureOfExperts* mixture = model.layer_count ? model.layers[0].experts : nullptr;
    return mixture && mixture->parallel;
  }

  // The first row of each text of a step, and the number of rows.
  static std::vector<int> first_rows_of_texts(const DecodeStep& step) {
    std::vector<int> rows;
    for (int i = 0; i < step.sequence_count; ++i)
      if (!i || !step.groups[0].sequences[i].follows) rows.push_back(i);
    rows.push_back(step.sequence_count);
    return rows;
  }

  void work(int me) {
    const int count = step_.sequence_count;
    PhaseClock clock(me == 0 ? step_.seconds : nullptr);
    team_.run_shared_then_wait(me, count, 1, [&](int i) { embed(i); });
    for (auto& in : groups_)
      team_.run_shared_then_wait(me, count + in->views.view_count, 1,
                                 [&](int i) { in->compute_angles(i); });
    if (model_.per_layer) {
      team_.run_shared_then_wait(me, count, 1, [&](int i) { normalise_residual(i, nullptr); });
      per_layer_.compute(me, team_, norm_params_, normed_, step_.groups[0].sequences);
    }
    for (int l = 0; l < model_.layer_count; ++l) {
      const Layer& layer = model_.layers[l];
      if (layer.state || layer.output.rows)
        team_.run_shared_then_wait(me, count, 1,
                                   [&](int i) { normalise_residual(i, layer.attention_norm); });
      clock.ends(Phase::kNorms);
      if (layer.state) mix_by_state(me, layer, *layer.state, clock);
      if (layer.output.rows) attend(me, layer, clock);
      const bool has_mlp = layer.mlp.down.rows || layer.experts;
      if (has_mlp && !model_.parallel)
        team_.run_shared_then_wait(me, count, 1,
                                   [&](int i) { normalise_residual(i, layer.mlp_norm); });
      clock.ends(Phase::kNorms);
      if (has_mlp) add_mlp(me, layer);
      if (layer.per_layer_input) add_per_layer_input(me, l, *layer.per_layer_input);
      if (layer.output_scale != 1.f)
        team_.run_shared_then_wait(me, count, 1, [&](int i) { scale(i, layer.output_scale); });
      clock.ends(Phase::kMlp);
    }
    team_.run_shared_then_wait(me, count, 1, [&](int i) {
      normalise(residual(i), model_.norm, norm_params_, model_.hidden_size,
                [&](int c, Floats value) {
                  store_rounded(step_.hidden + std::size_t(i) * model_.hidden_size + c, value);
                });
    });
    clock.ends(Phase::kNorms);
  }

  // Store new cells, attend, and add the output of attention.
  void attend(int me, const Layer& layer, PhaseClock& clock) {
    const int count = step_.sequence_count;
    const ActivationRows mixed = with_columns(*mixed_, layer.output.columns);
    AttentionGroup& in = *groups_[layer.group];
    project(me, layer, in);
    clock.ends(Phase::kProjections);
    team_.run_shared_then_wait(me, count + in.views.view_count, 1,
                               [&](int i) { in.store_or_rotate(layer, projected_, i); });
    clock.ends(Phase::kCells);
    team_.run_shared_then_wait(me, in.units(layer), 1,
                               [&](int u) { in.attend_unit(me, layer, u); });
    team_.run_shared_then_wait(me, count, 1, [&](int i) {
      in.merge(layer, i, mixed.row(i));
      if (model_.gated_attention) in.apply_gates(projected_, i, mixed.row(i));
      mixed.prepare_row(i);
    });
    clock.ends(Phase::kAttention);
    add_product(me, layer.output, mixed, layer.attention_output_norm,
                model_.attention_output_multiplier);
    clock.ends(Phase::kOutput);
  }

  // Replace the states of a layer, read them, and add the output.
  void mix_by_state(int me, const Layer& layer, const StateLayer& state, PhaseClock& clock) {
    const int count = step_.sequence_count;
    const ActivationRows mixed = with_columns(*mixed_, state.output.columns);
    states_->project(me, team_, state, normed_);
    clock.ends(Phase::kProjections);
    const LayerStates* states = step_.states + std::size_t(state.index) * count;
    states_->mix(me, team_, state, states, mixed.x, mixed.columns);
    team_.run_shared_then_wait(me, count, 1, [&](int i) { mixed.prepare_row(i); });
    clock.ends(Phase::kAttention);
    add_product(me, state.output, mixed, layer.attention_output_norm,
                model_.states->output_multiplier);
    clock.ends(Phase::kOutput);
  }

  float* residual(int i) { return residual_.get() + std::size_t(i) * model_.hidden_size; }

  // The output of attention or MLP, where it is normed before it is added to the residual stream.
  float* residual_update(int i) {
    return residual_update_.get() + std::size_t(i) * model_.hidden_size;
  }

  // The sum of an MLP's and of parallel experts' normed outputs.
  float* mlp_and_experts(int i) {
    return mlp_and_experts_.get() + std::size_t(i) * model_.hidden_size;
  }

  void embed(int i) {
    auto* from = reinterpret_cast<Bf16*>(normed_.row(i));  // scratch: not in use yet
    unpack_row(model_.embedding, step_.groups[0].sequences[i].token, from);
    const Floats multiplier = splat(model_.embedding_multiplier);
    for (int c = 0; c < model_.hidden_size; c += kLanes)
      store(residual(i) + c, load(from + c) * multiplier);
  }

  // Norm the residual stream; weight: null to copy it as it is.
  void normalise_residual(int i, const Bf16* weight) {
    const auto to = [&](int c, Floats value) { store_rounded(normed_.row(i) + c, value); };
    if (weight)
      normalise(residual(i), weight, norm_params_, model_.hidden_size, to);
    else
      for (int c = 0; c < model_.hidden_size; c += kLanes) to(c, load(residual(i) + c));
    normed_.prepare_row(i);
  }

  // Call `each(i, row, products)` for all sequences and one block of 16 rows of a matrix.
  template <typename Each>
  void multiply_all(const Matrix& matrix, int block, const ActivationRows& input, Each each) {
    multiply_rows(matrix, block, input, 0, step_.sequence_count, each);
  }

  // Project queries, keys, values and gates. Matrices without rows are skipped; see Layer.
  void project(int me, const Layer& layer, const AttentionGroup& in) {
    const int queries = layer.query.blocks(), keys = layer.key.blocks();
    const bool keys_are_values = layer.key.rows && !layer.value.rows;  // keys are also the values
    const Floats factor = splat(model_.attention_input_multiplier);
    team_.run_shared_then_wait(me, queries + keys + layer.value.blocks(), 4, [&](int b) {
      const bool is_query = b < queries, is_key = !is_query && b < queries + keys;
      const Matrix& matrix = is_query ? layer.query : is_key ? layer.key : layer.value;
      const int block = is_query ? b : is_key ? b - queries : b - queries - keys;
      // Gates come next to queries in the matrix, but behind the values here.
      const int gates = b * kBlock >= in.queries_width ? 2 * in.keys_width : 0;
      const int from = is_query ? gates
                       : is_key ? in.queries_width
                                : in.queries_width + in.keys_width;
      multiply_all(matrix, block, normed_, [&](int i, int row, Floats products) {
        float* to = projected_.row(i) + from + row;
        products = products * factor;
        store(to, products);
        if (keys_are_values && is_key) store(to + in.keys_width, products);
      });
    });
    if (layer.query_norm) normalise_heads(me, layer, in);
    if (in.group.query_scale) scale_queries(me, in);
  }

  // Norm queries and keys, head by head or all heads together, and values where the model does.
  void normalise_heads(int me, const Layer& layer, const AttentionGroup& in) {
    const int queries = model_.qk_norm_whole ? 1 : model_.heads, there = layer.key.rows ? 1 : 0;
    const int keys = there * (model_.qk_norm_whole ? 1 : in.group.kv_heads);
    const int values = model_.values_normed ? there * in.group.kv_heads : 0;
    const int units = queries + keys + values;
    team_.run_shared_then_wait(me, step_.sequence_count * units, 4, [&](int n) {
      const int unit = n % units;
      const bool is_query = unit < queries;
      float* x = projected_.row(n / units);
      const auto put = [&](int c, Floats value) { store(x + c, value); };
      if (unit >= queries + keys) {
        const int head = unit - queries - keys;
        x += in.queries_width + in.keys_width + head * in.group.head_dim;
        return normalise(x, norm_params_, in.group.head_dim, put);
      }
      const int width = is_query ? in.queries_width / queries : in.keys_width / keys;
      x += is_query ? unit * width : in.queries_width + (unit - queries) * width;
      normalise(x, is_query ? layer.query_norm : layer.key_norm, norm_params_, width, put);
    });
  }

  void scale_queries(int me, const AttentionGroup& in) {
    const int width = in.group.head_dim;
    team_.run_shared_then_wait(me, step_.sequence_count * model_.heads, 4, [&](int n) {
      float* x = projected_.row(n / model_.heads) + n % model_.heads * width;
      for (int c = 0; c < width; c += kLanes)
        store(x + c, load(x + c) * load(in.group.query_scale + c));
    });
  }

  // Add a product, times a factor, to the residual stream. weight: of the norm of the product, or
  // null.
  void add_product(int me, const Matrix& matrix, const ActivationRows& input, const Bf16* weight,
                   float factor = 1.f) {
    team_.run_shared_then_wait(me, matrix.blocks(), 6, [&](int block) {
      multiply_all(matrix, block, input, [&](int i, int row, Floats products) {
        add_or_store(i, row, products * splat(factor), weight);
      });
    });
    if (weight) add_residual_update(me, weight);
  }

  // Add the output of the MLP, of experts instead, or of both in parallel.
  void add_mlp(int me, const Layer& layer) {
    if (layer.experts && layer.experts->parallel)
      return add_mlp_and_experts(me, layer, *layer.experts->parallel);
    if (layer.experts) return add_experts(me, layer);
    const ActivationRows activated = activate(me, layer.mlp);
    add_product(me, layer.mlp.down, activated, layer.mlp_output_norm, model_.mlp_output_multiplier);
  }

  void add_experts(int me, const Layer& layer) {
    const Bf16* weight = layer.mlp_output_norm;
    experts_.route(me, team_, *layer.experts, normed_);
    experts_.run(me, team_, *layer.experts, normed_, [&](int i, int column, Floats values) {
      add_or_store(i, column, values, weight);
    });
    if (weight) add_residual_update(me, weight);
  }

  // Add the MLP's and the experts' outputs, each with its own norm. The router reads the residual
  // stream, normed without a weight and scaled.
  void add_mlp_and_experts(int me, const Layer& layer, const ParallelExperts& parallel) {
    const int count = step_.sequence_count, hidden = model_.hidden_size;
    const ActivationRows activated = activate(me, layer.mlp);
    store_product(me, layer.mlp.down, activated);
    const Floats root = splat(1.f / std::sqrt(static_cast<float>(hidden)));
    team_.run_shared_then_wait(me, count, 1, [&](int i) {
      float* sum = mlp_and_experts(i);
      normalise(residual_update(i), parallel.mlp_norm, norm_params_, hidden,
                [&](int c, Floats value) { store(sum + c, value); });
      normalise(residual(i), norm_params_, hidden, [&](int c, Floats value) {
        store_rounded(normed_.row(i) + c, value * load(parallel.router_scale + c) * root);
      });
      normed_.prepare_row(i);
    });
    experts_.route(me, team_, *layer.experts, normed_);
    team_.run_shared_then_wait(me, count, 1, [&](int i) { normalise_residual(i, parallel.norm); });
    experts_.run(me, team_, *layer.experts, normed_, [&](int i, int column, Floats values) {
      store(residual_update(i) + column, values);
    });
    const Bf16* weight = layer.mlp_output_norm;
    team_.run_shared_then_wait(me, count, 1, [&](int i) {
      normalise(residual_update(i), parallel.output_norm, norm_params_, hidden,
                [&](int c, Floats value) {
                  add_or_store(i, c, value + load(mlp_and_experts(i) + c), weight);
                });
    });
    if (weight) add_residual_update(me, weight);
  }

  // Add the layer's per-layer embedding, gated by the residual stream.
  void add_per_layer_input(int me, int layer, const PerLayerInput& input) {
    team_.run_shared_then_wait(me, step_.sequence_count, 1,
                               [&](int i) { normalise_residual(i, nullptr); });
    const ActivationRows& through = per_layer_.gate_residual(me, team_, layer, input.gate, normed_);
    add_product(me, input.projection, through, input.norm);
  }

  void scale(int i, float factor) {
    for (int c = 0; c < model_.hidden_size; c += kLanes)
      store(residual(i) + c, load(residual(i) + c) * splat(factor));
  }

  void store_product(int me, const Matrix& matrix, const ActivationRows& input) {
    team_.run_shared_then_wait(me, matrix.blocks(), 6, [&](int block) {
      multiply_all(matrix, block, input, [&](int i, int row, Floats products) {
        store(residual_update(i) + row, products);
      });
    });
  }

  // Add 16 values to the residual stream, or store them where they are normed first.
  void add_or_store(int i, int column, Floats values, const Bf16* weight) {
    if (weight)
      store(residual_update(i) + column, values);
    else
      add(residual(i) + column, values);
  }

  void add(float* to, Floats values) const {
    const Floats multiplier = splat(model_.residual_multiplier);
    store(to, multiply_add(values, multiplier, load(to)));
  }

  void add_residual_update(int me, const Bf16* weight) {
    team_.run_shared_then_wait(me, step_.sequence_count, 1, [&](int i) {
      normalise(residual_update(i), weight, norm_params_, model_.hidden_size,
                [&](int c, Floats values) { add(residual(i) + c, values); });
    });
  }

  // Compute the MLP's activations: [sequences, MLP size].
  ActivationRows activate(int me, const Mlp& mlp) {
    ActivationRows activated = with_columns(activated_, mlp.down.columns);
    team_.run_shared_then_wait(me, mlp.up.blocks(), 8, [&](int block) {
      activate_rows(static_cast<GateActivation>(model_.activation), mlp, block, normed_, 0,
                    step_.sequence_count, activated, model_.gate_multiplier);
    });
    team_.run_shared_then_wait(me, step_.sequence_count, 1,
                               [&](int i) { activated.prepare_row(i); });
    return activated;
  }

  // The same memory as rows of fewer columns.
  static ActivationRows with_columns(const ActivationRows& rows, int columns) {
    return {rows.x, rows.sums, columns, rows.integers};
  }

  const Model& model_;
  const DecodeStep& step_;
  ThreadTeam team_;
  const NormParams norm_params_;
  Buffer<float> residual_, residual_update_, mlp_and_experts_;
  ActivationBuffer normed_, activated_;
  ExpertForward experts_;
  PerLayerForward per_layer_;
  std::vector<std::unique_ptr<AttentionGroup>> groups_;  // of each LayerGroup
  std::unique_ptr<StateForward> states_;                 // null without state layers
  std::unique_ptr<ActivationBuffer> mixed_;
  std::unique_ptr<Buffer<float>> projected_values_;
  ProjectedRows projected_{};
  bool supported_ = true;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_revision() { return kvkeep::kRevision; }

int kvkeep_decode(const kvkeep::Model* model, const kvkeep::DecodeStep* step) {
  using namespace kvkeep;
  return run_guarded([=] {
    DecodeForward run(*model, *step);
    if (!run.supported()) return kNoKernel;
    run.run();
    return kDone;
  });
}
