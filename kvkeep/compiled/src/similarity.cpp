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

template <bool kWhich>
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
        for (int first = 0; first < search_.row_count; first += kRows) block(head, first, packed);
      }
    }
  }

 private:
  struct Best {
    Floats most[kRows];
    Ints which[kRows];
  };

  // Pack columns side by side: for each group of 16 one register for each pair of numbers.
  void pack(int head, ColumnPairs* to) const {
    const Bf16* from = search_.columns + std::size_t(head) * search_.column_count * search_.width;
    for (int group = 0; group < groups_; ++group)
      for (int pair = 0; pair < pairs_; pair += kLanes) {
        const int some = std::min(kLanes, pairs_ - pair);
        Ints lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int column = group * kLanes + i;
          lanes[i] =
              column < search_.column_count
                  ? load_first_ints(from + std::size_t(column) * search_.width + 2 * pair, some)
                  : splat_int(0);
        }
        transpose(lanes);
        for (int i = 0; i < some; ++i) to[std::size_t(group) * pairs_ + pair + i].values = lanes[i];
      }
  }

  int limit(int row) const {
    return search_.strictly_older ? std::min(row, search_.column_count) : search_.column_count;
  }

  void block(int head, int first, const ColumnPairs* packed) const {
    const int count = std::min(kRows, search_.row_count - first);
    const Bf16* rows[kRows];
    Best best;
    for (int r = 0; r < kRows; ++r) {
      const int row = first + std::min(r, count - 1);
      rows[r] = search_.rows + (std::size_t(head) * search_.row_count + row) * search_.width;
      best.most[r] = splat(-std::numeric_limits<float>::infinity());
      best.which[r] = splat_int(0);
    }
    for (int column = 0; column < limit(first + count - 1); column += kWide)
      compare(rows, packed + std::size_t(column / kLanes) * pairs_, first, column, best);
    for (int r = 0; r < count; ++r) note(head, first + r, best.most[r], best.which[r]);
  }

  void compare(const Bf16* const (&rows)[kRows], const ColumnPairs* packed, int first, int column,
               Best& best) const {
    Floats sum[kRows][kGroups];
    for (auto& each : sum)
      for (auto& lanes : each) lanes = zeros();
    for (int p = 0; p < pairs_; ++p)
      for (int g = 0; g < kGroups; ++g) {
        const Bf16Pairs columns = as_pairs(packed[g * pairs_ + p].values);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
          sum[r][g] = dot(sum[r][g], columns, splat_pair(rows[r] + 2 * p));
      }
    for (int r = 0; r < kRows; ++r)
      for (int g = 0; g < kGroups; ++g) {
        const int begin = column + g * kLanes, seen = limit(first + r) - begin;
        const Mask more = greater(lanes_below(seen), sum[r][g], best.most[r]);
        best.most[r] = select(more, sum[r][g], best.most[r]);
        if (kWhich) best.which[r] = select(more, splat_int(begin), best.which[r]);
      }
  }

  void note(int head, int row, Floats most, Ints which) const {
    const std::size_t at = std::size_t(head) * search_.row_count + row;
    const float largest = reduce_max(most);
    search_.max_products[at] = largest;
    if (!kWhich) return;
    search_.argmax[at] = masked_reduce_min(equal(most, splat(largest)), add(which, lane_indices()));
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
