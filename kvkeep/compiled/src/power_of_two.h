// Powers of 2 for sets without instructions for exponents, in terms of lanes.
#pragma once

namespace kvkeep {

// Clamp x to where 2 to the x is neither 0 nor infinity, and a little further. A NaN stays: max and
// min return a NaN, or their second operand.
KVKEEP_INLINE Floats clamp_exponent(Floats x) { return min(splat(160.f), max(splat(-160.f), x)); }

// fraction(x): x less its floor. multiply_power(y, x): y times 2 to the floor of x; 0 or infinity
// far away.
KVKEEP_INLINE Floats fraction(Floats x) {
  x = clamp_exponent(x);
  return x - floor(x);
}
KVKEEP_INLINE Floats multiply_power(Floats y, Floats x) {
  // In two steps: the whole power may not be a float.
  const Ints whole = to_ints(floor(clamp_exponent(x))), half = shift_right_signed<1>(whole);
  const auto power = [](Ints n) { return as_floats(shift_left<23>(add(n, splat_int(127)))); };
  return y * power(half) * power(subtract(whole, half));
}

}  // namespace kvkeep
