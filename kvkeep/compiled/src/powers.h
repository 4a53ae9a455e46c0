// Powers of 2 in terms of lanes, where no instruction takes numbers apart.
#pragma once

namespace kvkeep {

// Where 2 to the x is neither 0 nor infinity, and a little further. A NaN stays: max and min give
// a NaN, or their second operand then.
KVKEEP_INLINE Floats within_powers(Floats x) { return min(all(160.f), max(all(-160.f), x)); }

// x less its floor, and y times 2 to that floor: 0 or infinity far away.
KVKEEP_INLINE Floats fraction(Floats x) {
  x = within_powers(x);
  return x - floor_of(x);
}
KVKEEP_INLINE Floats times_power(Floats y, Floats x) {
  // In two steps: what the whole power is need not be a float.
  const Ints whole = to_ints(floor_of(within_powers(x))), some = right_signed<1>(whole);
  const auto power = [](Ints n) { return as_floats(left<23>(sum(n, ints(127)))); };
  return y * power(some) * power(difference(whole, some));
}

}  // namespace kvkeep
