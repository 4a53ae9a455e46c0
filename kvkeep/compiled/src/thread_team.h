// The threads of one call, which share the pieces of a phase and wait for each other at its end.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <vector>

#include "lanes.h"

namespace kvkeep {

class ThreadTeam {
 public:
  explicit ThreadTeam(int threads) : threads_(threads), next_(threads) {}

  // Run `work(me)` in each thread, or in the calling one alone if OpenMP does not start them all:
  // the others would wait for those that there are not.
  template <typename Work>
  void run(Work work) {
    bool complete = true;
#pragma omp parallel num_threads(threads_)
    {
      const SubnormalsFlushed scope;
      if (omp_get_num_threads() == threads_)
        work(omp_get_thread_num());
      else if (omp_get_thread_num() == 0)
        complete = false;
    }
    if (complete) return;
    const SubnormalsFlushed scope;
    threads_ = 1;
    work(0);
  }

  // Run `work(i)` once for each i below `count`. Each thread begins with a range of its own, so
  // that it reads contiguous memory, and takes `grain` pieces at a time; a thread that is done
  // takes pieces of the others. No thread may use another's results before `wait_for_all`.
  template <typename Work>
  void run_shared(int me, int count, int grain, Work work) {
    for (int turn = 0; turn < threads_; ++turn) {
      const int whose = (me + turn) % threads_;
      const int begin = static_cast<int>(static_cast<std::ptrdiff_t>(count) * whose / threads_);
      const int end = static_cast<int>(static_cast<std::ptrdiff_t>(count) * (whose + 1) / threads_);
      for (;;) {
        const int first = begin + next_[whose].value.fetch_add(grain, std::memory_order_relaxed);
        if (first >= end) break;
        for (int i = first; i < first + grain && i < end; ++i) work(i);
      }
    }
  }

  // Wait until all threads have arrived.
  void wait_for_all() {
    const int now = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      for (auto& next : next_) next.value.store(0, std::memory_order_relaxed);
      phase_.store(now + 1, std::memory_order_release);
      return;
    }
    // Spinning pays while every thread has a core; otherwise yield the core to a waiting thread.
    for (int spins = 0; phase_.load(std::memory_order_acquire) == now; ++spins) {
      if (spins < kSpins)
        spin_pause();
      else
        sched_yield();
    }
  }

  template <typename Work>
  void run_shared_then_wait(int me, int count, int grain, Work work) {
    run_shared(me, count, grain, work);
    wait_for_all();
  }

 private:
  struct alignas(64) Next {
    std::atomic<int> value{0};
  };

  static constexpr int kSpins = 4000;
  int threads_;
  std::vector<Next> next_;  // of each thread's range
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace kvkeep
