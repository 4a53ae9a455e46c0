// Runs kernels that were built for another processor, under an emulator of it, on the memory of the
// process that asks for it: emulator.py. Nothing is known here of what they are handed.
//
// That process has tensors and structures full of pointers. A page of it is copied to the same
// address when a kernel first touches it, which is a fault until then. When the call is over, the
// bytes that have changed go back, and the copies are gone.
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
constexpr int kMost = 1 << 16;
constexpr int kArguments = 5;

struct Copy {
  unsigned char* at;
  const unsigned char* before;
  std::size_t size;
};

int memory;  // of the process that asks
Copy copies[kMost];
int count;
std::atomic_flag busy = ATOMIC_FLAG_INIT;  // more than one thread may fault

[[noreturn]] void give_up(const char* why, const void* at) {
  char text[200];
  const int length = std::snprintf(text, sizeof text, "%s at %p\n", why, at);
  if (write(2, text, length)) _exit(9);
  _exit(9);
}

unsigned char* room(void* at, std::size_t size, int protection) {
  void* found = mmap(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) give_up("no memory for a copy", at);
  return static_cast<unsigned char*>(found);
}

bool read_all(unsigned char* to, const unsigned char* at, std::size_t size) {
  return pread(memory, to, size, reinterpret_cast<off_t>(at)) == static_cast<ssize_t>(size);
}

// False where not all of it is there.
bool take(unsigned char* at, std::size_t size) {
  unsigned char* before = room(nullptr, size, PROT_READ | PROT_WRITE);
  if (!read_all(before, at, size)) {
    munmap(before, size);
    return false;
  }
  unsigned char* copy = room(nullptr, size, PROT_READ | PROT_WRITE);
  std::memcpy(copy, before, size);
  // An address that the emulator itself lies at is not given out, and another one is.
  if (room(at, size, PROT_NONE) != at) give_up("the emulator's own memory lies", at);
  // Into its place at once: another thread may be about to read it.
  if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at)
    give_up("a copy could not be put", at);
  if (count == kMost) give_up("too many pages", at);
  copies[count++] = {at, before, size};
  return true;
}

bool taken(const unsigned char* at) {
  for (int i = count - 1; i >= 0; --i)
    if (copies[i].at <= at && at < copies[i].at + copies[i].size) return true;
  return false;
}

void fetch(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const auto from = [=](std::size_t size) {
    return reinterpret_cast<unsigned char*>(address & ~(size - 1));
  };
  while (busy.test_and_set(std::memory_order_acquire)) {
  }
  const auto* page = from(kPage);
  // Of several pages one may be there already, taken by itself.
  bool alone = false;
  for (std::size_t i = 0; i < kPages; i += kPage) alone |= taken(from(kPages) + i);
  if (!taken(page) && (alone || !take(from(kPages), kPages)) && !take(from(kPage), kPage))
    give_up("a kernel touches what its caller does not have", info->si_addr);
  busy.clear(std::memory_order_release);
}

// The bytes of a line that have changed, in runs of them.
void give_back(const Copy& copy, std::size_t begin) {
  const std::size_t end = begin + kLine;
  for (std::size_t i = begin; i < end;) {
    const std::size_t first = i;
    while (i < end && copy.at[i] != copy.before[i]) ++i;
    const auto size = static_cast<ssize_t>(i - first);
    const auto at = reinterpret_cast<off_t>(copy.at + first);
    if (size && pwrite(memory, copy.at + first, size, at) != size)
      give_up("what a kernel wrote could not be given back", copy.at + first);
    if (!size) ++i;
  }
}

void give_back() {
  for (int i = 0; i < count; ++i) {
    const Copy& copy = copies[i];
    for (std::size_t line = 0; line < copy.size; line += kLine)
      if (std::memcmp(copy.at + line, copy.before + line, kLine)) give_back(copy, line);
  }
  for (; count > 0; --count) {
    munmap(copies[count - 1].at, copies[count - 1].size);
    munmap(const_cast<unsigned char*>(copies[count - 1].before), copies[count - 1].size);
  }
}

std::string call(const std::string& object, const std::string& function, std::istream& given) {
  static std::map<std::string, void*> objects;
  auto& library = objects[object];
  if (!library) library = dlopen(object.c_str(), RTLD_NOW);
  if (!library) return std::string("missing ") + dlerror();
  void* found = dlsym(library, function.c_str());
  if (!found) return "missing " + function;
  std::uint64_t argument[kArguments] = {};
  for (auto& each : argument) given >> each;
  // What a function does not ask for lies in registers that it does not read.
  const auto run = reinterpret_cast<int (*)(std::uint64_t, std::uint64_t, std::uint64_t,
                                            std::uint64_t, std::uint64_t)>(found);
  const int result = run(argument[0], argument[1], argument[2], argument[3], argument[4]);
  give_back();
  return "done " + std::to_string(result);
}

}  // namespace

int main(int, char** argv) {
  memory = open((std::string("/proc/") + argv[1] + "/mem").c_str(), O_RDWR | O_CLOEXEC);
  if (memory < 0) give_up("the memory of the process that asks is not to be had", nullptr);
  struct sigaction action = {};
  action.sa_sigaction = fetch;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb, object, function;
    words >> verb >> object >> function;
    std::cout << call(object, function, words) << std::endl;
  }
}
