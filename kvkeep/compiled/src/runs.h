// What the sequences of a step see: attention over all their sights, in pieces that threads share.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "decode.h"

namespace kvkeep {

constexpr int kChunk = 256;  // cells that one thread takes at a time, counted from place 0

template <int kDim>
class AttentionRuns {
 public:
  AttentionRuns(const Model& model, const Group& group, const Seen& seen, const Step& step)
      : seen_(seen),
        heads_(model.heads),
        kv_heads_(group.kv_heads),
        groups_(model.heads / group.kv_heads),
        how_{group.scale, group.softcap},
        rotated_(std::size_t(seen.runs) * model.heads * kDim) {
    for (int s = 0; s < seen.sights; ++s) {
      const Sight& sight = seen.sight[s];
      const int begin = (sight.origin + sight.first) / kChunk;
      const int end = (sight.origin + sight.first + sight.cells + kChunk - 1) / kChunk;
      first_found_.push_back(found_count_);
      chunks_.push_back(end - begin);
      found_count_ += std::size_t(end - begin) * sight.runs * model.heads;
      ragged_ |= sight.own.offsets != nullptr;
    }
    for (int layer = 0; layer < (ragged_ ? group.layers : 1); ++layer) {
      first_unit_.push_back(static_cast<int>(units_.size()));
      for (int s = 0; s < seen.sights; ++s)
        for (int head = 0; head < kv_heads_; ++head)
          for (int chunk = 0; chunk < chunks(s, layer, head); ++chunk)
            units_.push_back({s, first_chunk(s) + chunk, head});
    }
    first_unit_.push_back(static_cast<int>(units_.size()));
    found_ = std::make_unique<Buffer<Found>>(found_count_);
    out_ = std::make_unique<Buffer<float>>(found_count_ * kDim);
    std::size_t most = 0;
    for (int s = 0; s < seen.sights; ++s)
      most = std::max(most, std::size_t(seen.sight[s].runs) * groups_);
    rows_.resize(step.threads);
    for (auto& rows : rows_) rows.reserve(most);
    runs_of_.resize(seen.sights);
    for (int i = 0, run = 0; i < step.sequences; ++i)
      for (int j = 0; j < seen.sequence[i].runs; ++j, ++run) {
        sequence_of_.push_back(i);
        auto& own = runs_of_[seen.run[run].sight];
        own.resize(seen.sight[seen.run[run].sight].runs);
        own[seen.run[run].index] = run;
      }
  }

  int units(int layer) const {
    const int at = ragged_ ? layer : 0;
    return first_unit_[at + 1] - first_unit_[at];
  }
  int sequence_of(int run) const { return sequence_of_[run]; }

  // Whether a run's queries are transformed, as the keys are that they look at.
  bool transformed(int run) const { return seen_.sight[seen_.run[run].sight].keys.quantised(); }

  // Where a run's query of one head goes, rotated.
  Activation* query(int run, int head) const {
    return rotated_.get() + (std::size_t(run) * heads_ + head) * kDim;
  }

