// The threads of one call, which share out the pieces of a phase and meet at its end.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>

namespace kvkeep {

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  // Runs `work(i)` for each i below `count` once, `grain` of them at a time, on whichever thread is
  // free. Nothing after it may use what others computed before `meet`.
  template <typename Work>
  void share(int count, int grain, Work work) {
    for (;;) {
      const int first = next_.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) return;
      const int end = first + grain < count ? first + grain : count;
      for (int i = first; i < end; ++i) work(i);
    }
  }

  // Waits until all threads are here.
  void meet() {
    const int now = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(now + 1, std::memory_order_release);
      return;
    }
    // Spinning pays while every thread has a core; where one has lost its own, let it run.
    for (int spins = 0; phase_.load(std::memory_order_acquire) == now; ++spins) {
      if (spins < kSpins)
        _mm_pause();
      else
        sched_yield();
    }
  }

  template <typename Work>
  void share_and_meet(int count, int grain, Work work) {
    share(count, grain, work);
    meet();
  }

 private:
  static constexpr int kSpins = 4000;
  const int threads_;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace kvkeep
