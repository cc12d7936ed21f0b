// The exponential function and those made of it, a vector at a time.
#pragma once

#include "../linear/convert.h"

namespace MINIFLOAT_ISA {

// Within 2 units in the last place. 0 below the logarithm of the smallest normal number; never Inf. x = n log 2 + r:
// the series of r, then n into the exponent.
inline F32 exp(F32 x) {
    constexpr float kLowest = -87.33654f, kHighest = 88.37f;
    constexpr float kLog2e = 1.44269504f;
    constexpr float kLog2High = 0.693359375f, kLog2Low = -2.12194440e-4f;  // their sum is log 2; the high part is short
    constexpr float kRound = 12582912.0f;  // added, it leaves an integer in the low bits
    const F32 bounded = max(broadcast(kLowest), min(broadcast(kHighest), x));  // NaN is the second argument: it stays
    const F32 shifted = bounded * kLog2e + kRound;
    const F32 n = shifted - kRound;
    const F32 r = (bounded - n * kLog2High) - n * kLog2Low;
    F32 sum = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
    sum = sum * r + (1.0f / 120.0f);
    sum = sum * r + (1.0f / 24.0f);
    sum = sum * r + (1.0f / 6.0f);
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 not_less = _mm512_cmp_ps_mask(x, broadcast(kLowest), _CMP_NLT_UQ);
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), kMantissaBits);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(not_less, _mm512_castps_si512(sum), exponent));
#else
    const U32 scaled = bit_cast<U32>(sum) + (bit_cast<U32>(shifted) << kMantissaBits);
    return bit_cast<F32>(scaled & ~bit_cast<U32>(x < kLowest));
#endif
}

// 1 / (1 + e^-x).
inline F32 sigmoid(F32 x) { return 1.0f / (exp(-x) + 1.0f); }

// Lanes of `a` where a comparison holds, else of `b`.
inline F32 choose(I32 mask, F32 a, F32 b) { return bit_cast<F32>(select(bit_cast<U32>(mask), bit_cast<U32>(a), bit_cast<U32>(b))); }

// Within 2 units in the last place; NaN for NaN. An odd polynomial near zero, where the exponential loses digits.
inline F32 tanh(F32 x) {
    const F32 square = x * x;
    F32 sum = square * -5.70498872745e-3f + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    const F32 near = sum * square * x + x;
    const F32 magnitude = bit_cast<F32>(bit_cast<U32>(x) & 0x7fffffffu);
    const F32 far = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
    const F32 with_sign = bit_cast<F32>(bit_cast<U32>(far) | (bit_cast<U32>(x) & 0x80000000u));
    return choose(magnitude < 0.625f, near, with_sign);
}

// The error function, within 1.5e-7. Source: Abramowitz and Stegun, 7.1.26.
inline F32 erf(F32 x) {
    const F32 magnitude = bit_cast<F32>(bit_cast<U32>(x) & 0x7fffffffu);
    const F32 t = 1.0f / (magnitude * 0.3275911f + 1.0f);
    F32 sum = t * 1.061405429f - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    const F32 value = 1.0f - sum * t * exp(-(x * x));
    return bit_cast<F32>(bit_cast<U32>(value) | (bit_cast<U32>(x) & 0x80000000u));
}

}  // namespace MINIFLOAT_ISA
