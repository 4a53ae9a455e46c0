/* Which instruction sets this processor runs. Built without any of them. */
#include <string.h>

#if defined(__x86_64__)
static int avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static int avx512(void) {
  return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* set: a name of kvkeep/compiled/instruction_sets.py. */
int kvkeep_cpu_runs(const char* set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(set, "avx2")) return avx2();
  if (!strcmp(set, "avx512")) return avx512();
  if (!strcmp(set, "avx512bf16")) return avx512() && __builtin_cpu_supports("avx512bf16");
#endif
  (void)set;
  return 0;
}

/* Whether its products of bfloat16 are as fast as those of float32. */
int kvkeep_cpu_multiplies_bf16(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
  if (__builtin_cpu_supports("amx-bf16")) return 1;
#endif
  return __builtin_cpu_supports("avx512bf16");
#else
  return 0;
#endif
}
