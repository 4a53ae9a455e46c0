// Rows of activations for one call, and their products with matrices.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "matrix.h"
#include "lanes.h"

namespace kvkeep {

struct ActivationBuffer : ActivationRows {
  ActivationBuffer(int count, int columns)
      : ActivationRows{nullptr, nullptr, columns, nullptr},
        x_(std::size_t(count) * columns),
        sums_(std::size_t(count) * (columns / kGroup)),
        integers_(std::size_t(count) * (columns / kGroup)) {
    x = x_.get(), sums = sums_.get(), integers = integers_.get();
  }

  // Set row i from `columns` bf16.
  void set_row(int i, const Bf16* from) {
    for (int c = 0; c < columns; c += kLanes) store_rounded(row(i) + c, load(from + c));
    prepare_row(i);
  }

  Buffer<Activation> x_;
  Buffer<float> sums_;
  Buffer<IntegerGroup> integers_;
};

// Call `each(i, row, products)` for `count` rows of input from `first` on: their products with the
// 16 rows of the matrix in `block`, which begin with `row`.
template <typename Each>
void multiply_rows(const Matrix& matrix, int block, const ActivationRows& input, int first,
                   int count, Each each) {
  Floats products[kMaxRows];
  for (const int end = first + count; first < end; first += kMaxRows) {
    const int batch = std::min(kMaxRows, end - first);
    multiply(matrix, block, input, first, batch, products);
    for (int i = 0; i < batch; ++i) each(first + i, block * kBlock, products[i]);
  }
}

// The gated activation of an MLP.
enum GateActivation : std::int32_t {
  kSilu,         // x * sigmoid(x)
  kGeluTanh,     // GELU by tanh (arXiv:1606.08415)
  kClampedSilu,  // x * sigmoid(1.702 x), and up + 1, both clamped to 7 (gpt-oss, arXiv:2508.10925)
  kSquaredRelu,  // the square of a ReLU, of the up projection, without a gate (arXiv:2109.08668)
};

inline Floats activate_gate(GateActivation activation, Floats gate, Floats up) {
  if (activation == kSilu) return sigmoid_times(gate, up);
  if (activation == kGeluTanh) {
    const Floats cubed = gate * gate * gate;
    const Floats inner = multiply_add(cubed, splat(0.044715f), gate) * splat(2 * 0.7978845608f);
    return gate / (splat(1.f) + exp2(inner * splat(-kLog2E))) * up;
  }
  const Floats low = min(gate, splat(7.f));
  const Floats shifted_up = max(min(up, splat(7.f)), splat(-7.f)) + splat(1.f);
  return low / (splat(1.f) + exp2(low * splat(-1.702f * kLog2E))) * shifted_up;
}

// Compute 16 columns of an MLP's activations, those of `block`, for `count` rows of input from
// `first` on. multiplier: of gate values. The caller must call `prepare_row` for the rows of `out`.
inline void activate_rows(GateActivation activation, const Mlp& mlp, int block,
                          const ActivationRows& input, int first, int count, ActivationRows& out,
                          float multiplier = 1.f) {
  Floats gates[kMaxRows], ups[kMaxRows];
  for (const int end = first + count; first < end; first += kMaxRows) {
    const int batch = std::min(kMaxRows, end - first);
    multiply(mlp.up, block, input, first, batch, ups);
    if (activation == kSquaredRelu) {
      for (int i = 0; i < batch; ++i) {
        const Floats up = max(ups[i], zeros());
        store_rounded(out.row(first + i) + block * kBlock, up * up);
      }
      continue;
    }
    multiply(mlp.gate, block, input, first, batch, gates);
    for (int i = 0; i < batch; ++i)
      store_rounded(out.row(first + i) + block * kBlock,
                    activate_gate(activation, gates[i] * splat(multiplier), ups[i]));
  }
}

}  // namespace kvkeep
