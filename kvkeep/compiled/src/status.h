// What a call returns to Python: no exception may leave it, since C knows of none.
#pragma once

#include <new>
#include <stdexcept>

namespace kvkeep {

// kvkeep/compiled/binding.py has the same numbers.
enum Status : int { kDone = 0, kNoKernel = 1, kNoMemory = 2, kFailed = 3, kNotFinite = 4 };

// Runs `work`, which returns a status. All memory of a call is to be had before its threads start:
// an exception within them could not be caught here.
template <typename Work>
int run_guarded(Work work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::length_error&) {  // a vector too long for any memory
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

}  // namespace kvkeep