  // All queries that see a chunk of cells of one KV head. me: the thread. u: which of `units(layer)`.
  void attend_unit(int me, int layer, int u) {
    const Unit& unit = units_[(ragged_ ? first_unit_[layer] : 0) + u];
    Packed<kDim> block;
    std::vector<Row>& rows = rows_[me];  // with room for all
    const Sight& sight = seen_.sight[unit.sight];
    const int index = layer * kv_heads_ + unit.head;
    const long own = sight.own.first(index);
    const int upto = sight.first + sight.own.count(index, sight.cells);
    const int first = std::max(sight.first, unit.chunk * kChunk - sight.origin);
    const int end = std::min(upto, (unit.chunk + 1) * kChunk - sight.origin);
    rows.clear();
    for (int i = 0; i < sight.runs; ++i)
      for (int g = 0; g < groups_; ++g) {
        const int head = unit.head * groups_ + g;
        const std::size_t at = found_at(unit.sight, i, unit.chunk, head);
        (*found_)[at] = Found{};
        float* out = out_->get() + at * kDim;
        std::fill_n(out, kDim, 0.f);
        const int run = runs_of_[unit.sight][i];
        rows.push_back({query(run, head), nullptr, nullptr, 0, 0, found_->get() + at, out});
      }
    const Stretch keys = Stretch(sight.keys, layer, unit.head).from(own);
    const Stretch values = Stretch(sight.values, layer, unit.head).from(own);
    const bool plain = !keys.quantised() && !values.quantised();
    // Blocks begin at places that are multiples of their size, whichever cells are looked at and
    // wherever they are stored: sums then come out the same to the last bit, whoever else runs.
    // With origin 70, slots 0 to 57 are the end of the second block, which begins at slot -6.
    const int begin = (sight.origin + first) / kCells * kCells - sight.origin;
    for (int slot = begin; slot < end; slot += kCells) {
      const int from = std::max(first - slot, 0), to = std::min(kCells, end - slot);
      pack<kDim>(keys.from(slot), values.from(slot), from, to, Hadamard::kKept, block);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].begin = from, rows[r].end = to;
        if (sight.bias)
          rows[r].bias =
              sight.bias + static_cast<long>(r / groups_) * sight.cells + slot - sight.first;
        if (sight.cell_bias)
          rows[r].cell_bias = sight.cell_bias + layer * sight.cell_bias_layer +
                              unit.head * sight.cell_bias_head + own + slot;
      }
      const int next = slot + kCells;
      Ahead ahead{};
      if (plain)
        ahead = {keys.from(next).plain(), values.from(next).plain(), keys.plain_stride(),
                 values.plain_stride(), std::clamp(upto - next, 0, kCells)};
      attend<kDim>(block, how_, rows.data(), static_cast<int>(rows.size()), ahead);
    }
  }

  // What a sequence's runs found, as one softmax. sinks: [heads], or null. to: [heads, head_dim].
  void merge(int layer, int i, const float* sinks, Activation* to) const {
    int begin = 0;
    for (int before = 0; before < i; ++before) begin += seen_.sequence[before].runs;
    const int end = begin + seen_.sequence[i].runs;
    for (int head = 0; head < heads_; ++head) {
      float most = kNothing;
      const auto each = [&](auto visit) {
        for (int l = begin; l < end; ++l) {
          const Run& run = seen_.run[l];
          const int from = first_chunk(run.sight);
          const int upto = from + chunks(run.sight, layer, head / groups_);
          for (int chunk = from; chunk < upto; ++chunk) {
            const std::size_t at = found_at(run.sight, run.index, chunk, head);
            if ((*found_)[at].sum > 0.f)
              visit((*found_)[at], out_->get() + at * kDim,
                    seen_.sight[run.sight].values.quantised());
          }
        }
      };
      each([&](const Found& found, const float*, bool) { most = std::max(most, found.most); });
      if (sinks) most = std::max(most, sinks[head] * kLog2E);
      float total = sinks ? std::exp2(sinks[head] * kLog2E - most) : 0.f;
      bool some_transformed = false;
      Vector<kDim> plain, transformed;  // what was found of plain values, and of quantised ones
      for (auto& lanes : plain) lanes = zeros();
      for (auto& lanes : transformed) lanes = zeros();
      each([&](const Found& found, const float* out, bool is_transformed) {
        const float share = std::exp2(found.most - most);
        total += share * found.sum;
        some_transformed |= is_transformed;
        auto& sum = is_transformed ? transformed : plain;
        for (int d = 0; d < kDim / kLanes; ++d)
          sum[d] =
              multiply_add(all(share), load(out + d * kLanes), sum[d]);
      });
      if (some_transformed) {
        hadamard<kDim>(transformed);
        for (int d = 0; d < kDim / kLanes; ++d) plain[d] = plain[d] + transformed[d];
      }
      for (int d = 0; d < kDim / kLanes; ++d)
        store_rounded(to + head * kDim + d * kLanes, plain[d] / all(total));
    }
  }

 private:
  struct Unit {
    int sight, chunk, head;
  };

  // Of one layer and KV head.
  int chunks(int sight, int layer, int head) const {
    const Own& own = seen_.sight[sight].own;
    if (!own.offsets) return chunks_[sight];
    return (own.count(layer * kv_heads_ + head, 0) + kChunk - 1) / kChunk;
  }

  int first_chunk(int sight) const {
    return (seen_.sight[sight].origin + seen_.sight[sight].first) / kChunk;
  }

  // Where what a run found in a chunk lies.
  std::size_t found_at(int sight, int index, int chunk, int head) const {
    const int from = first_chunk(sight);
    return first_found_[sight] +
           (std::size_t(index) * chunks_[sight] + (chunk - from)) * heads_ + head;
  }

  const Seen& seen_;
  const int heads_, kv_heads_, groups_;
  const Scoring how_;
  Buffer<Activation> rotated_;
  bool ragged_ = false;           // whether any sight is: layers then have units of their own
  std::vector<Unit> units_;       // of each such layer, one behind the other
  std::vector<int> first_unit_;   // of each such layer, and the end
  std::vector<std::size_t> first_found_;       // of each sight
  std::vector<int> chunks_, sequence_of_;      // of each sight, of each run
  std::vector<std::vector<Row>> rows_;         // of each thread
  std::vector<std::vector<int>> runs_of_;       // of each sight, by the index within it
  std::size_t found_count_ = 0;
  std::unique_ptr<Buffer<Found>> found_;
  std::unique_ptr<Buffer<float>> out_;
};

}  // namespace kvkeep
