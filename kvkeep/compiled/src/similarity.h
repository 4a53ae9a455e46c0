// Which of some vectors is most like each of others. The structure is the interface to Python, as
// those of decode.h.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace kvkeep {

// row: [heads, rows, width], column: [heads, columns, width], both dense; width is even.
// most: [heads, rows], the largest product of each row with a column; minus infinity without any.
// which: [heads, rows], the first column that has it; may be null.
struct Similarity {
  std::int32_t heads, rows, columns, width;
  std::int32_t older;  // 1: row i meets columns 0 ... i - 1 only
  std::int32_t threads;
  const Bf16* row;
  const Bf16* column;
  float* most;
  std::int64_t* which;
};

}  // namespace kvkeep

extern "C" {
#pragma GCC visibility push(default)
// The size of Similarity: both sides must agree.
int kvkeep_similarity_interface();

// A status; see guard.h.
int kvkeep_most_similar(const kvkeep::Similarity* asked);
#pragma GCC visibility pop
}
