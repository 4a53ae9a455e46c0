#include "chunk.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "status.h"
#include "rotation.h"
#include "thread_team.h"

namespace kvkeep {
namespace {

constexpr int kTokens = 16;  // queries in a tile, for each head of a KV head

// Whether the biases of a block leave any cell visible. bias: [tokens, cells], tokens `stride`
// apart.
bool any_visible(const float* bias, int stride, int tokens, int cells) {
  for (int token = 0; token < tokens; ++token) {
    int visible = 0;
    for (int c = 0; c < cells; ++c) visible |= bias[std::ptrdiff_t(token) * stride + c] > kNoScore;
    if (visible) return true;
  }
  return false;
}

template <int kDim>
class ChunkAttention {
 public:
  explicit ChunkAttention(const Chunk& chunk)
      : chunk_(chunk),
        team_(chunk.threads),
        groups_(chunk.heads / chunk.kv_heads),
        rotated_((std::size_t(chunk.rotations) * chunk.tokens * chunk.heads + kTokens) * kDim),
        rows_(std::size_t(chunk.threads) * tile_rows()),
        states_(std::size_t(chunk.threads) * tile_rows()),
        outs_(std::size_t(chunk.threads) * tile_rows() * kDim) {
    for (int p = 0; p < chunk.view_count; ++p) {
      first_.push_back(blocks_);
      blocks_ += (chunk.views[p].cells + kBlockCells - 1) / kBlockCells;
    }
  }

  void run() {
    team_.run([this](int me) { work(me); });
  }

 private:
  void work(int me) {
    team_.run_shared_then_wait(me, chunk_.tokens, 8, [&](int i) { place_token(i); });
    team_.run_shared_then_wait(me, blocks_ * chunk_.kv_heads, 1, [&](int u) {
      pack_block(u / chunk_.kv_heads, u % chunk_.kv_heads);
    });
    const TileScope scope;
    const int tiles = (chunk_.tokens + kTokens - 1) / kTokens;
    // The last tokens see most cells: they go first, so that no thread is left with them at the
    // end.
    team_.run_shared_then_wait(me, tiles * chunk_.kv_heads, 1, [&](int u) {
      attend_tile(me, (tiles - 1 - u / chunk_.kv_heads) * kTokens, u % chunk_.kv_heads);
    });
  }

  const float* angle(int rotation, int token) const {
    return chunk_.angles + (std::size_t(rotation) * chunk_.tokens + token) * kDim;
  }

  // The rotated query of a token and head. Those of a KV head follow each other.
  Activation* query(int rotation, int token, int head) const {
    const std::size_t kv_head = std::size_t(rotation) * chunk_.kv_heads + head / groups_;
    return rotated_.get() + ((kv_head * chunk_.tokens + token) * groups_ + head % groups_) * kDim;
  }

  // Store a token's new cells, and rotate its queries for each rotation.
  void place_token(int i) {
    for (int r = 0; r < chunk_.rotations; ++r)
      for (int head = 0; head < chunk_.heads; ++head)
        rotate(chunk_.q + (std::size_t(i) * chunk_.heads + head) * kDim, angle(r, i), kDim,
               query(r, i, head));
    for (int head = 0; chunk_.k && head < chunk_.kv_heads; ++head) {
      const std::size_t from = (std::size_t(i) * chunk_.kv_heads + head) * kDim;
      rotate(chunk_.k + from, angle(0, i), kDim,
             chunk_.new_keys + head * chunk_.new_key_head + std::size_t(i) * kDim);
      std::copy_n(chunk_.v + from, kDim,
                  chunk_.new_values + head * chunk_.new_value_head + std::size_t(i) * kDim);
    }
  }

  PackedBlock<kDim>& packed(int block, int head) const {
    auto* blocks = static_cast<PackedBlock<kDim>*>(chunk_.packed);
    return blocks[std::size_t(block) * chunk_.kv_heads + head];
  }

  void pack_block(int block, int head) {
    const auto next = std::upper_bound(first_.begin(), first_.end(), block);
    const int p = static_cast<int>(next - first_.begin()) - 1;
    const ChunkView& view = chunk_.views[p];
    const std::ptrdiff_t cell = std::ptrdiff_t(block - first_[p]) * kBlockCells,
                         at = view.ragged.first(head) + cell;
    const int cells = std::min<int>(kBlockCells, view.ragged.count(head, view.cells) - cell);
    if (cells <= 0) return;
    // Many queries read these cells: transforming the cells back costs less than the queries.
    pack<kDim>(HeadCells(view.keys, 0, head).advanced(at),
               HeadCells(view.values, 0, head).advanced(at), 0, cells, Hadamard::kUndone,
               packed(block, head));
  }

