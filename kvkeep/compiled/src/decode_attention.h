// Attention of a decode step over all shared views of a group, in units that threads share.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "decode.h"

namespace kvkeep {

constexpr int kUnitCells =
    256;  // cells in a chunk, counted from storage index 0: one thread takes them at a time

template <int kDim>
class DecodeAttention {
 public:
  DecodeAttention(const Model& model, const LayerGroup& group, const GroupViews& views,
                  const DecodeStep& step)
      : views_(views),
        heads_(model.heads),
        kv_heads_(group.kv_heads),
        groups_(model.heads / group.kv_heads),
        params_{group.softmax_scale, group.softcap},
        rotated_(std::size_t(views.view_count) * model.heads * kDim) {
    for (int s = 0; s < views.shared_view_count; ++s) {
      const SharedView& shared = views.shared_views[s];
      const int begin = (shared.origin + shared.first) / kUnitCells;
      const int end = (shared.origin + shared.first + shared.cells + kUnitCells - 1) / kUnitCells;
      first_state_.push_back(state_count_);
      chunks_.push_back(end - begin);
      state_count_ += std::size_t(end - begin) * shared.view_count * model.heads;
      ragged_ |= shared.ragged.offsets != nullptr;
    }
    for (int layer = 0; layer < (ragged_ ? group.layer_count : 1); ++layer) {
      first_unit_.push_back(static_cast<int>(units_.size()));
      for (int s = 0; s < views.shared_view_count; ++s)
        for (int head = 0; head < kv_heads_; ++head)
          for (int chunk = 0; chunk < chunks(s, layer, head); ++chunk)
            units_.push_back({s, first_chunk(s) + chunk, head});
    }
    first_unit_.push_back(static_cast<int>(units_.size()));
    states_ = std::make_unique<Buffer<SoftmaxState>>(state_count_);
    out_ = std::make_unique<Buffer<float>>(state_count_ * kDim);
    std::size_t most = 0;
    for (int s = 0; s < views.shared_view_count; ++s)
      most = std::max(most, std::size_t(views.shared_views[s].view_count) * groups_);
    rows_.resize(step.threads);
    for (auto& rows : rows_) rows.reserve(most);
    views_of_.resize(views.shared_view_count);
    for (int i = 0, view_index = 0; i < step.sequence_count; ++i)
      for (int j = 0; j < views.sequences[i].view_count; ++j, ++view_index) {
        sequence_of_.push_back(i);
        auto& own = views_of_[views.views[view_index].shared_view];
        own.resize(views.shared_views[views.views[view_index].shared_view].view_count);
        own[views.views[view_index].row] = view_index;
      }
  }

  int units(int layer) const {
    const int at = ragged_ ? layer : 0;
    return first_unit_[at + 1] - first_unit_[at];
  }
  int sequence_of(int view_index) const { return sequence_of_[view_index]; }

  // Whether a view's queries are in the Hadamard basis, as its quantised keys are.
  bool transformed(int view_index) const {
    return views_.shared_views[views_.views[view_index].shared_view].keys.quantised();
  }

  // The rotated query of a view and head.
  Activation* query(int view_index, int head) const {
    return rotated_.get() + (std::size_t(view_index) * heads_ + head) * kDim;
  }

