// Powers of 2 in terms of lanes, where no instruction takes numbers apart.
#pragma once

namespace kvkeep {

// Where 2 to the x is neither 0 nor infinity, and a little further. A NaN stays: max and min give
// a NaN, or their second operand then.
KVKEEP_INLINE Floats clamp_exponent(Floats x) { return min(splat(160.f), max(splat(-160.f), x)); }

// x less its floor, and y times 2 to that floor: 0 or infinity far away.
KVKEEP_INLINE Floats fraction(Floats x) {
  x = clamp_exponent(x);
  return x - floor(x);
}
KVKEEP_INLINE Floats multiply_power(Floats y, Floats x) {
  // In two steps: what the whole power is need not be a float.
  const Ints whole = to_ints(floor(clamp_exponent(x))), some = shift_right_signed<1>(whole);
  const auto power = [](Ints n) { return as_floats(shift_left<23>(add(n, splat_int(127)))); };
  return y * power(some) * power(subtract(whole, some));
}

}  // namespace kvkeep
