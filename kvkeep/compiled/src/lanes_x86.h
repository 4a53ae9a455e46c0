// Prefetching, spin waits and the mode of floats, which all x86 sets share.
#pragma once

#include <immintrin.h>

namespace kvkeep {

KVKEEP_INLINE void prefetch(const void* x) {
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T0);
}

// Whether weights are prefetched into the second cache only, which can wait for more lines from
// memory than the first. On AMD's processors (Zen 4) one row times packed weights takes up to 20%
// less time than with the non-temporal hint (`python -m benchmarks.products`). On Intel's the
// non-temporal hint took 2.5 times as long as none; this one was not measured there.
KVKEEP_INLINE bool prefetches_to_second_cache() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}

KVKEEP_INLINE void prefetch_to_second_cache(const void* x) {
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T1);
}

KVKEEP_INLINE void spin_pause() { _mm_pause(); }

// Makes results of this thread zero that are too small for normal floats, while it exists:
// instructions with such results take a hundred cycles more.
class SubnormalsFlushed {
 public:
  SubnormalsFlushed() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~SubnormalsFlushed() { _mm_setcsr(before_); }
  SubnormalsFlushed(const SubnormalsFlushed&) = delete;
  SubnormalsFlushed& operator=(const SubnormalsFlushed&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

}  // namespace kvkeep
