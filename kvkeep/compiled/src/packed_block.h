// Where the blocks of packed matrices lie in memory.
#pragma once

#include "matrix.h"

namespace kvkeep {

// Where a block of a packed matrix begins.
template <typename F>
struct BlockPointers {
  const char* data;
  const char* scales;

  BlockPointers(const Matrix& matrix, int block)
      : data(static_cast<const char*>(matrix.data) +
             static_cast<std::ptrdiff_t>(block) * (matrix.columns / kGroup) * F::Codes::kBytes),
        scales(static_cast<const char*>(matrix.scales) +
               static_cast<std::ptrdiff_t>(block) * (matrix.columns / F::Scales::kTileColumns) *
                   F::Scales::kTileBytes) {}

  // A group's codes, the tile that it is in, and its index within that tile.
  const char* codes(int group) const {
    return data + static_cast<std::ptrdiff_t>(group) * F::Codes::kBytes;
  }
  const char* tile(int group) const {
    return scales + static_cast<std::ptrdiff_t>(group * kGroup / F::Scales::kTileColumns) *
                        F::Scales::kTileBytes;
  }
  static int group_in_tile(int group) { return group % (F::Scales::kTileColumns / kGroup); }
};

}  // namespace kvkeep
