// Rows of activations for one call, and what matrices make of them.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "matrix.h"
#include "simd.h"

namespace kvkeep {

struct Rows : Input {
  Rows(int count, int columns)
      : Input{nullptr, nullptr, columns},
        x_(std::size_t(count) * columns),
        sums_(std::size_t(count) * (columns / kGroup)) {
    x = x_.get(), sums = sums_.get();
  }
  Buffer<Bf16> x_;
  Buffer<float> sums_;
};

// Calls `each(i, row, products)` for `count` rows of input from `first` on: their products with 16
// rows of the matrix, those of `block`, from `row` on.
template <typename Each>
void multiply_rows(const Matrix& matrix, int block, const Input& input, int first, int count,
                   Each each) {
  __m512 products[kMostRows];
  for (const int end = first + count; first < end; first += kMostRows) {
    const int some = std::min(kMostRows, end - first);
    multiply(matrix, block, input, first, some, products);
    for (int i = 0; i < some; ++i) each(first + i, block * kBlock, products[i]);
  }
}

// 16 columns of what an MLP activates, those of `block`, of `count` rows of input from `first` on:
// into the same rows of `out`, whose sums are left to the caller.
inline void activate_rows(const Mlp& mlp, int block, const Input& input, int first, int count,
                          Input& out) {
  __m512 gates[kMostRows], ups[kMostRows];
  for (const int end = first + count; first < end; first += kMostRows) {
    const int some = std::min(kMostRows, end - first);
    multiply(mlp.gate, block, input, first, some, gates);
    multiply(mlp.up, block, input, first, some, ups);
    for (int i = 0; i < some; ++i)
      store_bf16(out.row(first + i) + block * kBlock, sigmoid_times(gates[i], ups[i]));
  }
}

}  // namespace kvkeep
