#pragma once

#include <chrono>

#include "decode.h"

namespace kvkeep {

// Adds the time since the last call to the phase that has just ended, where it is counted.
class PhaseClock {
 public:
  explicit PhaseClock(double* seconds) : seconds_(seconds) {
    if (seconds_) last_ = std::chrono::steady_clock::now();
  }
  void ends(Phase phase) {
    if (!seconds_) return;
    const auto now = std::chrono::steady_clock::now();
    seconds_[static_cast<int>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace kvkeep
