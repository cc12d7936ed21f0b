// Elements of E2M1 as integers: twice an element, and as bytes for products of unsigned with signed bytes, kE2M1Offset
// more, whose part in a sum is kE2M1Offset times the sum of the other factors.
#pragma once

#include "../vec.h"

namespace MINIFLOAT_ISA {

constexpr int kE2M1Offset = 12;

constexpr int e2m1_twice(int code) {
    constexpr int kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    return code & 8 ? -kTwice[code & 7] : kTwice[code & 7];
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The bytes of the low and of the high nibbles of `codes`.
inline void e2m1_bytes(__m256i codes, __m256i& low, __m256i& high) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(0xf);
    low = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
    high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
}
#endif

}  // namespace MINIFLOAT_ISA
