// Uninitialised, aligned memory for one call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>

namespace kvkeep {

template <typename T>
class Buffer {
 public:
  explicit Buffer(std::size_t size)
      : data_(static_cast<T*>(::operator new(bytes(size), std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  T& operator[](std::size_t i) const { return data_[i]; }

 private:
  static std::size_t bytes(std::size_t size) {
    if (size > std::numeric_limits<std::size_t>::max() / 2 / sizeof(T)) throw std::bad_alloc();
    return std::max<std::size_t>(size, 1) * sizeof(T);
  }

  T* data_;
};

}  // namespace kvkeep
