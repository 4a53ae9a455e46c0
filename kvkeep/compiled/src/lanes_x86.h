// What the sets of x86 share: memory that is asked for before it is needed, and a thread that
// waits.
#pragma once

#include <immintrin.h>

namespace kvkeep {

KVKEEP_INLINE void prefetch(const void* x) {
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T0);
}

// AMD's processors can fetch past the second cache: weights are read once for each token, and what
// runs between two tokens, the program, finds itself there again. Intel's then fill the first cache
// alone, which has few lines on their way at a time: a token takes 2.5 times as long.
KVKEEP_INLINE bool prefers_nontemporal_prefetch() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}

KVKEEP_INLINE void prefetch_nontemporal(const void* x) {
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_NTA);
}

KVKEEP_INLINE void spin_pause() { _mm_pause(); }

}  // namespace kvkeep
