// Vectors of float64 and their exponential function.
#pragma once

#include "../vec.h"

namespace MINIFLOAT_ISA {
namespace {

typedef double F64 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));
typedef int64_t I64 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));
typedef float Narrow __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES / 2)));

constexpr int kCount = MINIFLOAT_VECTOR_BYTES / 8;

inline F64 widen(const float* p) {
    Narrow v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, F64);
}

// Within 2 units in the last place for x <= 0; 0 below the logarithm of the smallest normal number, and for NaN.
// x = n log 2 + r: the series of r, then n into the exponent.
inline F64 exp(F64 x) {
    constexpr double kLowest = -708.0, kLog2e = 1.4426950408889634;
    constexpr double kLog2High = 6.93147180369123816490e-01, kLog2Low = 1.90821492927058770002e-10;
    constexpr double kRound = 6755399441055744.0;  // added, it leaves an integer in the low bits
    constexpr double kSeries[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                  1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0, 1.0};
    const F64 shifted = x * kLog2e + kRound;
    const F64 n = shifted - kRound;
    const F64 r = (x - n * kLog2High) - n * kLog2Low;
    F64 sum = r * (1.0 / 6227020800.0);
#pragma GCC unroll 13
    for (int i = 0; i < 13; ++i) sum = (i == 0 ? sum : sum * r) + kSeries[i];
    return bit_cast<F64>((bit_cast<I64>(sum) + (bit_cast<I64>(shifted) << 52)) & (x >= kLowest));
}

inline double total(F64 v) {
    double sum = 0.0;
    for (int lane = 0; lane < kCount; ++lane) sum += v[lane];
    return sum;
}

}  // namespace
}  // namespace MINIFLOAT_ISA