  // Attend with the queries of some tokens that share a KV head over all cells that they see.
  void attend_tile(int me, int first, int head) {
    const int tokens = std::min(kTokens, chunk_.tokens - first), count = tokens * groups_;
    QueryRow* rows = rows_.get() + std::size_t(me) * tile_rows();
    SoftmaxState* states = states_.get() + std::size_t(me) * tile_rows();
    float* out = outs_.get() + std::size_t(me) * tile_rows() * kDim;
    std::fill_n(states, count, SoftmaxState{});
    std::fill_n(out, std::size_t(count) * kDim, 0.f);
    for (int r = 0; r < count; ++r) {
      rows[r] = QueryRow{};
      rows[r].state = &states[r];
      rows[r].out = out + std::size_t(r) * kDim;
    }
    for (int p = 0; p < chunk_.view_count; ++p)
      attend_view(chunk_.views[p], first_[p], first, head, rows, count);
    for (int r = 0; r < count; ++r) {
      const int token = first + r / groups_, at = head * groups_ + r % groups_;
      Bf16* to = chunk_.out + (std::size_t(token) * chunk_.heads + at) * kDim;
      float sum = states[r].sum;
      if (chunk_.sinks) sum += std::exp2(chunk_.sinks[at] * kLog2E - states[r].max);
      const Floats total = splat(sum);
      for (int d = 0; d < kDim; d += kLanes) store_rounded(to + d, load(rows[r].out + d) / total);
      if (chunk_.log_sums)
        chunk_.log_sums[std::size_t(at) * chunk_.tokens + token] =
            (states[r].max + std::log2(sum)) / kLog2E;
    }
  }

  void attend_view(const ChunkView& view, int first_block, int first, int head, QueryRow* rows,
                   int count) {
    for (int r = 0; r < count; ++r)
      rows[r].query = query(view.rotation, first + r / groups_, head * groups_ + r % groups_);
    const int cells = view.ragged.count(head, view.cells);
    const float* cell_bias =
        view.cell_bias ? view.cell_bias + head * view.cell_bias_head + view.ragged.first(head)
                       : nullptr;
    const ScoreParams params{chunk_.softmax_scale, chunk_.softcap};
    const int visible = view.causal ? first + count / groups_ : cells;
    const float* bias = view.bias ? view.bias + std::size_t(first) * view.bias_row : nullptr;
    const int biases = view.bias_row ? count / groups_ : 1;
    for (int cell = 0; cell < std::min(visible, cells); cell += kBlockCells) {
      // A masked block changes no bit.
      if (bias &&
          !any_visible(bias + cell, view.bias_row, biases, std::min(kBlockCells, cells - cell)))
        continue;
      for (int r = 0; r < count; ++r) {
        const int token = first + r / groups_;
        rows[r].begin = 0;
        rows[r].end = std::min(kBlockCells, (view.causal ? token + 1 : cells) - cell);
        rows[r].bias = bias ? bias + std::size_t(r / groups_) * view.bias_row + cell : nullptr;
        rows[r].cell_bias = cell_bias ? cell_bias + cell : nullptr;
      }
      attend_prompt<kDim>(packed(first_block + cell / kBlockCells, head), params, rows, count);
    }
  }

  // The rows of a tile.
  std::size_t tile_rows() const { return std::size_t(kTokens) * groups_; }

  const Chunk& chunk_;
  ThreadTeam team_;
  const int groups_;
  Buffer<Activation> rotated_;
  Buffer<QueryRow> rows_;  // of each thread, as states_ and outs_
  Buffer<SoftmaxState> states_;
  Buffer<float> outs_;
  std::vector<int> first_;  // first block of each view
  int blocks_ = 0;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_attend_chunk(const kvkeep::Chunk* chunk) {
  using namespace kvkeep;
  return run_guarded([=] {
    const bool supported = for_head_dim(
        chunk->head_dim, [=](auto width) { ChunkAttention<width.value>(*chunk).run(); });
    return supported ? kDone : kNoKernel;
  });
}

void kvkeep_angles(const double* frequencies, int head_dim, const std::int64_t* positions,
                   int count, float* to) {
  for (int i = 0; i < count; ++i)
    kvkeep::angles(frequencies, head_dim, positions[i], to + std::size_t(i) * head_dim);
}
