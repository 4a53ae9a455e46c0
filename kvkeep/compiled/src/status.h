// The status that a call returns to Python: C has no exceptions, so none may leave a call.
#pragma once

#include <new>
#include <stdexcept>

namespace kvkeep {

// kvkeep/compiled/binding.py has the same numbers.
enum Status : int { kDone = 0, kNoKernel = 1, kNoMemory = 2, kFailed = 3, kNotFinite = 4 };

// Run `work`, which returns a Status, and turn exceptions into one. A call must allocate all memory
// before its threads start: an exception within them could not be caught here.
template <typename Work>
int run_guarded(Work work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::length_error&) {  // a vector larger than any memory
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

}  // namespace kvkeep
