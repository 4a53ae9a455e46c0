// Prefetching and spin waits, which all x86 sets share.
#pragma once

#include <immintrin.h>

namespace kvkeep {

KVKEEP_INLINE void prefetch(const void* x) {
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T0);
}

// Whether weights are prefetched with the non-temporal hint. AMD's processors then bypass the
// second cache: weights are read once per token, and the program's code stays cached there. Intel's
// fill the first cache alone, which has few line fill buffers: a token takes 2.5 times as long.
KVKEEP_INLINE bool prefers_nontemporal_prefetch() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}

KVKEEP_INLINE void prefetch_nontemporal(const void* x) {
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_NTA);
}

KVKEEP_INLINE void spin_pause() { _mm_pause(); }

}  // namespace kvkeep
