#pragma once

#include <cmath>

#include "lanes.h"

namespace kvkeep {

// How a model norms. centred: subtract the mean first, as LayerNorm does (arXiv:1607.06450).
// offset: added to the weights.
struct NormParams {
  float eps, offset;
  bool centred;
};

// RMSNorm (arXiv:1910.07467) of `size` values, a multiple of 16. `weight(i)` returns the 16 weights
// from i on, and `to(i, values)` takes 16 results.
template <typename Weight, typename To>
void normalise_by(Weight weight, const float* x, const NormParams& params, int size, To to) {
  Floats mean = zeros();
  if (params.centred) {
    for (int i = 0; i < size; i += kLanes) mean = mean + load(x + i);
    mean = splat(reduce_add(mean) / size);
  }
  Floats squares = zeros();
  for (int i = 0; i < size; i += kLanes) {
    const Floats value = load(x + i) - mean;
    squares = multiply_add(value, value, squares);
  }
  const Floats factor = splat(1.f / std::sqrt(reduce_add(squares) / size + params.eps));
  for (int i = 0; i < size; i += kLanes) to(i, (load(x + i) - mean) * factor * weight(i));
}

template <typename To>
void normalise(const float* x, const Bf16* weight, const NormParams& params, int size, To to) {
  normalise_by([=](int i) { return load(weight + i) + splat(params.offset); }, x, params, size, to);
}

// The same without a weight.
template <typename To>
void normalise(const float* x, const NormParams& params, int size, To to) {
  normalise_by([](int) { return splat(1.f); }, x, params, size, to);
}

}  // namespace kvkeep
