#include "chunk.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "guard.h"
#include "rotation.h"
#include "workers.h"

namespace kvkeep {
namespace {

constexpr int kTokens = 16;  // queries that go through the cells together, all heads of a KV head

template <int kDim>
class ChunkRun {
 public:
  explicit ChunkRun(const Chunk& chunk)
      : chunk_(chunk),
        workers_(chunk.threads),
        groups_(chunk.heads / chunk.kv_heads),
        rotated_(std::size_t(chunk.rotations) * chunk.tokens * chunk.heads * kDim),
        rows_(std::size_t(chunk.threads) * most_rows()),
        found_(std::size_t(chunk.threads) * most_rows()),
        outs_(std::size_t(chunk.threads) * most_rows() * kDim) {
    for (int p = 0; p < chunk.parts; ++p) {
      first_.push_back(blocks_);
      blocks_ += (chunk.part[p].cells + kCells - 1) / kCells;
    }
    packed_ = std::make_unique<Buffer<Packed<kDim>>>(std::size_t(blocks_) * chunk.kv_heads);
  }

  void run() {
    bool alone = false;
#pragma omp parallel num_threads(chunk_.threads)
    {
      if (omp_get_num_threads() == chunk_.threads)
        work(omp_get_thread_num());
      else if (omp_get_thread_num() == 0)
        alone = true;
    }
    if (alone) {
      Chunk single = chunk_;
      single.threads = 1;
      ChunkRun(single).run();
    }
  }

 private:
  void work(int me) {
    workers_.share_then_barrier(me, chunk_.tokens, 8, [&](int i) { place(i); });
    workers_.share_then_barrier(me, blocks_ * chunk_.kv_heads, 1, [&](int u) {
      pack_block(u / chunk_.kv_heads, u % chunk_.kv_heads);
    });
    const int tiles = (chunk_.tokens + kTokens - 1) / kTokens;
    // The last tokens see most: they go first, so that no thread is left with them at the end.
    workers_.share_then_barrier(me, tiles * chunk_.kv_heads, 1, [&](int u) {
      tile(me, (tiles - 1 - u / chunk_.kv_heads) * kTokens, u % chunk_.kv_heads);
    });
  }

  const float* angle(int rotation, int token) const {
    return chunk_.angles + (std::size_t(rotation) * chunk_.tokens + token) * kDim;
  }

  Activation* query(int rotation, int token, int head) const {
    return rotated_.get() +
           ((std::size_t(rotation) * chunk_.tokens + token) * chunk_.heads + head) * kDim;
  }

  // A token's new cells, and its queries as they stand in each rotation.
  void place(int i) {
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

  Packed<kDim>& packed(int block, int head) const {
    return (*packed_)[std::size_t(block) * chunk_.kv_heads + head];
  }

  void pack_block(int block, int head) {
    const auto after = std::upper_bound(first_.begin(), first_.end(), block);
    const int p = static_cast<int>(after - first_.begin()) - 1;
    const Part& part = chunk_.part[p];
    const long cell = long(block - first_[p]) * kCells, at = part.own.first(head) + cell;
    const int there = std::min<int>(kCells, part.own.count(head, part.cells) - cell);
    if (there <= 0) return;
    // Many queries will read them: transforming the cells back is less than the queries.
    pack<kDim>(Stretch(part.keys, 0, head).from(at), Stretch(part.values, 0, head).from(at), 0,
               there, Hadamard::kUndone, packed(block, head));
  }

  // The queries of some tokens that share a KV head, over all cells that they see.
  void tile(int me, int first, int head) {
    const int tokens = std::min(kTokens, chunk_.tokens - first), count = tokens * groups_;
    Row* rows = rows_.get() + std::size_t(me) * most_rows();
    Found* found = found_.get() + std::size_t(me) * most_rows();
    float* out = outs_.get() + std::size_t(me) * most_rows() * kDim;
    std::fill_n(found, count, Found{});
    std::fill_n(out, std::size_t(count) * kDim, 0.f);
    for (int r = 0; r < count; ++r) {
      rows[r] = Row{};
      rows[r].found = &found[r];
      rows[r].out = out + std::size_t(r) * kDim;
    }
    for (int p = 0; p < chunk_.parts; ++p)
      over(chunk_.part[p], first_[p], first, head, rows, count);
    for (int r = 0; r < count; ++r) {
      const int token = first + r / groups_, at = head * groups_ + r % groups_;
      Bf16* to = chunk_.out + (std::size_t(token) * chunk_.heads + at) * kDim;
      float sum = found[r].sum;
      if (chunk_.sinks) sum += std::exp2(chunk_.sinks[at] * kLog2E - found[r].most);
      const Floats total = all(sum);
      for (int d = 0; d < kDim; d += kLanes)
        store_rounded(to + d, load(rows[r].out + d) / total);
      if (chunk_.log_sums)
        chunk_.log_sums[std::size_t(at) * chunk_.tokens + token] =
            (found[r].most + std::log2(sum)) / kLog2E;
    }
  }

  void over(const Part& part, int first_block, int first, int head, Row* rows, int count) {
    for (int r = 0; r < count; ++r)
      rows[r].query = query(part.rotation, first + r / groups_, head * groups_ + r % groups_);
    const int there = part.own.count(head, part.cells);
    const float* cell_bias =
        part.cell_bias ? part.cell_bias + head * part.cell_bias_head + part.own.first(head) : nullptr;
    const Scoring how{chunk_.scale, chunk_.softcap};
    const int seen = part.causal ? first + count / groups_ : there;
    for (int cell = 0; cell < std::min(seen, there); cell += kCells) {
      for (int r = 0; r < count; ++r) {
        const int token = first + r / groups_;
        rows[r].begin = 0;
        rows[r].end = std::min(kCells, (part.causal ? token + 1 : there) - cell);
        rows[r].bias = part.bias ? part.bias + std::size_t(token) * part.bias_row + cell : nullptr;
        rows[r].cell_bias = cell_bias ? cell_bias + cell : nullptr;
      }
      attend<kDim>(packed(first_block + cell / kCells, head), how, rows, count, Ahead{});
    }
  }

  // Of a tile.
  std::size_t most_rows() const { return std::size_t(kTokens) * groups_; }

  const Chunk& chunk_;
  Workers workers_;
  const int groups_;
  Buffer<Activation> rotated_;
  Buffer<Row> rows_;  // of each thread, as found_ and outs_
  Buffer<Found> found_;
  Buffer<float> outs_;
  std::vector<int> first_;  // block of each part
  int blocks_ = 0;
  std::unique_ptr<Buffer<Packed<kDim>>> packed_;
};

}  // namespace
}  // namespace kvkeep

int kvkeep_chunk_interface() { return sizeof(kvkeep::Part) + sizeof(kvkeep::Chunk); }

int kvkeep_attend_chunk(const kvkeep::Chunk* chunk) {
  using namespace kvkeep;
  return guarded([=] {
    const bool known =
        for_width(chunk->head_dim, [=](auto width) { ChunkRun<width.value>(*chunk).run(); });
    return known ? kDone : kNoKernel;
  });
}

void kvkeep_angles(const double* frequencies, int head_dim, const std::int64_t* positions,
                   int count, float* to) {
  for (int i = 0; i < count; ++i)
    kvkeep::angles(frequencies, head_dim, positions[i], to + std::size_t(i) * head_dim);
}