  // Attend with all queries that see a chunk of cells of one KV head. me: the thread. u: below
  // `units(layer)`.
  void attend_unit(int me, int layer, int u) {
    const WorkUnit& unit = units_[(ragged_ ? first_unit_[layer] : 0) + u];
    PackedBlock<kDim> block;
    std::vector<QueryRow>& rows = rows_[me];  // reserved for the largest view
    const SharedView& shared = views_.shared_views[unit.shared_view];
    const int index = layer * kv_heads_ + unit.head;
    const std::ptrdiff_t offset = shared.ragged.first(index);
    const int last_cell = shared.first + shared.ragged.count(index, shared.cells);
    const int first = std::max(shared.first, unit.chunk * kUnitCells - shared.origin);
    const int end = std::min(last_cell, (unit.chunk + 1) * kUnitCells - shared.origin);
    rows.clear();
    for (int i = 0; i < shared.view_count; ++i)
      for (int g = 0; g < groups_; ++g) {
        const int head = unit.head * groups_ + g;
        const std::size_t at = state_index(unit.shared_view, i, unit.chunk, head);
        (*states_)[at] = SoftmaxState{};
        float* out = out_->get() + at * kDim;
        std::fill_n(out, kDim, 0.f);
        const int view_index = views_of_[unit.shared_view][i];
        rows.push_back({query(view_index, head), nullptr, nullptr, 0, 0, states_->get() + at, out});
      }
    const HeadCells keys = HeadCells(shared.keys, layer, unit.head).advanced(offset);
    const HeadCells values = HeadCells(shared.values, layer, unit.head).advanced(offset);
    const bool plain = !keys.quantised() && !values.quantised();
    // Blocks begin at storage indices that are multiples of their size, whichever cells are read
    // and wherever they are stored: sums then have the same bits whichever other sequences share
    // the step. With origin 70, slots 0 to 57 are the end of the second block, which begins at slot
    // -6.
    const int begin = (shared.origin + first) / kBlockCells * kBlockCells - shared.origin;
    for (int slot = begin; slot < end; slot += kBlockCells) {
      const int from = std::max(first - slot, 0), to = std::min(kBlockCells, end - slot);
      pack<kDim>(keys.advanced(slot), values.advanced(slot), from, to, Hadamard::kKept, block);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].begin = from, rows[r].end = to;
        if (shared.bias)
          rows[r].bias = shared.bias + static_cast<std::ptrdiff_t>(r / groups_) * shared.cells +
                         slot - shared.first;
        if (shared.cell_bias)
          rows[r].cell_bias = shared.cell_bias + layer * shared.cell_bias_layer +
                              unit.head * shared.cell_bias_head + offset + slot;
      }
      const int next = slot + kBlockCells;
      Prefetch next_block{};
      if (plain)
        next_block = {keys.advanced(next).plain_data(), values.advanced(next).plain_data(),
                      keys.plain_stride(), values.plain_stride(),
                      std::clamp(last_cell - next, 0, kBlockCells)};
      if (!any_overwritten(shared, slot, end)) {
        attend<kDim>(block, params_, rows.data(), static_cast<int>(rows.size()), next_block);
        continue;
      }
      // From the last row to the first, each of which sees some more cells as they were before.
      const OverwrittenCells& old = *shared.overwritten;
      const HeadCells old_keys(old.keys, layer, unit.head);
      const HeadCells old_values(old.values, layer, unit.head);
      int left = old.count;
      for (int row = shared.view_count - 1; row >= 0; --row) {
        for (; left && old.first_rows[left - 1] > row; --left) {
          const int cell = old.slots[left - 1] - slot;
          if (from <= cell && cell < to)
            replace_cell<kDim>(old_keys.advanced(left - 1), old_values.advanced(left - 1), cell,
                               block);
        }
        attend<kDim>(block, params_, rows.data() + row * groups_, groups_,
                     row ? Prefetch{} : next_block);
      }
    }
  }

  // Merge the results of a sequence's views into one softmax. sinks: [heads], or null. to: [heads,
  // head_dim].
  void merge(int layer, int i, const float* sinks, Activation* to) const {
    int begin = 0;
    for (int earlier = 0; earlier < i; ++earlier) begin += views_.sequences[earlier].view_count;
    const int end = begin + views_.sequences[i].view_count;
    for (int head = 0; head < heads_; ++head) {
      float highest = kNoScore;
      const auto for_each_state = [&](auto visit) {
        for (int l = begin; l < end; ++l) {
          const SequenceView& view = views_.views[l];
          const int first = first_chunk(view.shared_view);
          const int end_chunk = first + chunks(view.shared_view, layer, head / groups_);
          for (int chunk = first; chunk < end_chunk; ++chunk) {
            const std::size_t at = state_index(view.shared_view, view.row, chunk, head);
            if ((*states_)[at].sum > 0.f)
              visit((*states_)[at], out_->get() + at * kDim,
                    views_.shared_views[view.shared_view].values.quantised());
          }
        }
      };
      for_each_state([&](const SoftmaxState& state, const float*, bool) {
        highest = std::max(highest, state.max);
      });
      if (sinks) highest = std::max(highest, sinks[head] * kLog2E);
      float total = sinks ? std::exp2(sinks[head] * kLog2E - highest) : 0.f;
      bool any_transformed = false;
      Vector<kDim> plain, transformed;  // sums over plain values, and over quantised ones
      for (auto& lanes : plain) lanes = zeros();
      for (auto& lanes : transformed) lanes = zeros();
      for_each_state([&](const SoftmaxState& state, const float* out, bool is_transformed) {
        const float weight = std::exp2(state.max - highest);
        total += weight * state.sum;
        any_transformed |= is_transformed;
        auto& sum = is_transformed ? transformed : plain;
        for (int d = 0; d < kDim / kLanes; ++d)
          sum[d] = multiply_add(splat(weight), load(out + d * kLanes), sum[d]);
      });
      if (any_transformed) {
        hadamard<kDim>(transformed);
        for (int d = 0; d < kDim / kLanes; ++d) plain[d] = plain[d] + transformed[d];
      }
      for (int d = 0; d < kDim / kLanes; ++d)
        store_rounded(to + head * kDim + d * kLanes, plain[d] / splat(total));
    }
  }

 private:
  struct WorkUnit {
    int shared_view, chunk, head;
  };

  // Whether a view has overwritten cells in the block that begins with `slot`, before slot `end`.
  static bool any_overwritten(const SharedView& shared, int slot, int end) {
    const OverwrittenCells* old = shared.overwritten;
    return old && std::any_of(old->slots, old->slots + old->count, [&](int x) {
             return slot <= x && x < std::min(slot + kBlockCells, end);
           });
  }

  // The number of chunks of one layer and KV head.
  int chunks(int shared, int layer, int head) const {
    const RaggedOffsets& own = views_.shared_views[shared].ragged;
    if (!own.offsets) return chunks_[shared];
    return (own.count(layer * kv_heads_ + head, 0) + kUnitCells - 1) / kUnitCells;
  }

  int first_chunk(int shared) const {
    return (views_.shared_views[shared].origin + views_.shared_views[shared].first) / kUnitCells;
  }

  // The index of a view's result for a chunk and head.
  std::size_t state_index(int shared, int index, int chunk, int head) const {
    const int from = first_chunk(shared);
    return first_state_[shared] + (std::size_t(index) * chunks_[shared] + (chunk - from)) * heads_ +
           head;
  }

  const GroupViews& views_;
  const int heads_, kv_heads_, groups_;
  const ScoreParams params_;
  Buffer<Activation> rotated_;
  bool ragged_ = false;          // whether any view is: layers then have units of their own
  std::vector<WorkUnit> units_;  // of each such layer, one after the other
  std::vector<int> first_unit_;  // of each such layer, and the end
  std::vector<std::size_t> first_state_;     // of each shared view
  std::vector<int> chunks_, sequence_of_;    // of each shared view; of each view
  std::vector<std::vector<QueryRow>> rows_;  // of each thread
  std::vector<std::vector<int>> views_of_;   // of each shared view, by row
  std::size_t state_count_ = 0;
  std::unique_ptr<Buffer<SoftmaxState>> states_;
  std::unique_ptr<Buffer<float>> out_;
};

}  // namespace kvkeep
