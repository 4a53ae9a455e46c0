/* Which instruction sets this processor runs. Built without any of them. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Compilers name some flags differently, or not at all: the bits of CPUID are the same. */
static int f16c(void) {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1U << 29));
}

static int avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c();
}

static int avxvnni(void) {
  unsigned eax, ebx, ecx, edx;
  return avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1U << 4));
}

static int avx512(void) {
  return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int avx512bf16(void) {
  return avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* A process may use tiles only once Linux has permitted it: ARCH_REQ_XCOMP_PERM for XTILEDATA. */
static int amx(void) {
  const unsigned bf16 = 1u << 22, tile = 1u << 24;
  unsigned a, b, c, d;
  return avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16) && (d & tile) &&
         !syscall(SYS_arch_prctl, 0x1023, 18);
}
#else
static int amx(void) { return 0; }
#endif
#endif

/* The system says what a processor of Arm has: no instruction is tried. */
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

/* HWCAP_ASIMD, HWCAP_ASIMDDP and HWCAP2_BF16, which older headers lack. */
static int neon(void) { return (getauxval(AT_HWCAP) & (1UL << 1)) != 0; }
static int neon_bf16(void) {
  return neon() && (getauxval(AT_HWCAP) & (1UL << 20)) && (getauxval(AT_HWCAP2) & (1UL << 14));
}
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static int neon(void) { return 1; }
static int neon_bf16(void) {
  int has = 0;
  size_t size = sizeof has;
  return !sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, 0, 0) && has;
}
#endif

/* set: a name of kvkeep/compiled/instruction_sets.py. */
int kvkeep_cpu_runs(const char* set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(set, "avx2")) return avx2();
  if (!strcmp(set, "avxvnni")) return avxvnni();
  if (!strcmp(set, "avx512")) return avx512();
  if (!strcmp(set, "avx512bf16")) return avx512bf16();
  if (!strcmp(set, "amx")) return amx();
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
  if (!strcmp(set, "neon")) return neon();
  if (!strcmp(set, "neonbf16")) return neon_bf16();
#endif
  (void)set;
  return 0;
}

/* Whether the library's products of bfloat16 are as fast here as those of float32. */
int kvkeep_cpu_multiplies_bf16(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
  if (__builtin_cpu_supports("amx-bf16")) return 1;
#endif
  return __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__) && defined(__linux__)
  return neon_bf16();
#else
  return 0; /* on a Mac, too: PyTorch multiplies float32 by Accelerate there, and bfloat16 not */
#endif
}
