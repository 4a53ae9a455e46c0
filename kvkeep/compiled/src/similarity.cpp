#include "similarity.h"

#include <omp.h>

#include <algorithm>
#include <limits>

#include "buffer.h"
#include "guard.h"

namespace kvkeep {
namespace {

constexpr int kRows = 6;   // that are compared with columns together: their sums stay in registers
constexpr int kGroups = 2;  // of 16 columns each, at a time
constexpr int kWide = kGroups * kLanes;

template <bool kWhich>
class SimilarityRun {
 public:
  explicit SimilarityRun(const Similarity& asked)
      : asked_(asked),
        pairs_(asked.width / 2),
        groups_((asked.columns + kWide - 1) / kWide * kGroups),
        packed_(std::size_t(asked.threads) * groups_ * pairs_) {}

  void run() {
#pragma omp parallel num_threads(asked_.threads)
    {
      Ints* packed = packed_.get() + std::size_t(omp_get_thread_num()) * groups_ * pairs_;
#pragma omp for schedule(dynamic)
      for (int head = 0; head < asked_.heads; ++head) {
        pack(head, packed);
        for (int first = 0; first < asked_.rows; first += kRows) block(head, first, packed);
      }
    }
  }

 private:
  struct Best {
    Floats most[kRows];
    Ints which[kRows];
  };

  // Columns side by side: for each group of 16 a register for each pair of numbers.
  void pack(int head, Ints* to) const {
    const Bf16* from = asked_.column + std::size_t(head) * asked_.columns * asked_.width;
    for (int group = 0; group < groups_; ++group)
      for (int pair = 0; pair < pairs_; pair += kLanes) {
        const int some = std::min(kLanes, pairs_ - pair);
        Ints lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int column = group * kLanes + i;
          lanes[i] = column < asked_.columns
                         ? load_some_ints(from + std::size_t(column) * asked_.width + 2 * pair, some)
                         : ints(0);
        }
        transpose(lanes);
        std::copy_n(lanes, some, to + std::size_t(group) * pairs_ + pair);
      }
  }

  int limit(int row) const { return asked_.older ? std::min(row, asked_.columns) : asked_.columns; }

  void block(int head, int first, const Ints* packed) const {
    const int count = std::min(kRows, asked_.rows - first);
    const Bf16* rows[kRows];
    Best best;
    for (int r = 0; r < kRows; ++r) {
      const int row = first + std::min(r, count - 1);
      rows[r] = asked_.row + (std::size_t(head) * asked_.rows + row) * asked_.width;
      best.most[r] = all(-std::numeric_limits<float>::infinity());
      best.which[r] = ints(0);
    }
    for (int column = 0; column < limit(first + count - 1); column += kWide)
      compare(rows, packed + std::size_t(column / kLanes) * pairs_, first, column, best);
    for (int r = 0; r < count; ++r) note(head, first + r, best.most[r], best.which[r]);
  }

  void compare(const Bf16* const (&rows)[kRows], const Ints* packed, int first, int column,
            Best& best) const {
    Floats sum[kRows][kGroups];
    for (auto& each : sum)
      for (auto& lanes : each) lanes = zeros();
    for (int p = 0; p < pairs_; ++p)
      for (int g = 0; g < kGroups; ++g) {
        const Paired columns = paired(packed[g * pairs_ + p]);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) sum[r][g] = dot(sum[r][g], columns, spread(rows[r] + 2 * p));
      }
    for (int r = 0; r < kRows; ++r)
      for (int g = 0; g < kGroups; ++g) {
        const int begin = column + g * kLanes, seen = limit(first + r) - begin;
        const Mask more = greater(lanes_below(seen), sum[r][g], best.most[r]);
        best.most[r] = where(more, sum[r][g], best.most[r]);
        if (kWhich) best.which[r] = where(more, ints(begin), best.which[r]);
      }
  }

  void note(int head, int row, Floats most, Ints which) const {
    const std::size_t at = std::size_t(head) * asked_.rows + row;
    const float largest = greatest_of(most);
    asked_.most[at] = largest;
    if (!kWhich) return;
    asked_.which[at] = least_where(equal(most, all(largest)), sum(which, lane_numbers()));
  }

  const Similarity& asked_;
  const int pairs_, groups_;
  Buffer<Ints> packed_;  // of each thread, the columns of one head
};

}  // namespace
}  // namespace kvkeep

int kvkeep_similarity_interface() { return sizeof(kvkeep::Similarity); }

int kvkeep_most_similar(const kvkeep::Similarity* asked) {
  using namespace kvkeep;
  return guarded([=] {
    if (asked->which)
      SimilarityRun<true>(*asked).run();
    else
      SimilarityRun<false>(*asked).run();
    return kDone;
  });
}
