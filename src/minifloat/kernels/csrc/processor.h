// The instruction sets that a build has (MINIFLOAT_WITH_<name>, from CMakeLists.txt), and whether the processor runs them.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(MINIFLOAT_WITH_neon_bf16)
#include <sys/auxv.h>
#endif
#if defined(MINIFLOAT_WITH_amx)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace minifloat {

// The features are those that CMakeLists.txt compiles the object files with.
#if defined(__x86_64__)
// Some compilers' runtimes do not call it when the library is loaded.
inline void init_processor() { __builtin_cpu_init(); }

// Compilers know different feature names; for names that some compilers do not know, CPUID is used.
inline bool has_avx2() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);  // F16C
}

inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

inline bool has_avx512_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512() || !__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 8 & 1);  // GFNI
}

inline bool has_avx512_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx512_vnni() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// AMD's processors (Zen 4 and later) issue VDPBF16PS as often as a multiply-add and do twice the work with it. Sapphire
// Rapids issues it a quarter as often, so that float32 multiply-adds are faster.
inline bool prefers_float32() { return __builtin_cpu_is("intel"); }
#else
inline void init_processor() {}
inline bool prefers_float32() { return false; }
#endif

#if defined(MINIFLOAT_WITH_amx)
inline bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tile = d >> 24 & 1, bf16 = d >> 22 & 1;
    if (!tile || !bf16) return false;
    // A process must request the tile registers from Linux; its threads and forks inherit the permission.
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(MINIFLOAT_WITH_neon_bf16)
inline bool has_neon_bf16() {
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16 of Linux
    return (getauxval(AT_HWCAP2) & kBf16) != 0;
}
#endif

inline bool has_baseline() { return true; }

}  // namespace minifloat

// MINIFLOAT_FOR_EACH_ISA(entry) is entry(name) for every instruction set of the build, fastest first; where
// prefers_float32(), avx512_vnni comes before avx512_bf16.
#if defined(MINIFLOAT_WITH_amx)
#define MINIFLOAT_AMX(entry) entry(amx)
#else
#define MINIFLOAT_AMX(entry)
#endif
#if defined(MINIFLOAT_WITH_avx512_bf16)
#define MINIFLOAT_AVX512_BF16(entry) entry(avx512_bf16)
#else
#define MINIFLOAT_AVX512_BF16(entry)
#endif
#if defined(MINIFLOAT_WITH_avx512_vnni)
#define MINIFLOAT_AVX512_VNNI(entry) entry(avx512_vnni)
#else
#define MINIFLOAT_AVX512_VNNI(entry)
#endif
#if defined(MINIFLOAT_WITH_avx512)
#define MINIFLOAT_AVX512(entry) entry(avx512)
#else
#define MINIFLOAT_AVX512(entry)
#endif
#if defined(MINIFLOAT_WITH_avx2)
#define MINIFLOAT_AVX2(entry) entry(avx2)
#else
#define MINIFLOAT_AVX2(entry)
#endif
#if defined(MINIFLOAT_WITH_neon_bf16)
#define MINIFLOAT_NEON_BF16(entry) entry(neon_bf16)
#else
#define MINIFLOAT_NEON_BF16(entry)
#endif
#define MINIFLOAT_FOR_EACH_ISA(entry)                                                                                 \
    MINIFLOAT_AMX(entry) MINIFLOAT_AVX512_BF16(entry) MINIFLOAT_AVX512_VNNI(entry) MINIFLOAT_AVX512(entry)             \
        MINIFLOAT_AVX2(entry) MINIFLOAT_NEON_BF16(entry) entry(baseline)
