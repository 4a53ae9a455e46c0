// Single matrices: products with some rows, and unpacking.
#include <algorithm>
#include <atomic>

#include "decode.h"
#include "status.h"
#include "activation_rows.h"
#include "thread_team.h"

namespace kvkeep {
namespace {

template <typename To>
int unpack(const Matrix& matrix, int first, int blocks, To* out, int threads) {
  return run_guarded([=, &matrix] {
    ThreadTeam team(threads);
    team.run([&](int me) {
      team.run_shared(me, blocks, 4, [&](int b) {
        unpack_block(matrix, first + b, out + std::size_t(b) * kBlock * matrix.columns);
      });
    });
    return kDone;
  });
}

}  // namespace
}  // namespace kvkeep

int kvkeep_product(const kvkeep::Matrix* matrix, const kvkeep::Bf16* x, int count, float* out,
                   int threads) {
  using namespace kvkeep;
  return run_guarded([=] {
    ActivationBuffer input(count, matrix->columns);
    for (int i = 0; i < count; ++i) input.set_row(i, x + std::size_t(i) * matrix->columns);
    ThreadTeam team(threads);
    std::atomic<bool> finite{true};
    const auto multiply_block = [&](int block) {
      Floats products[kMaxRows];
      const int rows = rows_in_block(*matrix, block);
      for (int first = 0; first < count; first += kMaxRows) {
        const int batch = std::min(kMaxRows, count - first);
        multiply(*matrix, block, input, first, batch, products);
        for (int i = 0; i < batch; ++i) {
          store_first(out + std::size_t(first + i) * matrix->rows + block * kBlock, rows,
                      products[i]);
          if (not_finite(products[i], rows)) finite.store(false, std::memory_order_relaxed);
        }
      }
    };
    team.run([&](int me) { team.run_shared(me, matrix->blocks(), 16, multiply_block); });
    return finite ? kDone : kNotFinite;
  });
}

int kvkeep_unpack(const kvkeep::Matrix* matrix, int first, int blocks, kvkeep::Bf16* out,
                  int threads) {
  return kvkeep::unpack(*matrix, first, blocks, out, threads);
}

int kvkeep_unpack_floats(const kvkeep::Matrix* matrix, int first, int blocks, float* out,
                         int threads) {
  return kvkeep::unpack(*matrix, first, blocks, out, threads);
}

int kvkeep_rows(const kvkeep::Matrix* matrix, const std::int64_t* rows, int count,
                kvkeep::Bf16* out) {
  using namespace kvkeep;
  return run_guarded([=] {
    for (int i = 0; i < count; ++i)
      unpack_row(*matrix, static_cast<int>(rows[i]), out + std::size_t(i) * matrix->columns);
    return kDone;
  });
}
