// Runs kernels for another processor, under its emulator, on the memory of the test process
// (emulator.py). It needs no description of their arguments.
//
// The test process has tensors and structures full of pointers. Its pages are copied to the same
// addresses when a kernel first touches them, which faults until then. After the call the changed
// bytes are written back and the copies are dropped.
//
// Standard input:  call OBJECT FUNCTION ARGUMENT ...     integers and addresses
// Standard output: done RESULT, or: missing WHAT
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace {

constexpr std::size_t kPage = 4096, kPages = 16 * kPage, kLine = 256;
constexpr int kMaxCopies = 1 << 16;
constexpr int kArguments = 6;

struct Copy {
  unsigned char* at;
  const unsigned char* before;
  std::size_t size;
};

int memory;  // of the test process
Copy copies[kMaxCopies];
int count;
std::atomic_flag busy = ATOMIC_FLAG_INIT;  // several threads may fault

[[noreturn]] void fail(const char* why, const void* at) {
  char text[200];
  const int length = std::snprintf(text, sizeof text, "%s at %p\n", why, at);
  if (write(2, text, length)) _exit(9);
  _exit(9);
}

unsigned char* allocate(void* at, std::size_t size, int protection) {
  void* found = mmap(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) fail("no memory for a copy", at);
  return static_cast<unsigned char*>(found);
}

bool read_all(unsigned char* to, const unsigned char* at, std::size_t size) {
  return pread(memory, to, size, reinterpret_cast<off_t>(at)) == static_cast<ssize_t>(size);
}

// Copy a range to the same address. Returns false where not all of it is mapped.
bool copy_range(unsigned char* at, std::size_t size) {
  unsigned char* before = allocate(nullptr, size, PROT_READ | PROT_WRITE);
  if (!read_all(before, at, size)) {
    munmap(before, size);
    return false;
  }
  unsigned char* copy = allocate(nullptr, size, PROT_READ | PROT_WRITE);
  std::memcpy(copy, before, size);
  // mmap returns another address where the emulator's own memory is.
  if (allocate(at, size, PROT_NONE) != at) fail("the emulator's own memory lies", at);
  // Move it into place atomically: another thread may be about to read it.
  if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at)
    fail("a copy could not be put", at);
  if (count == kMaxCopies) fail("too many pages", at);
  copies[count++] = {at, before, size};
  return true;
}

bool copied(const unsigned char* at) {
  for (int i = count - 1; i >= 0; --i)
    if (copies[i].at <= at && at < copies[i].at + copies[i].size) return true;
  return false;
}

void handle_fault(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const auto from = [=](std::size_t size) {
    return reinterpret_cast<unsigned char*>(address & ~(size - 1));
  };
  while (busy.test_and_set(std::memory_order_acquire)) {
  }
  const auto* page = from(kPage);
  // One of several pages may have been copied already.
  bool alone = false;
  for (std::size_t i = 0; i < kPages; i += kPage) alone |= copied(from(kPages) + i);
  if (!copied(page) && (alone || !copy_range(from(kPages), kPages)) &&
      !copy_range(from(kPage), kPage))
    fail("a kernel touches memory that its caller does not have", info->si_addr);
  busy.clear(std::memory_order_release);
}

// Write back the changed bytes of a line, run by run.
void write_back(const Copy& copy, std::size_t begin) {
  const std::size_t end = begin + kLine;
  for (std::size_t i = begin; i < end;) {
    const std::size_t first = i;
    while (i < end && copy.at[i] != copy.before[i]) ++i;
    const auto size = static_cast<ssize_t>(i - first);
    const auto at = reinterpret_cast<off_t>(copy.at + first);
    if (size && pwrite(memory, copy.at + first, size, at) != size)
      fail("a kernel's writes could not be copied back", copy.at + first);
    if (!size) ++i;
  }
}

void write_back() {
  for (int i = 0; i < count; ++i) {
    const Copy& copy = copies[i];
    for (std::size_t line = 0; line < copy.size; line += kLine)
      if (std::memcmp(copy.at + line, copy.before + line, kLine)) write_back(copy, line);
  }
  for (; count > 0; --count) {
    munmap(copies[count - 1].at, copies[count - 1].size);
    munmap(const_cast<unsigned char*>(copies[count - 1].before), copies[count - 1].size);
  }
}

std::string call(const std::string& object, const std::string& function, std::istream& arguments) {
  static std::map<std::string, void*> objects;
  auto& library = objects[object];
  if (!library) library = dlopen(object.c_str(), RTLD_NOW);
  if (!library) return std::string("missing ") + dlerror();
  void* found = dlsym(library, function.c_str());
  if (!found) return "missing " + function;
  std::uint64_t argument[kArguments] = {};
  for (auto& value : argument) arguments >> value;
  // Superfluous arguments are in registers that the function does not read.
  const auto run = reinterpret_cast<int (*)(std::uint64_t, std::uint64_t, std::uint64_t,
                                            std::uint64_t, std::uint64_t, std::uint64_t)>(found);
  const int result =
      run(argument[0], argument[1], argument[2], argument[3], argument[4], argument[5]);
  write_back();
  return "done " + std::to_string(result);
}

}  // namespace

int main(int, char** argv) {
  memory = open((std::string("/proc/") + argv[1] + "/mem").c_str(), O_RDWR | O_CLOEXEC);
  if (memory < 0) fail("the memory of the test process cannot be opened", nullptr);
  struct sigaction action = {};
  action.sa_sigaction = handle_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb, object, function;
    words >> verb >> object >> function;
    std::cout << call(object, function, words) << std::endl;
  }
}
