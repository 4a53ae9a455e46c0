// Weight matrices as they lie in memory, and their products with a few rows.
#pragma once

#include "formats.h"
#include "integers.h"

namespace kvkeep {

// [rows, columns] weights. kBf16, kF16, kF32: row after row. Others: `data` holds for each block of
// 16 rows and each group of 32 columns the codes, `scales` for each block and each tile of columns
// what they are scaled by.
struct Matrix {
  std::int32_t format;
  std::int32_t rows;
  std::int32_t columns;
  std::int32_t rounded;  // 1: to be multiplied as if each weight had been rounded to bf16 before
  const void* data;
  const void* scales;
  const Bf16* bias;  // [rows], or null

  int blocks() const { return (rows + kBlock - 1) / kBlock; }
};

// A gated MLP (SwiGLU, arXiv:2002.05202): gate and up [inner, hidden], down [hidden, inner].
struct Mlp {
  Matrix gate, up, down;
};

// How many of the 16 rows of a block there are.
inline int rows_in_block(const Matrix& matrix, int block) {
  const int rows = matrix.rows - block * kBlock;
  return rows < kBlock ? rows : kBlock;
}

// The rows that matrices are multiplied with, and what is made of them: the sum of each group of
// 32, for the minima, and the group as integers.
struct ActivationRows {
  Activation* x;  // [count, columns]
  float* sums;    // [count, columns / 32]
  int columns;
  IntegerGroup* integers;  // [count, columns / 32]

  Activation* row(int i) const { return x + static_cast<std::ptrdiff_t>(i) * columns; }
  float* row_sums(int i) const {
    return sums + static_cast<std::ptrdiff_t>(i) * (columns / kGroup);
  }
  IntegerGroup* row_integers(int i) const {
    return integers + static_cast<std::ptrdiff_t>(i) * (columns / kGroup);
  }

  // To be called for each row once it is written.
  void prepare_row(int i) const {
    for (int g = 0; g < columns / kGroup; ++g)
      row_sums(i)[g] = quantise_group(row(i) + g * kGroup, row_integers(i)[g]);
  }

  // Row i becomes row j of another, as wide, with all that was made of that.
  void copy(int i, const ActivationRows& other, int j) const {
    const auto taken = [](auto* to, const auto* from, int count) {
      std::memcpy(to, from, std::size_t(count) * sizeof *to);
    };
    taken(row(i), other.row(j), columns);
    taken(row_sums(i), other.row_sums(j), columns / kGroup);
    taken(row_integers(i), other.row_integers(j), columns / kGroup);
  }
};

constexpr int kMaxRows = 16;  // multiplied with a block of weights that was unpacked once

// Products of 16 rows of weights, those of `block`, with `count` rows of input from `first` on.
// out: one register for each of these, its lanes the 16 products, bias added. What a row becomes
// does not depend on `count`.
void multiply(const Matrix& matrix, int block, const ActivationRows& input, int first, int count,
              Floats* out);

// The rows of a block, those that there are, rounded to bf16. out: [16, columns] of bf16 or floats.
template <typename To>
void unpack_block(const Matrix& matrix, int block, To* out);

// One row. out: [columns].
template <typename To>
void unpack_row(const Matrix& matrix, int row, To* out);

}  // namespace kvkeep
