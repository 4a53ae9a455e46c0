// One matrix by itself: its product with some rows, and its rows unpacked.
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "buffer.h"
#include "decode.h"
#include "guard.h"
#include "workers.h"

int kvkeep_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count, float* out,
                   int threads) {
  using namespace kvkeep;
  return guarded([=] {
    Buffer<float> sums(std::size_t(count) * (matrix->columns / kGroup));
    const Input input{const_cast<Bf16*>(x), sums.get(), matrix->columns};
    for (int i = 0; i < count; ++i) input.sum_up(i);
    Workers workers(threads);
    std::atomic<bool> finite{true};
#pragma omp parallel num_threads(threads)
    workers.share(omp_get_thread_num(), matrix->blocks(), 16, [&](int block) {
      __m512 products[kMostRows];
      const __mmask16 mask = rows_of(*matrix, block);
      for (int first = 0; first < count; first += kMostRows) {
        const int some = std::min(kMostRows, count - first);
        multiply(*matrix, block, input, first, some, products);
        for (int i = 0; i < some; ++i) {
          _mm512_mask_storeu_ps(
              out + std::size_t(first + i) * matrix->rows + block * kBlock, mask, products[i]);
          if (not_finite(products[i]) & mask) finite.store(false, std::memory_order_relaxed);
        }
      }
    });
    return finite ? kDone : kNotFinite;
  });
}

int kvkeep_unpack(const kvkeep::Matrix* matrix, int first, int blocks, kvkeep::Bf16* out,
                  int threads) {
  using namespace kvkeep;
  return guarded([=] {
    Workers workers(threads);
#pragma omp parallel num_threads(threads)
    workers.share(omp_get_thread_num(), blocks, 4, [&](int b) {
      unpack_block(*matrix, first + b, out + std::size_t(b) * kBlock * matrix->columns);
    });
    return kDone;
  });
}

int kvkeep_rows(const kvkeep::Matrix* matrix, const std::int64_t* rows, int count,
                kvkeep::Bf16* out) {
  using namespace kvkeep;
  return guarded([=] {
    for (int i = 0; i < count; ++i)
      unpack_row(*matrix, static_cast<int>(rows[i]), out + std::size_t(i) * matrix->columns);
    return kDone;
  });
}
