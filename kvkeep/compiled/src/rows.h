// Rows of activations for one call, and what matrices make of them.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "matrix.h"
#include "lanes.h"

namespace kvkeep {

struct Rows : Input {
  Rows(int count, int columns)
      : Input{nullptr, nullptr, columns, nullptr},
        x_(std::size_t(count) * columns),
        sums_(std::size_t(count) * (columns / kGroup)),
        integers_(std::size_t(count) * (columns / kGroup)) {
    x = x_.get(), sums = sums_.get(), integers = integers_.get();
  }

  // Row i, of `columns` bf16.
  void take(int i, const Bf16* from) {
    for (int c = 0; c < columns; c += kLanes) store_rounded(row(i) + c, load(from + c));
    sum_up(i);
  }

  Buffer<Activation> x_;
  Buffer<float> sums_;
  Buffer<Integers> integers_;
};

// Calls `each(i, row, products)` for `count` rows of input from `first` on: their products with 16
// rows of the matrix, those of `block`, from `row` on.
template <typename Each>
void multiply_rows(const Matrix& matrix, int block, const Input& input, int first, int count,
                   Each each) {
  Floats products[kMostRows];
  for (const int end = first + count; first < end; first += kMostRows) {
    const int some = std::min(kMostRows, end - first);
    multiply(matrix, block, input, first, some, products);
    for (int i = 0; i < some; ++i) each(first + i, block * kBlock, products[i]);
  }
}

// What becomes of the gate of an MLP before it multiplies `up`.
enum Activated : std::int32_t {
  kSilu,         // x * sigmoid(x)
  kGeluTanh,     // gelu by tanh (arXiv:1606.08415)
  kClampedSilu,  // x * sigmoid(1.702 x), and up + 1, both clamped to 7 (gpt-oss, arXiv:2508.10925)
};

inline Floats activated(Activated how, Floats gate, Floats up) {
  if (how == kSilu) return sigmoid_times(gate, up);
  if (how == kGeluTanh) {
    const Floats cubed = gate * gate * gate;
    const Floats within = multiply_add(cubed, all(0.044715f), gate) * all(2 * 0.7978845608f);
    return gate / (all(1.f) + exp2(within * all(-kLog2E))) * up;
  }
  const Floats low = min(gate, all(7.f));
  const Floats plus = max(min(up, all(7.f)), all(-7.f)) + all(1.f);
  return low / (all(1.f) + exp2(low * all(-1.702f * kLog2E))) * plus;
}

// 16 columns of what an MLP activates, those of `block`, of `count` rows of input from `first` on:
// into the same rows of `out`, whose sums are left to the caller.
inline void activate_rows(Activated how, const Mlp& mlp, int block, const Input& input, int first,
                          int count, Input& out) {
  Floats gates[kMostRows], ups[kMostRows];
  for (const int end = first + count; first < end; first += kMostRows) {
    const int some = std::min(kMostRows, end - first);
    multiply(mlp.gate, block, input, first, some, gates);
    multiply(mlp.up, block, input, first, some, ups);
    for (int i = 0; i < some; ++i)
      store_rounded(out.row(first + i) + block * kBlock, activated(how, gates[i], ups[i]));
  }
}

}  // namespace kvkeep
