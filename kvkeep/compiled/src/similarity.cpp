#include "similarity.h"

#include <omp.h>

#include <algorithm>
#include <limits>

#include "buffer.h"
#include "status.h"

namespace kvkeep {
namespace {

constexpr int kRows = 6;    // rows compared with columns together: their sums stay in registers
constexpr int kGroups = 2;  // registers of 16 columns at a time
constexpr int kWide = kGroups * kLanes;

// One pair of neighbouring numbers of each of 16 columns.
struct ColumnPairs {
  Ints values;
};

template <bool kArgmax>
class SimilaritySearch {
 public:
  explicit SimilaritySearch(const Similarity& search)
      : search_(search),
        pairs_(search.width / 2),
        groups_((search.column_count + kWide - 1) / kWide * kGroups),
        packed_(std::size_t(search.threads) * groups_ * pairs_) {}

  void run() {
#pragma omp parallel num_threads(search_.threads)
    {
      ColumnPairs* packed = packed_.get() + std::size_t(omp_get_thread_num()) * groups_ * pairs_;
#pragma omp for schedule(dynamic)
      for (int head = 0; head < search_.heads; ++head) {
        pack(head, packed);
        for (int first_row = 0; first_row < search_.row_count; first_row += kRows)
          block(head, first_row, packed);
      }
    }
  }

 private:
  struct Best {
    Floats max[kRows];
    Ints argmax[kRows];
  };

  // Pack columns side by side: for each group of 16 one register for each pair of numbers.
  void pack(int head, ColumnPairs* to) const {
    const Bf16* from = search_.columns + std::size_t(head) * search_.column_count * search_.width;
    for (int group = 0; group < groups_; ++group)
      for (int pair = 0; pair < pairs_; pair += kLanes) {
        const int count = std::min(kLanes, pairs_ - pair);
        Ints lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int column = group * kLanes + i;
          lanes[i] =
              column < search_.column_count
                  ? load_first_ints(from + std::size_t(column) * search_.width + 2 * pair, count)
                  : splat_int(0);
        }
        transpose(lanes);
        for (int i = 0; i < count; ++i)
          to[std::size_t(group) * pairs_ + pair + i].values = lanes[i];
      }
  }

  int limit(int row) const {
    return search_.strictly_older ? std::min(row, search_.column_count) : search_.column_count;
  }

  void block(int head, int first_row, const ColumnPairs* packed) const {
    const int count = std::min(kRows, search_.row_count - first_row);
    const Bf16* rows[kRows];
    Best best;
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + std::min(r, count - 1);
      rows[r] = search_.rows + (std::size_t(head) * search_.row_count + row) * search_.width;
      best.max[r] = splat(-std::numeric_limits<float>::infinity());
      best.argmax[r] = splat_int(0);
    }
    for (int column = 0; column < limit(first_row + count - 1); column += kWide)
      compare(rows, packed + std::size_t(column / kLanes) * pairs_, first_row, column, best);
    for (int r = 0; r < count; ++r) store_best(head, first_row + r, best.max[r], best.argmax[r]);
  }

  void compare(const Bf16* const (&rows)[kRows], const ColumnPairs* packed, int first_row,
               int column, Best& best) const {
    Floats sum[kRows][kGroups];
    for (auto& row : sum)
      for (auto& lanes : row) lanes = zeros();
    for (int p = 0; p < pairs_; ++p)
      for (int g = 0; g < kGroups; ++g) {
        const Bf16Pairs columns = as_pairs(packed[g * pairs_ + p].values);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
          sum[r][g] = dot(sum[r][g], columns, splat_pair(rows[r] + 2 * p));
      }
    for (int r = 0; r < kRows; ++r)
      for (int g = 0; g < kGroups; ++g) {
        const int begin = column + g * kLanes, visible = limit(first_row + r) - begin;
        const Mask more = greater(lanes_below(visible), sum[r][g], best.max[r]);
        best.max[r] = select(more, sum[r][g], best.max[r]);
        if (kArgmax) best.argmax[r] = select(more, splat_int(begin), best.argmax[r]);
      }
  }

  void store_best(int head, int row, Floats max, Ints argmax) const {
    const std::size_t at = std::size_t(head) * search_.row_count + row;
    const float largest = reduce_max(max);
    search_.max_products[at] = largest;
    if (!kArgmax) return;
    search_.argmax[at] = masked_reduce_min(equal(max, splat(largest)), add(argmax, lane_indices()));
  }

  const Similarity& search_;
  const int pairs_, groups_;
  Buffer<ColumnPairs> packed_;  // of each thread, the columns of one head
};

}  // namespace
}  // namespace kvkeep

int kvkeep_most_similar(const kvkeep::Similarity* search) {
  using namespace kvkeep;
  return run_guarded([=] {
    if (search->argmax)
      SimilaritySearch<true>(*search).run();
    else
      SimilaritySearch<false>(*search).run();
    return kDone;
  });
}
