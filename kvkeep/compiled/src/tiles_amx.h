// Products of 16 rows by the tiles of AMX, for attention.cpp. A tile is a register of 16 rows of 64
// bytes. The second factor of a product holds pairs of bf16, which PackedBlock's layout has.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace kvkeep {

constexpr int kTileRows = 16;

// The tiles of a thread, configured as long as this object lives. PyTorch configures them, too, so
// each call does so anew.
class TileScope {
 public:
  TileScope() {
    struct alignas(64) {
      std::uint8_t palette = 1, first_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    __asm__ volatile("" ::"r"(&config) : "memory");  // GCC drops its stores otherwise
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// Let tiles be loaded from memory that was just written: GCC does not know that they read it.
KVKEEP_INLINE void complete_stores() { __asm__ volatile("" ::: "memory"); }

// to = rows times keys. rows: [16, kDim].
template <int kDim>
KVKEEP_INLINE void multiply_keys(const Bf16* rows, const std::uint32_t (&keys)[kDim / 2][64],
                                 float (&to)[kTileRows][64]) {
  constexpr int kRowBytes = kDim * sizeof(Bf16), kKeyBytes = sizeof keys[0];
  complete_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < kDim; d += 32) {
    const std::uint32_t* pairs = keys[d / 2];
    _tile_loadd(4, rows + d, kRowBytes);
    _tile_loadd(5, pairs, kKeyBytes);
    _tile_loadd(6, pairs + 16, kKeyBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, pairs + 32, kKeyBytes);
    _tile_loadd(5, pairs + 48, kKeyBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, to[0], sizeof to[0]);
  _tile_stored(1, to[0] + 16, sizeof to[0]);
  _tile_stored(2, to[0] + 32, sizeof to[0]);
  _tile_stored(3, to[0] + 48, sizeof to[0]);
}

// Add weights times values to `sums`, [16, kDim].
template <int kDim>
KVKEEP_INLINE void add_weighted_values(const Bf16 (&weights)[kTileRows][64],
                                       const std::uint32_t (&values)[32][kDim], float* sums) {
  constexpr int kWeightBytes = sizeof weights[0], kSumBytes = kDim * sizeof(float);
  complete_stores();
  _tile_loadd(4, weights[0], kWeightBytes);       // of the first 32 cells
  _tile_loadd(5, weights[0] + 32, kWeightBytes);  // of the others
  for (int d = 0; d < kDim; d += 32) {
    _tile_loadd(0, sums + d, kSumBytes);
    _tile_loadd(1, sums + d + 16, kSumBytes);
    _tile_loadd(6, values[0] + d, kSumBytes);
    _tile_loadd(7, values[0] + d + 16, kSumBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(2, values[16] + d, kSumBytes);
    _tile_loadd(3, values[16] + d + 16, kSumBytes);
    _tile_dpbf16ps(0, 5, 2);
    _tile_dpbf16ps(1, 5, 3);
    _tile_stored(0, sums + d, kSumBytes);
    _tile_stored(1, sums + d + 16, kSumBytes);
  }
}

}  // namespace kvkeep
