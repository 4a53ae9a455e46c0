// Weight matrices as they lie in memory, and their products with a few rows.
#pragma once

#include "formats.h"

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

// Which of the 16 rows of a block there are.
inline __mmask16 rows_of(const Matrix& matrix, int block) {
  const int rows = matrix.rows - block * kBlock;
  return static_cast<__mmask16>((1u << (rows < kBlock ? rows : kBlock)) - 1);
}

// The rows that matrices are multiplied with, and the sum of each group of 32, for the minima.
struct Input {
  Bf16* x;      // [count, columns]
  float* sums;  // [count, columns / 32]
  int columns;

  const Bf16* row(int i) const { return x + static_cast<long>(i) * columns; }
  Bf16* row(int i) { return x + static_cast<long>(i) * columns; }
  float* row_sums(int i) const { return sums + static_cast<long>(i) * (columns / kGroup); }

  // To be called for each row once it is written.
  void sum_up(int i) const {
    for (int g = 0; g < columns / kGroup; ++g) {
      const Bf16* from = row(i) + g * kGroup;
      row_sums(i)[g] =
          _mm512_reduce_add_ps(_mm512_add_ps(load_bf16(from), load_bf16(from + kLanes)));
    }
  }
};

constexpr int kMostRows = 16;  // multiplied with a block of weights that was unpacked once

// Products of 16 rows of weights, those of `block`, with `count` rows of input from `first` on.
// out: one register for each of these, its lanes the 16 products, bias added. What a row becomes
// does not depend on `count`.
void multiply(const Matrix& matrix, int block, const Input& input, int first, int count,
              __m512* out);

// The rows of a block as bf16, those that there are. out: [16, columns].
void unpack_block(const Matrix& matrix, int block, Bf16* out);

// One row as bf16. out: [columns].
void unpack_row(const Matrix& matrix, int row, Bf16* out);

}  // namespace kvkeep
