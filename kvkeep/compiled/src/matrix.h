// Weight matrices in memory, and their products with a few rows.
#pragma once

#include "formats.h"
#include "integers.h"

namespace kvkeep {

// Weights [rows, columns]. kBf16, kF16, kF32: dense, row-major. Packed formats: `data` holds the
// codes of each block of 16 rows and each group of 32 columns, `scales` the scales of each block
// and each tile of columns.
struct Matrix {
  std::int32_t format;
  std::int32_t rows;
  std::int32_t columns;
  std::int32_t rounded;  // 1: multiply as if each weight had been rounded to bf16
  const void* data;
  const void* scales;
  const Bf16* bias;  // [rows], or null

  int blocks() const { return (rows + kBlock - 1) / kBlock; }
};

// A gated MLP (SwiGLU, arXiv:2002.05202): gate and up [MLP size, hidden], down [hidden, MLP size].
// Without a gate, it has no rows.
struct Mlp {
  Matrix gate, up, down;
};

// The number of rows in a block; the last one may have fewer than 16.
inline int rows_in_block(const Matrix& matrix, int block) {
  const int rows = matrix.rows - block * kBlock;
  return rows < kBlock ? rows : kBlock;
}

// Rows to multiply with a matrix, and what is derived from them: the sum of each group of 32
// columns, for formats with minima, and the group as integers.
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

  // Derive sums and integers; to be called for each row after it is written.
  void prepare_row(int i) const {
    for (int g = 0; g < columns / kGroup; ++g)
      row_sums(i)[g] = quantise_group(row(i) + g * kGroup, row_integers(i)[g]);
  }

  // Copy row j of other rows of the same width to row i, with all that is derived from it.
  void copy(int i, const ActivationRows& other, int j) const {
    const auto taken = [](auto* to, const auto* from, int count) {
      std::memcpy(to, from, std::size_t(count) * sizeof *to);
    };
    taken(row(i), other.row(j), columns);
    taken(row_sums(i), other.row_sums(j), columns / kGroup);
    taken(row_integers(i), other.row_integers(j), columns / kGroup);
  }
};

constexpr int kMaxRows = 16;  // rows multiplied with a block that is unpacked once

// Multiply the 16 rows of weights in `block` with `count` rows of input from `first` on. out: one
// register for each input row, its lanes the 16 products, bias added. The result of a row does not
// depend on `count`.
void multiply(const Matrix& matrix, int block, const ActivationRows& input, int first, int count,
              Floats* out);

// Unpack the rows of a block, rounded to bf16. out: [rows of the block, columns] of bf16 or floats.
template <typename To>
void unpack_block(const Matrix& matrix, int block, To* out);

// Unpack one row. out: [columns].
template <typename To>
void unpack_row(const Matrix& matrix, int row, To* out);

}  // namespace kvkeep
