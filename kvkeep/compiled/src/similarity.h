// The search for the most similar vector. The structure is part of the interface to Python; see
// decode.h.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace kvkeep {

// rows: [heads, row_count, width], columns: [heads, column_count, width], both dense; width is
// even. max_products: [heads, row_count], the largest product of each row with a column; minus
// infinity for a row without any. argmax: [heads, row_count], the first column with that product;
// may be null.
struct Similarity {
  std::int32_t heads, row_count, column_count, width;
  std::int32_t strictly_older;  // 1: row i is compared with columns 0 ... i - 1 only
  std::int32_t threads;
  const Bf16* rows;
  const Bf16* columns;
  float* max_products;
  std::int64_t* argmax;
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// Find the largest product of each row. Returns a Status.
int kvkeep_most_similar(const kvkeep::Similarity* search);
#pragma GCC visibility pop
}
