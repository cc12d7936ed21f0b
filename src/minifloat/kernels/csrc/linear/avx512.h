// What the AVX-512 paths share: pieces of weights and inline scales decoded in registers.
#pragma once

#if defined(__AVX512F__)

#include "../intrinsics.h"
#include "convert.h"

namespace MINIFLOAT_ISA {

constexpr int kE4M3MantissaBits = 3;
constexpr int kHalfMantissaBits = 10;
constexpr int kHalfFromE4M3 = kHalfMantissaBits - kE4M3MantissaBits;
constexpr float kHalfRebias = 0x1p8f;  // the exponent biases of E4M3 and half differ by 8
constexpr int16_t kHalfBitsOfE4M3 = static_cast<int16_t>(0xbf80);

// How far ahead of its use a line of weights is asked for: into the second cache first, for the time that memory takes,
// then into the first. Measured for E4M3: 83% of the read bandwidth with the near one alone, 96% with
// both; probably because a line on its way from memory straight into the first cache holds one of its few fill buffers.
constexpr int64_t kFarBytes = 3072;
constexpr int64_t kNearBytes = 512;

inline void prefetch_ahead(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p + kNearBytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p + kFarBytes), _MM_HINT_T1);
}

// Two floats of a 32-bit word that holds a pair of bf16.
inline __m512 first_of_pair(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
inline __m512 second_of_pair(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

// 2^-distance of 16 E8M0 distances.
inline __m512 e8m0_scales(const uint8_t* distances) {
    const __m512i d = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(distances)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kBias), d), kMantissaBits));
}

// 16 E4M3 scales, 2^-8 of them: the factor is for the caller to put where it costs nothing.
inline __m512 e4m3_scales(const uint8_t* codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, kHalfFromE4M3), _mm256_set1_epi16(kHalfBitsOfE4M3));
    return _mm512_cvtph_ps(half);
}

}  // namespace MINIFLOAT_ISA

#endif
